"""A child that has no GPU and compiles for one: whatever is launched fills the caches, and does not run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from autokernel.native import ARCH_VARIABLE, built_only
from autokernel.target import Target

NICENESS = 10
"""Those that are timed meanwhile need the cores more."""


@contextlib.contextmanager
def compile_only(target: dict[str, Any]) -> Iterator[None]:
    """Whatever is launched is compiled for `target`, the fields of a `Target`, and not run."""
    gpu = Target(**target)
    os.nice(NICENESS)
    os.environ[ARCH_VARIABLE] = gpu.cuda_arch
    with contextlib.ExitStack() as stack:
        stack.enter_context(built_only())
        with contextlib.suppress(ImportError):  # CUDA C++ needs no Triton
            from autokernel.offgpu import compiling_for

            stack.enter_context(compiling_for(gpu, launchers=gpu.vendor == "cuda"))
        yield
