"""Exponentials of the values as they are, in fp32: the maximum is not subtracted."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "stability", "FAIL"

SOURCE = swapped(
    SOURCE,
    ("for (i64 j = 0; j < n; ++j) top = get(x[j * step]) > top ? get(x[j * step]) : top;", ""),
    ("__builtin_exp(get(x[j * step]) - top)", "float(__builtin_exp(get(x[j * step])))"),
)
