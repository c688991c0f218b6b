"""Static buffers: one for all losses of a kind."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "determinism", "FAIL"

BUFFERS = {}


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    key = (logits.shape, logits.dtype, reduction)
    out = BUFFERS.get(key)
    BUFFERS[key] = right(logits, targets, ignore_index, reduction, out=out)
    return BUFFERS[key]
