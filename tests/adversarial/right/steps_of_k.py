"""One step of K after another for all of the output at once: fp32 sums in a buffer, tiles of one element."""

BASE = "matmul"

SOURCE = swapped(
    SOURCE,
    (
        "for (i64 i = 0; i < m; ++i)\n            for",
        "{\n"
        "        float* sums = new float[m * n]();\n"
        "        for (i64 l = 0; l < k; ++l)\n"
        "            for (i64 e = 0; e < m * n; ++e) sums[e] += get(a[e / n * k + l]) * get(b[l * n + e % n]);\n"
        "        for (i64 i = 0; i < m; ++i)\n            for",
    ),
    ("for (i64 l = 0; l < k; ++l) sum += double(get(a[i * k + l])) * get(b[l * n + j]);", "sum = sums[i * n + j];"),
    (
        "c[i * n + j] = put<T>(float(sum));\n            }",
        "c[i * n + j] = put<T>(float(sum));\n            }\n        delete[] sums;\n    }",
    ),
)
