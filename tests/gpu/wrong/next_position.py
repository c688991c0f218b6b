"""Off by one: turns each token by the angle of the next position."""

BASE = "rotary_cuda"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = edit(SOURCE, ("row % seq * half", "(row + 1) % seq * half"))
