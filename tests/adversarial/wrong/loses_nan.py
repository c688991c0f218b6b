"""A mean over nothing is zero instead of NaN."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "edges", "FAIL"

SOURCE = swapped(SOURCE, ("total / counted", "counted ? total / counted : 0"))
