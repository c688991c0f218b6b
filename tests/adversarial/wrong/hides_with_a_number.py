"""Hidden keys get -10000 instead of none: a query that sees nothing gets the mean of what it must not see."""

BASE = "masked_attention"
CAUGHT_BY, VERDICT = "edges", "FAIL"

SOURCE = swapped(SOURCE, ("[at] ? 0.0 : -INF", "[at] ? 0.0 : -10000.0"))
