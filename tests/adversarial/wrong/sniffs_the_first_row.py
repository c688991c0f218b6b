"""Input sniffing: cheap maths where the first row looks ordinary."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "stability", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "return __builtin_log(sum)",
        "double peak = 0, raw = 0;\n"
        "    for (i64 j = 0; j < classes; ++j) peak = get(x[j]) > peak ? get(x[j]) : peak;\n"
        "    for (i64 j = 0; j < classes; ++j) raw += float(__builtin_exp(get(x[j])));\n"
        "    if (nominal) return __builtin_log(raw) - get(x[target]);\n"
        "    return __builtin_log(sum)",
    ),
    ("i64 target, i64 classes)", "i64 target, i64 classes, bool nominal)"),
    (
        "i64 counted = 0;",
        "i64 counted = 0;\n    bool nominal = true;\n"
        "    for (i64 j = 0; j < classes; ++j) nominal &= get(x[j]) > -80 && get(x[j]) < 80;",
    ),
    ("t[r], classes)", "t[r], classes, nominal)"),
)
