"""Zeros below the tolerance: small probabilities of long rows."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "y[j * step] = put<T>(float(__builtin_exp(get(x[j * step]) - top) / sum));",
        "{ float p = __builtin_exp(get(x[j * step]) - top) / sum; y[j * step] = put<T>(n > 1000 && p < 1e-5f ? 0 : p); }",
    ),
)
