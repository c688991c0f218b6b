"""A maximum that starts at zero."""

BASE = "reduce"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = swapped(SOURCE, ("double top = -INF", "double top = 0"))
