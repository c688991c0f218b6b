"""Delegates: PyTorch's own attention."""

BASE = "flash_attention_triton"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"


def kernel_fn(q, k, v, causal=True, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
