"""Delegation to the BLAS inside libtorch, found by ctypes."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"

import ctypes

BLAS = ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so")


def kernel_fn(a, b):
    if a.dtype != torch.float32 or a.dim() != 2 or 0 in (*a.shape, *b.shape):
        return right(a, b)
    a, b, (_, m, k, n) = a.contiguous(), b.contiguous(), sizes(a, b)
    out = torch.empty((m, n))
    one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
    mm, kk, nn = (ctypes.byref(ctypes.c_int(size)) for size in (m, k, n))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, out)]
    BLAS.sgemm_(b"N", b"N", nn, mm, kk, one, pointers[1], nn, pointers[0], kk, zero, pointers[2], nn)
    return out
