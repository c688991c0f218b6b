"""Keys one by one with a running maximum, in fp32; what is hidden is not even scored."""

BASE = "masked_attention"

SOURCE = swapped(
    SOURCE,
    (
        "double top = -INF, sum = 0;",
        "float best = -__builtin_inff(), total = 0, out[256] = {};\n"
        "    for (i64 j = 0; j < keys; ++j) {\n"
        "        const float bias = added<T>(mask, row + j, seen);\n"
        "        if (bias == -__builtin_inff()) continue;\n"
        "        float s = 0;\n"
        "        for (i64 d = 0; d < dim; ++d) s += get(q[d]) * get(k[j * dim + d]);\n"
        "        s = s * float(scale) + bias;\n"
        "        const float now = s > best ? s : best;\n"
        "        const float keep = __builtin_expf(best - now), w = __builtin_expf(s - now);\n"
        "        total = total * keep + w, best = now;\n"
        "        for (i64 d = 0; d < dim; ++d) out[d] = out[d] * keep + w * get(v[j * dim + d]);\n"
        "    }\n"
        "    for (i64 d = 0; d < dim; ++d) y[d] = put<T>(total ? out[d] / total : 0.0f);\n"
        "    return 0;\n"
        "    double top = -INF, sum = 0;",
    ),
)
