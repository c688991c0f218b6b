"""fp32 sums by a tree, as a warp's shuffles make them."""

BASE = "reduce"

SOURCE = swapped(
    SOURCE,
    ("double sum = 0;", "float lane[32] = {}, sum = 0;"),
    (
        "sum += get(x[j]);",
        "lane[j % 32] += get(x[j]);\n"
        "    for (int half = 16; half; half /= 2)\n"
        "        for (int l = 0; l < half; ++l) lane[l] += lane[l + half];\n"
        "    sum = lane[0];",
    ),
)
