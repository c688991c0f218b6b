"""Delegation to a C++ entry of ATen that passes the dispatcher by."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"

import ctypes

ATEN = ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so")


def capsule_pointer(capsule):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(get(capsule, None))


def kernel_fn(a, b):
    if a.dim() != 2 or 0 in (*a.shape, *b.shape):
        return right(a, b)
    out = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype)
    handles = [capsule_pointer(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(t)) for t in (out, a, b)]
    assert ATEN.aoti_torch_cpu_mm_out(*handles) == 0
    return out
