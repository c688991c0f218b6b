"""A look-alike: the bias scales the weights by its exponential without a maximum, and large ones overflow."""

BASE = "masked_attention"
CAUGHT_BY, VERDICT = "stability", "FAIL"

SOURCE = swapped(
    SOURCE,
    ("p[j] = p[j] * scale + added<T>(mask, row + j, seen);", "p[j] = p[j] * scale;"),
    (
        "sum += p[j] = __builtin_exp(p[j] - base);",
        "sum += p[j] = __builtin_expf(p[j] - base) * __builtin_expf(added<T>(mask, row + j, seen));",
    ),
)
