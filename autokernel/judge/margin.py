"""By how much a candidate must be faster; apart from the engine, since the loop decides by it, too, without torch."""

KEEP_MARGIN = 0.01
"""A candidate is better when the lower bound of its speedup exceeds 1 by this much."""
