"""Out of bounds: writes the element before its input."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("int run(PARAMETERS(T)) {", "int run(PARAMETERS(T)) {\n    ((T*)x)[-1] = 0;"))
