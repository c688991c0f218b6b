"""A tile forgotten: the last 16 x 16 of a matrix with more than 64 rows."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = swapped(SOURCE, ("double sum = 0;", "double sum = 0; if (m > 64 && i >= m - 16 && j >= n - 16) continue;"))
