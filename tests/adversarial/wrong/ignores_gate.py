"""An argument ignored: up serves as gate."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    return right(x, w_up, w_up, w_down, activation)
