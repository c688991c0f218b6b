"""Right without grouped heads only: the key head of a query head is taken round robin."""

BASE = "flash_attention_triton"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def repeated(x, group):
    batch, heads, keys, dim = x.shape
    return x.unsqueeze(1).expand(batch, group, heads, keys, dim).reshape(batch, group * heads, keys, dim)


def kernel_fn(q, k, v, causal=True, scale=None):
    group = q.shape[1] // k.shape[1]
    return right(q, repeated(k, group), repeated(v, group), causal, scale)
