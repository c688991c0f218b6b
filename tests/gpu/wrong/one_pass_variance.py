"""Numerics: the variance as a difference of means, which a large mean swallows."""

BASE = "layernorm_cuda"
CAUGHT_BY, VERDICT = "stability", "FAIL"
JUDGED_IN = ("fp32",)

SOURCE = edit(
    SOURCE,
    ("const float v = get(x, base + i, dtype) - mean;", "const float v = get(x, base + i, dtype);"),
    ("block_sum(squares, shared) / cols + eps", "fmaxf(block_sum(squares, shared) / cols - mean * mean, 0) + eps"),
)
