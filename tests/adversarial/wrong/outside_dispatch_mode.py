"""Delegation with all dispatch modes switched off."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"

from torch.utils._python_dispatch import _disable_current_modes


def kernel_fn(x, dim=-1):
    with _disable_current_modes():
        return torch.softmax(x, dim).contiguous()
