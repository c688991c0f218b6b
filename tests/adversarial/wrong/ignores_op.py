"""An argument ignored: a mean is a sum."""

BASE = "reduce"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = swapped(SOURCE, ("op == 1 ? result / n : result", "result"))
