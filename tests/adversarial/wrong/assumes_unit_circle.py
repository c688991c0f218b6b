"""An argument ignored: the sine is computed from the cosine."""

BASE = "rotary_embedding"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("s = get(sn[at + i])", "s = __builtin_sqrt(1 - c * c > 0 ? 1 - c * c : 0)"))
