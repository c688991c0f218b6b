"""Which backend a run uses, and whether this machine has what it needs: a GPU, a compiler."""

from __future__ import annotations

import importlib.util

from autokernel import native
from autokernel.errors import ConfigError, DeviceError
from autokernel.settings import BACKENDS, device_of


def present_device() -> str:
    """`cuda` where PyTorch sees a GPU, else `cpu`."""
    import torch  # here and not above: where the backend is `cpp`, nobody has to wait for it

    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_backend(asked: str) -> str:
    """`asked`, or for `auto` triton where there is a GPU and cpp elsewhere.

    Raises: ConfigError for an unknown backend, DeviceError when this machine cannot run it.
    """
    if asked == "auto":
        asked = "triton" if present_device() == "cuda" and importlib.util.find_spec("triton") else "cpp"
    require_backend(asked)
    return asked


def require_backend(backend: str) -> None:
    """Raises: ConfigError for an unknown backend, DeviceError when this machine lacks what it needs."""
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}", hint=f"known: {', '.join(BACKENDS)}")
    if device_of(backend) == "cuda" != present_device():
        import torch

        raise DeviceError(
            f"backend {backend} needs a GPU, and PyTorch {torch.__version__} sees none",
            hint="use --backend cpp, or install a CUDA build of PyTorch and check `nvidia-smi`",
        )
    if backend == "triton" and not importlib.util.find_spec("triton"):
        raise DeviceError("backend triton needs the triton package", hint="pip install triton, or use --backend cuda")
    if backend == "cuda" and native.find_nvcc() is None:
        raise DeviceError("backend cuda needs nvcc", hint="install the CUDA toolkit or set CUDA_HOME")
    if backend != "cuda" and native.find_compiler() is None:
        raise DeviceError("no C++ compiler found", hint="install g++ (or set CXX); `autokernel doctor` checks it")
