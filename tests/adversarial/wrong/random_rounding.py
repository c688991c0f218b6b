"""Not repeatable: rounds at random."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "determinism", "FAIL"

SOURCE = swapped(SOURCE, ("put<T>(float(sum))", "put<T>(float(sum * (1 + 1e-7 * (__builtin_ia32_rdtsc() >> 3 & 1))))"))
