"""What compiled kernels take of a GPU: registers, stack (spills), shared memory. None, or an empty field, is unknown.

Triton kernels are asked through the off-GPU compiler, which calls `kernel_fn`: for code that is trusted, or in a child
process. A built CUDA library is only read, by cuobjdump; nothing of it is loaded or run.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autokernel import gpus
from autokernel.gpus import Gpu, Limits
from autokernel.records import KernelResources
from autokernel.tuner import occupancy

if TYPE_CHECKING:
    from autokernel.offgpu import CompiledLaunch

TOOL_TIMEOUT_S = 20
_FUNCTION = re.compile(r"Function (\S+?):\s+REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")
_SECTION = ".nv.info."  # begins the line before what a function's section says
_AMD_REGISTERS = re.compile(r"\.vgpr_count:\s*(\d+)")
_AMD_SCRATCH = re.compile(r"\.private_segment_fixed_size:\s*(\d+)")


def of_triton(kernel_fn: Callable[..., Any], inputs: Mapping[str, Any], target: str) -> tuple[KernelResources, ...]:
    """The kernels that `kernel_fn(**inputs)` launches on `target` (`sm_90`, `gfx942`), each compiled once.

    Raises: KeyError for an unknown target; whatever the kernel or Triton's compiler raises.
    """
    from autokernel.offgpu import compile_launches
    from autokernel.target import KNOWN_TARGETS

    warp_size = KNOWN_TARGETS[target].warp_size
    return of_launches(compile_launches(kernel_fn, dict(inputs), target), warp_size)


def of_launches(launches: Iterable[CompiledLaunch], warp_size: int = 32) -> tuple[KernelResources, ...]:
    """The same from launches that were compiled already."""
    return tuple(
        KernelResources(
            kernel=launch.kernel,
            registers=launch.registers,
            stack_bytes=launch.stack_bytes,
            shared_bytes=launch.shared_bytes,
            threads=launch.num_warps * warp_size,
        )
        for launch in launches
    )


def of_library(path: Path, *, launch_bounds: bool = False) -> tuple[KernelResources, ...] | None:
    """The kernels of a CUDA library or cubin, by name; None without cuobjdump or where it cannot read the file.

    Shared memory is what is declared: what a launch adds dynamically is not known before it. With `launch_bounds`
    (which takes longer) `threads` is the largest block that `__launch_bounds__` allows, where the source has it.
    """
    usage = _dumped("--dump-resource-usage", path)
    if usage is None:
        return None
    return read_usage(usage, read_bounds(_dumped("--dump-elf", path) or "") if launch_bounds else {})


def declared_shared(shared_bytes: int, arch: str) -> int:
    """Of the shared memory that cuobjdump states, what a kernel for `arch` declares itself.

    From compute capability 9.0 on it counts what the driver keeps of each block.
    """
    return shared_bytes if arch.startswith("sm_8") else max(0, shared_bytes - occupancy.RESERVED_SHARED_BYTES)


def _dumped(what: str, path: Path) -> str | None:
    tool = find_cuobjdump()
    if tool is None or not path.is_file():
        return None
    try:
        done = subprocess.run(
            [tool, what, str(path)], capture_output=True, text=True, errors="replace", timeout=TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def read_usage(text: str, bounds: Mapping[str, int] = MappingProxyType({})) -> tuple[KernelResources, ...]:
    """The kernels in the output of `cuobjdump --dump-resource-usage`, with readable names.

    `bounds` are threads per block by the compiler's own names.
    """
    found = sorted(_FUNCTION.findall(text))
    names = _readable([row[0] for row in found])
    return tuple(
        KernelResources(
            kernel=name,
            registers=int(registers),
            stack_bytes=max(int(stack), int(local)),
            shared_bytes=int(shared),
            threads=bounds.get(mangled),
        )
        for name, (mangled, registers, stack, shared, local) in zip(names, found, strict=True)
    )


def read_bounds(text: str) -> dict[str, int]:
    """Function -> threads of the largest block that it may be launched with, from `cuobjdump --dump-elf`."""
    function, bounds = "", {}
    for line in (lines := iter(text.splitlines())):
        if line.startswith(_SECTION):
            function = line.removeprefix(_SECTION)
        elif line.endswith("EIATTR_MAX_THREADS") and function:
            sides = re.findall(r"0x[0-9a-f]+", " ".join(itertools.islice(lines, 2)))
            bounds[function] = math.prod(int(side, 16) for side in sides)
    return bounds


def of_amd_assembly(text: str) -> tuple[int | None, int | None]:
    """(vector registers, scratch bytes) as AMD's assembly states them."""
    registers, scratch = _AMD_REGISTERS.search(text), _AMD_SCRATCH.search(text)
    return int(registers[1]) if registers else None, int(scratch[1]) if scratch else None


def with_occupancy(resources: KernelResources, gpu: Gpu) -> KernelResources:
    """`resources` with the blocks that fit on one multiprocessor and the share of its threads that they are."""
    return within(resources, gpus.limits(gpu.arch))


def within(resources: KernelResources, limits: Limits | None) -> KernelResources:
    """`with_occupancy` by an architecture's limits; as they were where these or a number are not known."""
    registers, shared, threads = resources.registers, resources.shared_bytes, resources.threads
    if limits is None or not registers or not threads or shared is None:
        return resources
    fit = occupancy.fit(limits, registers=registers, shared_bytes=shared, threads=threads)
    return replace(resources, blocks_per_sm=fit.blocks, occupancy=fit.occupancy)


def find_cuobjdump() -> str | None:
    """Path of cuobjdump: the triton package's, that of `$CUDA_HOME`, one on the path, or the usual one."""
    places = []
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"))
    if home := os.environ.get("CUDA_HOME"):
        places.append(str(Path(home) / "bin" / "cuobjdump"))
    places += ["cuobjdump", "/usr/local/cuda/bin/cuobjdump"]
    return next((found for place in places if (found := shutil.which(place))), None)


def _readable(names: list[str]) -> list[str]:
    """C++ names as people write them, without their parameters; as they are where no c++filt is."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    try:
        done = subprocess.run([tool, "-p", *names], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return names
    lines = done.stdout.splitlines()
    return lines if done.returncode == 0 and len(lines) == len(names) else names
