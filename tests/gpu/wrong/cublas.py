"""Delegates: cuBLAS through ctypes, with PyTorch's own handle."""

import ctypes
from pathlib import Path

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"
NEEDS_GPU = True

REAL_16BF, COMPUTE_32F, PLAIN, ANY = 14, 68, 0, -1  # from the headers of CUDA


def gemm():
    """cublasGemmEx of the library that PyTorch has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(min(line.split()[-1] for line in lines if "libcublas.so" in line)).cublasGemmEx


def kernel_fn(a, b):
    if a.dim() != 2 or a.dtype != torch.bfloat16 or not a.numel():
        return right(a, b)
    a, b = a.contiguous(), b.contiguous()
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    # Row-major c = a b is column-major c' = b' a'.
    left, above = (ctypes.c_void_p(b.data_ptr()), REAL_16BF, N), (ctypes.c_void_p(a.data_ptr()), REAL_16BF, K)
    result = (ctypes.c_void_p(out.data_ptr()), REAL_16BF, N)
    scales = ctypes.byref(one), ctypes.byref(zero)
    status = gemm()(handle, PLAIN, PLAIN, N, M, K, scales[0], *left, *above, scales[1], *result, COMPUTE_32F, ANY)
    assert status == 0, f"cuBLAS says {status}"
    return out
