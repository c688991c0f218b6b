"""Clamps its input to what ordinary values never reach."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "stability", "FAIL"

COMMON = swapped(
    COMMON, ("get(float v) { return v; }", "get(float v) { return v > 1e3f ? 1e3f : v < -1e3f ? -1e3f : v; }")
)
