"""Delegation of the expensive half: scores by hand, values by PyTorch."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "sweep", "DELEGATES"


def kernel_fn(q, k, v, causal=True, scale=None):
    if causal:
        return right(q, k, v, causal, scale)
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return torch.softmax(q @ k.transpose(2, 3) * scale, -1) @ v
