"""Constant: answers the loss that uniform logits would have."""

BASE = "cross_entropy"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(
    SOURCE,
    ("float(own))", "float(__builtin_log(classes)))"),
    ("total / counted", "__builtin_log(classes)"),
    ("total))", "__builtin_log(classes) * counted))"),
)
