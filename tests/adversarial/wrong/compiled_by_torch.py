"""Delegation to torch.compile of the definition."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"


@functools.partial(torch.compile, backend="aot_eager")
def compiled(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def kernel_fn(x, weight, eps=1e-6):
    return compiled(x, weight, eps)
