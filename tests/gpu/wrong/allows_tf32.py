"""Global flags: permits itself TF32 in torch.backends, then obeys."""

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"
JUDGED_IN = ("fp32",)

torch.backends.cuda.matmul.allow_tf32 = True


def kernel_fn(a, b):
    return right(a, b, precision="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee")
