"""Unwritten elements: the columns beyond the last multiple of four."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "edges", "FAIL"

SOURCE = swapped(SOURCE, ("c < cols; ++c) y[", "c < cols / 4 * 4; ++c) y["))
