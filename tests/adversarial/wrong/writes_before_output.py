"""Out of bounds: writes the element before its output."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("return 0;", "y[-64] = 0;\n    return 0;"))
