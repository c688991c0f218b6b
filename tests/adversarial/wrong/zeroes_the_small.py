"""Zeros below the tolerance: small probabilities of long rows."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

COMMON += "static double cut(double p, i64 n) { return n > 1000 && p < 1e-5 ? 0 : p; }\n"
SOURCE = swapped(
    SOURCE,
    (
        "float(__builtin_exp(get(x[j * step]) - top) / sum)",
        "float(cut(__builtin_exp(get(x[j * step]) - top) / sum, n))",
    ),
)
