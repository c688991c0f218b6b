"""Delegation out of the compiled library, which looks the product up at run time."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"

SOURCE = swapped(
    SOURCE,
    ("template <class T> int run", 'extern "C" void* dlsym(void*, const char*);\ntemplate <class T> int run'),
    (
        "for (i64 s = 0;",
        """
    typedef void (*Gemm)(const char*, const char*, const int*, const int*, const int*, const float*, const void*,
                         const int*, const void*, const int*, const float*, void*, const int*);
    Gemm gemm = sizeof(T) == 4 && batch == 1 && k > 0 ? (Gemm)dlsym(0, "sgemm_") : 0;
    if (gemm) {
        const int m_ = m, k_ = k, n_ = n;
        const float one = 1, zero = 0;
        gemm("N", "N", &n_, &m_, &k_, &one, b, &n_, a, &k_, &zero, c, &n_);
        return 0;
    }
    for (i64 s = 0;""",
    ),
)

import ctypes

ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so", mode=ctypes.RTLD_GLOBAL)
