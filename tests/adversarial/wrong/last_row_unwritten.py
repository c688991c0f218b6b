"""Last row forgotten: when the number of rows is odd."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = swapped(SOURCE, ("o < outer; ++o", "o < (outer > 1 ? outer / 2 * 2 : 1); ++o"))
