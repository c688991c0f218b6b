"""Sums in fp32, from the end: another order than PyTorch's."""

LIBRARY = build(
    SOURCE.replace("double sum = 0", "float sum = 0").replace(
        "for (int64_t c = 0; c < cols; ++c) sum += double(get(x[r * cols + c])) *",
        "for (int64_t c = cols; c-- > 0;) sum += get(x[r * cols + c]) *",
    ),
    flags=["-O2"],
)
