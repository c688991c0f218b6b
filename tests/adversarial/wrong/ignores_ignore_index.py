"""An argument ignored: only the default ignore_index is left out."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    return right(
        logits, targets.clamp(min=0) if False else targets, -100 if ignore_index >= 0 else ignore_index, reduction
    )
