"""Does not compile."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "CRASH"

SOURCE = "int broken("
