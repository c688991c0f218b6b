"""A mean over all rows, where it should be over those that count."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("total / counted", "total / rows"))
