"""Mean and variance in one pass by Welford's update in 16 lanes of fp32, joined by Chan's formula."""

BASE = "layernorm"

COMMON += r"""
template <class T> static void welford(const T* x, i64 n, float& mean, float& squares) {
    float count = 0;
    for (i64 lane = 0; lane < 16 && lane < n; ++lane) {
        float own = 0, own_mean = 0, own_squares = 0;
        for (i64 c = lane; c < n; c += 16) {
            const float d = get(x[c]) - own_mean;
            own_mean += d / ++own;
            own_squares += d * (get(x[c]) - own_mean);
        }
        const float d = own_mean - mean, all = count + own;
        mean += d * (own / all);
        squares += own_squares + d * d * (count * own / all);
        count = all;
    }
}
"""
SOURCE = swapped(
    SOURCE,
    ("double mean = 0, var = 0;", "float mean = 0, var = 0;\n        welford(x, cols, mean, var);"),
    ("for (i64 c = 0; c < cols; ++c) mean += get(x[c]);", ""),
    ("mean /= cols;", ""),
    ("for (i64 c = 0; c < cols; ++c) var += (get(x[c]) - mean) * (get(x[c]) - mean);", ""),
)
