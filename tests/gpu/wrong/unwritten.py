"""Never writes its output: memory that happens to hold a right answer would do."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    right(x, weight, eps)
    return torch.empty_like(x)
