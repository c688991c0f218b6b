"""Rounds bf16 by truncation: one unit in the last place at most, as hardware without rounding does."""

BASE = "rmsnorm"

COMMON = swapped(COMMON, ("b + 0x7fff + ((b >> 16) & 1)", "b"))
