"""Compile the Triton kernels that a `kernel_fn` launches, for any target, with no GPU present.

`kernel_fn` is called as usual, on CPU tensors; every launch is compiled for the named target and not run. So what is
compiled is what that target would run: the path that the kernel chooses there, and its specializations. Where the IR
is enough, `ir_of_launches` stops there, in a tenth of the time.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from autokernel.resources import of_amd_assembly
from autokernel.target import KNOWN_TARGETS, Target, assume

_RESOURCES = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One launch of a kernel: its grid (None where it could not be told) and, as text, what the kernel is given besides
    its constants: scalars by value, tensors by shape and strides."""

    kernel: str
    grid: tuple[int, ...] | None
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLaunch:
    """One compiled kernel and its calls. `registers` per thread and `stack_bytes` (spills go there) are None where the
    target's tools do not say; `shared_bytes` is what one block takes."""

    kernel: str
    num_warps: int
    shared_bytes: int
    registers: int | None
    stack_bytes: int | None
    asm: dict[str, Any]
    calls: tuple[Call, ...] = ()


def compile_launches(
    kernel_fn: Callable[..., Any], inputs: dict[str, Any], target: str | Target
) -> list[CompiledLaunch]:
    """The launches of `kernel_fn(**inputs)` on `target` (one of `KNOWN_TARGETS` if a name), each compiled once.

    `inputs` are CPU tensors and scalars; their values are not looked at.
    Raises: KeyError for an unknown target; whatever Triton's compiler raises.
    """
    known = KNOWN_TARGETS[target] if isinstance(target, str) else target
    compiled: dict[int, tuple[Any, list[Call]]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        compiled.setdefault(id(kernel), (kernel, []))[1].append(_call(self, args, grid, kwargs))
        return kernel

    with _launching(known, compile_only):
        kernel_fn(**inputs)
    return [_describe(kernel, calls) for kernel, calls in compiled.values()]


def ir_of_launches(
    kernel_fn: Callable[..., Any], inputs: dict[str, Any], target: str | Target
) -> list[tuple[Call, str, int, int]]:
    """(call, Triton's IR of its kernel, warps, stages) of each launch, in their order; no machine code is made.

    Raises: KeyError for an unknown target; whatever the kernel or Triton's front end raises.
    """
    launches: list[tuple[Call, str, int, int]] = []
    run = JITFunction.run

    def to_ir(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        _ = self.device_caches[driver.active.get_current_device()]  # the first look sets the compiler
        whole, self.compile = self.compile, _ttir
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        finally:
            self.compile = whole
        launches.append((_call(self, args, grid, kwargs), kernel.ir, kernel.num_warps, kernel.num_stages))
        return kernel

    with _launching(KNOWN_TARGETS[target] if isinstance(target, str) else target, to_ir, device="ir:"):
        kernel_fn(**inputs)
    return launches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ir:
    """What stands for a compiled kernel where only its IR is wanted."""

    ir: str
    num_warps: int
    num_stages: int


def _ttir(src: Any, target: GPUTarget, options: dict[str, Any], **_: Any) -> _Ir:
    """The first stage of Triton's compiler: a kernel's IR, simplified."""
    backend = triton.compiler.make_backend(target)
    parsed = backend.parse_options({**options, **src.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = src.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, parsed, src.language)
    module = stages["ttir"](module, {})
    return _Ir(ir=str(module), num_warps=parsed.num_warps, num_stages=parsed.num_stages)


@contextlib.contextmanager
def _launching(target: Target, launch: Callable[..., Any], device: str = "") -> Iterator[None]:
    """Have every launch go to `launch`, on what seems to be a device of `target`; Triton's caches are per `device`."""
    arch: int | str = target.arch if target.vendor == "cuda" else f"gfx{target.arch:x}"
    described = GPUTarget("cuda" if target.vendor == "cuda" else "hip", arch, target.warp_size)
    run = JITFunction.run
    driver.set_active(_NoDriver(described, device))
    JITFunction.run = launch
    try:
        with assume(target):
            yield
    finally:
        JITFunction.run = run
        driver.set_active(None)  # the real one is found again when it is needed


def _call(kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: Mapping[str, Any]) -> Call:
    """What a launch of `kernel` (a JITFunction) is given."""
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    for parameter in kernel.params:
        if parameter.name not in given and parameter.has_default:
            given[parameter.name] = parameter.default
    if callable(grid):
        try:
            grid = grid(given)
        except Exception:  # a function of the candidate's, called with what it may not expect
            grid = None
    constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    return Call(
        kernel=kernel.__name__,
        grid=tuple(int(size) for size in grid) if isinstance(grid, (tuple, list)) else None,
        arguments=tuple(
            f"{name}={_shown(given[name])}" for name in kernel.arg_names if name in given.keys() - constant
        ),
    )


def _shown(value: Any) -> str:
    """A launch argument as text, without a tensor's values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}+{value.storage_offset()}"
    if isinstance(getattr(value, "base", None), torch.Tensor):  # a tensor descriptor
        return f"{_shown(value.base)}{getattr(value, 'block_shape', '')}"
    return repr(value)


class _NoDriver:
    """What Triton asks of a driver before a launch, answered without a device; its caches are kept per target."""

    def __init__(self, target: GPUTarget, device: str = "") -> None:
        self._target, self._device = target, device

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"{self._device}{self._target.backend}:{self._target.arch}"

    def get_current_stream(self, device: object) -> int:
        return 0


def _describe(kernel: Any, calls: list[Call]) -> CompiledLaunch:
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
        calls=tuple(calls),
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
