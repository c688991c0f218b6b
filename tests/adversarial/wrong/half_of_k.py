"""Work dropped: every other product, the rest counted twice."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("++l) sum += ", "l += 2) sum += 2 * "))
