"""An argument ignored: every activation is silu."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    return right(x, w_gate, w_up, w_down, "silu")
