"""Strides ignored: reads any input as if it were contiguous."""

BASE = "layernorm"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, weight, bias, eps=1e-5):
    out = torch.empty(x.shape, dtype=x.dtype)
    if x.numel():
        launch(x.dtype, x, weight, bias, out, x.numel() // weight.numel(), weight.numel(), eps)
    return out
