"""Out of bounds: writes the element behind its targets."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("double total = 0;", "double total = 0; ((i64*)t)[rows] = 0;"))
