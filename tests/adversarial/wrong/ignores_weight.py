"""An argument ignored: the weight."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, (" * get(w[c])", ""))
