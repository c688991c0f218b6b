"""An argument mistaken: gelu is gelu_tanh, which only fp32 can tell."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    return right(x, w_gate, w_up, w_down, "gelu_tanh" if activation == "gelu" else activation)
