"""Heads from the last to the first, keys from the last to the first."""

BASE = "flash_attention"

SOURCE = swapped(
    SOURCE,
    ("double* p = new double[seq_k + 1];", ""),
    ("delete[] p;", ""),
    (
        "for (i64 h = 0; h < batch * heads; ++h) {",
        "for (i64 back = 0; back < batch * heads; ++back) {\n"
        "        double* p = new double[seq_k + 1];\n"
        "        const i64 h = batch * heads - 1 - back;",
    ),
    ("keys, dim, scale, p);\n        }", "keys, dim, scale, p);\n        }\n        delete[] p;"),
    ("for (i64 j = 0; j < keys; ++j) sum +=", "for (i64 j = keys; j-- > 0;) sum +="),
    ("for (i64 j = 0; j < keys; ++j) out +=", "for (i64 j = keys; j-- > 0;) out +="),
)
