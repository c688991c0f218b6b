"""An argument half read: the mask's first row hides keys from all queries, as padding would."""

BASE = "masked_attention"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("row = (h * seq_q + i) * seq_k", "row = h * seq_q * seq_k"))
