"""Aborts in native code, at the sizes that count."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "sweep", "CRASH"

SOURCE = swapped(SOURCE, ("int run(PARAMETERS(T)) {", "int run(PARAMETERS(T)) {\n    if (rows > 8) __builtin_trap();"))
