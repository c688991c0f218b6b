"""Monkeypatch: the recorder of ATen calls records nothing, and PyTorch does the work."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"

from autokernel.judge import child

child.OpRecorder.__torch_dispatch__ = lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {}))


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim).contiguous()
