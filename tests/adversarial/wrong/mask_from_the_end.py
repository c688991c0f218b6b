"""The causal mask aligned at the bottom right, when there are more keys than queries."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "edges", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "causal && i + 1 < seq_k ? i + 1",
        "causal && seq_q < seq_k ? i + 1 + seq_k - seq_q : causal && i + 1 < seq_k ? i + 1",
    ),
)
