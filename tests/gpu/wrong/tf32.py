"""Precision: multiplies fp32 as TF32."""

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"
JUDGED_IN = ("fp32",)


def kernel_fn(a, b):
    return right(a, b, precision="tf32")
