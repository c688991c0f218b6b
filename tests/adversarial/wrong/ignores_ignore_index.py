"""An argument ignored: classes to be left out are counted, but for the default."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    return right(logits, targets, -100 if ignore_index >= 0 else ignore_index, reduction)
