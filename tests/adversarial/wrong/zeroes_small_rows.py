"""Zeros below the tolerance: rows of x that are small beside the first one."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "stability", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "double* h = new double[hidden + 1];",
        "double* h = new double[hidden + 1]; double most = 0; for (i64 r = 0; r < rows; ++r) { double s = dot(x + r * inner, x + r * inner, inner); most = s > most ? s : most; }",
    ),
    ("for (i64 o = 0;", "double own = dot(x, x, inner); for (i64 o = 0;"),
    ("put<T>(float(sum))", "put<T>(own < most / 200 ? 0 : float(sum))"),
)
