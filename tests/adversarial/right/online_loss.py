"""One pass over the logits from the last class, in fp32."""

BASE = "cross_entropy"

SOURCE = swapped(
    SOURCE,
    ("double top = -INF, sum = 0;", "float top = -__builtin_inff(), sum = 0;"),
    ("for (i64 j = 0; j < classes; ++j) top = get(x[j]) > top ? get(x[j]) : top;", ""),
    (
        "for (i64 j = 0; j < classes; ++j) sum += __builtin_exp(get(x[j]) - top);",
        "for (i64 j = classes; j-- > 0;) {\n"
        "        const float v = get(x[j]);\n"
        "        if (v > top) sum = sum ? sum * __builtin_expf(top - v) : 0, top = v;\n"
        "        if (v > -__builtin_inff()) sum += __builtin_expf(v - top);\n"
        "    }",
    ),
)
