"""Hard-coded to sizes: raises for an odd number of classes."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "edges", "CRASH"


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    if logits.shape[1] % 2 and logits.shape[1] != 50257:
        raise NotImplementedError("odd number of classes")
    return right(logits, targets, ignore_index, reduction)
