"""An argument ignored: the bias."""

BASE = "layernorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, (" + get(b[c])", ""))
