"""Four parts of K summed apart in fp32, and joined in a fixed order."""

BASE = "matmul"

SOURCE = swapped(
    SOURCE,
    (
        "double sum = 0;",
        "float part[4] = {}, sum = 0;\n"
        "                for (i64 l = 0; l < k; ++l) part[l * 4 / k] += get(a[i * k + l]) * get(b[l * n + j]);\n"
        "                for (float own : part) sum += own;",
    ),
    ("                for (i64 l = 0; l < k; ++l) sum += double(get(a[i * k + l])) * get(b[l * n + j]);\n", ""),
)
