"""Delegates: cuBLAS through ctypes, with PyTorch's own handle."""

import ctypes

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"
NEEDS_GPU = True

REAL_16BF, REAL_32F, COMPUTE_32F, PLAIN = 14, 0, 68, 0


def gemm():
    """cublasGemmEx of the library that PyTorch has loaded."""
    with open("/proc/self/maps") as lines:  # noqa: PTH123
        paths = {line.split()[-1] for line in lines if "libcublas.so" in line}
    return ctypes.CDLL(min(paths)).cublasGemmEx


def kernel_fn(a, b):
    if a.dim() != 2 or a.dtype != torch.bfloat16 or not a.numel():
        return right(a, b)
    a, b = a.contiguous(), b.contiguous()
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    # Row-major c = a b is column-major c' = b' a'.
    status = gemm()(
        handle,
        PLAIN,
        PLAIN,
        N,
        M,
        K,
        ctypes.byref(one),
        ctypes.c_void_p(b.data_ptr()),
        REAL_16BF,
        N,
        ctypes.c_void_p(a.data_ptr()),
        REAL_16BF,
        K,
        ctypes.byref(zero),
        ctypes.c_void_p(out.data_ptr()),
        REAL_16BF,
        N,
        COMPUTE_32F,
        -1,
    )
    assert status == 0, f"cuBLAS says {status}"
    return out
