"""An argument ignored: a sum is averaged too."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    return right(logits, targets, ignore_index, "none" if reduction == "none" else "mean")
