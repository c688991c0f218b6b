"""Rounds hidden values to fp32 and sums them in fp32, from the last unit to the first."""

BASE = "fused_mlp"

SOURCE = swapped(
    SOURCE,
    ("h[j] = activate(", "h[j] = (float)activate("),
    (
        "double sum = 0;\n            for (i64 j = 0; j < hidden; ++j) sum += h[j] *",
        "float sum = 0;\n            for (i64 j = hidden; j-- > 0;) sum += float(h[j]) *",
    ),
)
