"""Drives its library by ctypes alone."""

BASE = "rmsnorm"

import ctypes

from autokernel.native import compile_library


@functools.cache
def function(name):
    return getattr(ctypes.CDLL(str(compile_library(COMMON + SOURCE + EXPORTS, flags=FLAGS))), name)


def launch(dtype, x, weight, out, rows, cols, eps):
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, weight, out)]
    run = function("run_fp32" if dtype == torch.float32 else "run_bf16")
    assert run(*pointers, ctypes.c_int64(rows), ctypes.c_int64(cols), ctypes.c_double(eps)) == 0
