"""What a candidate's Python code asks of the system: libraries it opens, symbols it looks up, programs it starts.

Python's audit hooks cannot be removed again. They end what would have another library or another process do the work,
and the judge hears of it even if the candidate goes on. A tripwire, not a wall: code that is determined to can call
the loader without Python, which the imports of its compiled library show (`autokernel.judge.imports`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SYSTEM_LIBRARIES = re.compile(r"lib(c|m|gomp|omp|iomp5|cudart|cuda|amdhip64|dl|pthread)\.so[.\d]*")
"""What a kernel may open by name besides what it has compiled itself."""

OTHERS_WORK = re.compile(
    r"[sdcz]gemm|[sdcz]gemv|cblas_|mkl_|dnnl_|aoti_torch|cublas|cudnn|cufft|cusparse|hipblas|rocblas|miopen"
    r"|^_ZN2at|^_ZN3c10|^_ZN5torch"
)
"""Symbols of BLAS, of vendors' libraries and of PyTorch."""

COMPILERS = re.compile(
    r"(c|g|clang)\+\+.*|g?cc.*|clang.*|nvcc|ptxas.*|cuobjdump|nvdisasm|fatbinary|ld.*|as|hipcc|amdclang.*|ldconfig|uname"
    r"|lscpu|file"
)
STARTS = ("os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen")

violations: list[str] = []
"""What has been refused so far, in words."""


class Refused(RuntimeError):
    """Raised into the candidate's code at a forbidden call."""


def install(scratch: Path) -> None:
    """Watch this process from now on; libraries in `scratch` are the candidate's own."""
    own = os.path.realpath(scratch)
    checks: dict[str, Callable[[tuple[Any, ...]], str | None]] = {
        "ctypes.dlopen": lambda args: _library(args[0], own),
        "ctypes.dlsym": lambda args: _symbol(args[1]),
        **dict.fromkeys(STARTS, _program),
    }

    def hook(event: str, args: tuple[Any, ...]) -> None:
        check = checks.get(event)
        if check is not None and (reason := check(args)):
            violations.append(reason)
            raise Refused(reason)

    sys.addaudithook(hook)
    for name in ("numpy", "__array__"):
        setattr(torch.Tensor, name, _no_numpy)


def _library(name: Any, own: str) -> str | None:
    if not name:
        return None  # the process itself: what matters is the symbol
    path = os.fspath(name).decode() if isinstance(name, bytes) else str(name)
    if SYSTEM_LIBRARIES.fullmatch(Path(path).name) or os.path.realpath(path).startswith(own + os.sep):
        return None
    return f"it opens the library {path}"


def _symbol(name: Any) -> str | None:
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return f"it looks up {text}" if OTHERS_WORK.search(text) else None


def _program(args: tuple[Any, ...]) -> str | None:
    program = args[0] or (args[1][0] if len(args) > 1 and args[1] else "")
    named = {Path(os.environ[name]).name for name in ("CC", "CXX") if name in os.environ}
    base = Path(os.fsdecode(program)).name
    return None if COMPILERS.fullmatch(base) or base in named else f"it starts the program {base}"


def _no_numpy(_tensor: torch.Tensor, *_args: Any, **_options: Any) -> None:
    violations.append("it hands tensors to NumPy")
    raise Refused(violations[-1])
