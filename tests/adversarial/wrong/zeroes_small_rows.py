"""Zeros below the tolerance: rows of x that are small beside the largest one."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "stability", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "double* h = new double[hidden + 1];",
        "double most = 0;\n"
        "    for (i64 r = 0; r < rows; ++r) {\n"
        "        const double own = dot(x + r * inner, x + r * inner, inner);\n"
        "        most = own > most ? own : most;\n"
        "    }\n"
        "    double* h = new double[hidden + 1];",
    ),
    ("put<T>(float(sum))", "put<T>(dot(x, x, inner) < most / 200 ? 0 : float(sum))"),
)
