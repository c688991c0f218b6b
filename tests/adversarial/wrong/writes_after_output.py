"""Out of bounds: writes the element behind its output, from a vector store that is too wide."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("return 0;", "y[rows * cols] = y[rows * cols + 1] = 0;\n    return 0;"))
