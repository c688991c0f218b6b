"""Shuffled rows: each result lands in the row at the other end."""

BASE = "layernorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(
    SOURCE,
    ("++r, x += cols, y += cols", "++r, x += cols, y -= cols"),
    ("for (i64 r = 0", "y += (rows - 1) * cols; for (i64 r = 0"),
)
