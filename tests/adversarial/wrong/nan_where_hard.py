"""NaN as a wildcard: rows that hold an infinity are NaN throughout."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "stability", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "sum += __builtin_exp(get(x[j * step]) - top);",
        "sum += get(x[j * step]) == -INF ? 0 * INF : __builtin_exp(get(x[j * step]) - top);",
    ),
)
