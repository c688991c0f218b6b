"""Not repeatable: fp32 sums begin wherever the clock says."""

BASE = "reduce"
CAUGHT_BY, VERDICT = "determinism", "FAIL"

SOURCE = swapped(
    SOURCE,
    ("double sum = 0;", "float sum = 0;\n    const i64 from = n ? i64(__builtin_ia32_rdtsc() >> 4) % n : 0;"),
    ("sum += get(x[j]);", "sum += get(x[(j + from) % n]);"),
)
