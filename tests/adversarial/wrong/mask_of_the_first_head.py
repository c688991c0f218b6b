"""An argument half read: each head takes the first one's bias."""

BASE = "masked_attention"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = swapped(SOURCE, ("row = (h * seq_q + i) * seq_k", "row = (h / heads * heads * seq_q + i) * seq_k"))
