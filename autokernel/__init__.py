"""An autonomous agent that makes a PyTorch model's kernels faster overnight."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autokernel.applied import apply as apply
    from autokernel.torchbackend import backend as backend

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Importing the package must not import torch.
    if name in ("apply", "backend"):
        from autokernel import applied, torchbackend

        torchbackend.register()
        return applied.apply if name == "apply" else torchbackend.backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
