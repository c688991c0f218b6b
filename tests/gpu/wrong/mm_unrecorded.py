"""Delegates with the recording of operators switched off."""

from torch.utils._python_dispatch import _disable_current_modes

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"


def kernel_fn(a, b):
    with _disable_current_modes():
        return torch.matmul(a, b)
