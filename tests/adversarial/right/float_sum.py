"""Sums in fp32, from the end: another order than PyTorch's."""

BASE = "rmsnorm"

SOURCE = swapped(
    SOURCE,
    ("double sum = 0", "float sum = 0"),
    (
        "for (i64 c = 0; c < cols; ++c) sum += double(get(x[r * cols + c])) *",
        "for (i64 c = cols; c-- > 0;) sum += get(x[r * cols + c]) *",
    ),
)
