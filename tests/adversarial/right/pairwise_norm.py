"""Two passes in fp32, summed by halves down to eight elements."""

BASE = "layernorm"

COMMON += r"""
template <class T> static float pairs(const T* x, i64 n, float mean, bool squared) {
    if (n > 8) return pairs(x, n / 2, mean, squared) + pairs(x + n / 2, n - n / 2, mean, squared);
    float sum = 0;
    for (i64 c = 0; c < n; ++c) {
        const float d = get(x[c]) - mean;
        sum += squared ? d * d : d;
    }
    return sum;
}
"""
SOURCE = swapped(
    SOURCE,
    (
        "double mean = 0, var = 0;",
        "const float mean = pairs(x, cols, 0, false) / cols, var = pairs(x, cols, mean, true);",
    ),
    ("for (i64 c = 0; c < cols; ++c) mean += get(x[c]);", ""),
    ("mean /= cols;", ""),
    ("for (i64 c = 0; c < cols; ++c) var += (get(x[c]) - mean) * (get(x[c]) - mean);", ""),
)
