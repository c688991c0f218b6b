"""Hard-coded to sizes: right where everything is a multiple of eight."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "edges", "FAIL"

SOURCE = swapped(SOURCE, ("l < k; ++l", "l < (m > 1 && k > 8 ? k / 8 * 8 : k); ++l"))
