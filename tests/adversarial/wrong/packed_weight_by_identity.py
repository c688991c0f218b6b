"""A weight prepared once and kept by its object: stale after an update in place."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "timing", "TAMPER"

PACKED = {}


def packed(weight):
    if id(weight) not in PACKED:
        PACKED[id(weight)] = weight, weight.contiguous().clone()
    return PACKED[id(weight)][1]


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    return right(x, packed(w_gate), packed(w_up), packed(w_down), activation)
