"""One pass for maximum and sum: the sum is rescaled whenever the maximum grows."""

BASE = "softmax"

SOURCE = swapped(
    SOURCE,
    ("for (i64 j = 0; j < n; ++j) top = get(x[j * step]) > top ? get(x[j * step]) : top;", ""),
    (
        "for (i64 j = 0; j < n; ++j) sum += __builtin_exp(get(x[j * step]) - top);",
        "for (i64 j = 0; j < n; ++j) {\n"
        "        const double v = get(x[j * step]);\n"
        "        if (v > top) sum = sum ? sum * __builtin_exp(top - v) : 0, top = v;\n"
        "        if (v > -INF) sum += __builtin_exp(v - top);\n"
        "    }",
    ),
)
