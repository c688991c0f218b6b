"""Work dropped: hidden units beyond the first 1024."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "edges", "FAIL"

SOURCE = swapped(SOURCE, ("j < hidden; ++j) sum", "j < hidden && j < 1024; ++j) sum"))
