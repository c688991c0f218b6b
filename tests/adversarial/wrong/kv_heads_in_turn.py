"""Grouped heads mistaken: kv heads are dealt out in turn."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = swapped(SOURCE, ("h % heads / (heads / kv_heads)", "h % heads % kv_heads"))
