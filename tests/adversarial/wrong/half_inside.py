"""Precision downgrade: fp16 values inside an fp32 kernel."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("float(get(x[r * cols + c]) * scale", "float(_Float16(get(x[r * cols + c]) * scale)"))
