"""Precision downgrade: the weights of values are rounded to bf16, the rest is exact."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("out += p[j] *", "out += get(put<u16>(p[j])) *"))
