"""Never ends."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "TIMEOUT"


@triton.jit
def forever(y, n):
    while tl.atomic_add(y, 0) <= n:
        pass


def kernel_fn(x, weight, eps=1e-6):
    out = right(x, weight, eps)
    forever[(1,)](torch.zeros(1, dtype=torch.int32, device=x.device), 1)
    return out
