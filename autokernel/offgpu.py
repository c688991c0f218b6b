"""Compile the Triton kernels that a `kernel_fn` launches, for any target, with no GPU present.

`kernel_fn` is called as usual, on CPU tensors; every launch is compiled for the named target and not run. So what is
compiled is what that target would run: the path that the kernel chooses there, and its specializations.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from autokernel.resources import of_amd_assembly
from autokernel.target import KNOWN_TARGETS, Target, assume

_RESOURCES = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLaunch:
    """One compiled launch. `registers` per thread and `stack_bytes` (spills go there) are None where the target's
    tools do not say; `shared_bytes` is what one block takes."""

    kernel: str
    num_warps: int
    shared_bytes: int
    registers: int | None
    stack_bytes: int | None
    asm: dict[str, Any]


def compile_launches(kernel_fn: Callable[..., Any], inputs: dict[str, Any], target: str) -> list[CompiledLaunch]:
    """The launches of `kernel_fn(**inputs)` on `target` (a name of `KNOWN_TARGETS`), each compiled once.

    `inputs` are CPU tensors and scalars; their values are not looked at.
    Raises: KeyError for an unknown target; whatever Triton's compiler raises.
    """
    known = KNOWN_TARGETS[target]
    with compiling_for(known) as compiled:
        kernel_fn(**inputs)
    return [_describe(kernel) for kernel in compiled.values()]


@contextlib.contextmanager
def compiling_for(target: Target, *, launchers: bool = False) -> Iterator[dict[int, Any]]:
    """Make every launch a compilation for `target`, which `target_of` answers; Triton's kernels, by their identity.

    With `launchers`, Triton's cache also gets what launches them there, for another process to find.
    """
    compiled: dict[int, Any] = {}
    arch: int | str = target.arch if target.vendor == "cuda" else f"gfx{target.arch:x}"
    described = GPUTarget("cuda" if target.vendor == "cuda" else "hip", arch, target.warp_size)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        if id(kernel) not in compiled:
            compiled[id(kernel)] = kernel
            if launchers:
                _build_launcher(kernel)
        return kernel

    driver.set_active(_NoDriver(described))
    JITFunction.run = compile_only
    try:
        with assume(target):
            yield compiled
    finally:
        JITFunction.run = run
        driver.set_active(None)  # the real one is found again when it is needed


def _build_launcher(kernel: Any) -> None:
    """Until 3.7 Triton has a C compiler build a launcher for each signature; later there is nothing to build."""
    with contextlib.suppress(Exception):  # whatever is amiss is met again at the launch
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


class _NoDriver:
    """What Triton asks of a driver before a launch, answered without a device; its caches are kept per target."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"{self._target.backend}:{self._target.arch}"

    def get_current_stream(self, device: object) -> int:
        return 0


def _describe(kernel: Any) -> CompiledLaunch:
    registers, stack = (
        _cubin_resources(kernel.asm["cubin"])
        if "cubin" in kernel.asm
        else of_amd_assembly(kernel.asm.get("amdgcn", ""))
    )
    return CompiledLaunch(
        kernel=kernel.metadata.name,
        num_warps=kernel.metadata.num_warps,
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        stack_bytes=stack,
        asm=dict(kernel.asm),
    )


def _cubin_resources(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers, stack bytes) of the kernel in a cubin, by the cuobjdump that Triton carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=60)
    found = _RESOURCES.search(done.stdout)
    return (int(found[1]), int(found[2])) if found else (None, None)
