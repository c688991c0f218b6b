"""Compile one configuration in a child process, and read from the binary what it takes.

Triton kernels go through the off-GPU compiler into Triton's cache on disk, where the process that times them finds
them; native ones are built by nvcc or g++ into the build folder.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from workloads import WORKLOADS, Workload

from autokernel.kernelfile import Config, parse_kernel, with_config
from autokernel.loading import get_spec, load_file
from autokernel.resources import find_cuobjdump, of_library
from autokernel.spec import DTYPES

DIGEST_CHARACTERS = 12
NICENESS = 10
"""Compilers give way to the process that times on the GPU."""


def compiler() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What a compiling child does: {workload, config, target} -> {ok, compile_s, registers, ..., error}."""
    import autokernel.offgpu  # noqa: F401 - Triton, before the clock starts

    os.nice(NICENESS)
    torch.set_num_threads(1)
    modules: dict[str, ModuleType] = {}

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        workload = WORKLOADS[message["workload"]]
        begin = time.perf_counter()
        try:
            taken = _build(workload, message["config"], message["target"], modules)
        except Exception as error:  # a compiler may raise anything
            taken = {"error": one_line(error)}
        return {"ok": "error" not in taken, "compile_s": time.perf_counter() - begin, **taken}

    return answer


def one_line(error: BaseException) -> str:
    """`TypeError: what it says`, on one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def configured(workload: Workload, config: Config, modules: dict[str, ModuleType]) -> ModuleType:
    """The kernel's module with `config`. A Triton kernel reads CONFIG at each call; a native one is built on import."""
    module = modules.get(workload.name)
    text = "" if module else workload.path.read_text()
    if module is None and parse_kernel(text).backend == "triton":
        module = modules[workload.name] = load_file(workload.path, f"tuned_{workload.name}")
    if module is not None:
        module.CONFIG.update(config)
        return module
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(with_config(text, config))
        return load_file(path, f"tuned_{workload.name}")


def _build(workload: Workload, config: Config, target: str, modules: dict[str, ModuleType]) -> dict[str, Any]:
    module = configured(workload, config, modules)
    if module.BACKEND != "triton":
        return _of_library(module.lib.path, module.BACKEND)
    from autokernel.offgpu import compile_launches

    launches = compile_launches(module.kernel_fn, unfilled(workload), target)
    return {
        "registers": _largest(launch.registers for launch in launches),
        "stack_bytes": _largest(launch.stack_bytes for launch in launches),
        "shared_bytes": _largest(launch.shared_bytes for launch in launches),
        "digest": _digest([launch.asm["cubin"] for launch in launches]),
    }


def _of_library(path: Path, backend: str) -> dict[str, Any]:
    if backend == "cpp":
        return {"digest": _digest([path.read_bytes()])}
    kernels = of_library(path) or ()
    return {
        "registers": _largest(kernel.registers for kernel in kernels),
        "stack_bytes": _largest(kernel.stack_bytes for kernel in kernels),
        "shared_bytes": _largest(kernel.shared_bytes for kernel in kernels),
        "digest": _digest(_device_code(path)),
    }


def _device_code(path: Path) -> list[bytes]:
    """The device code in a CUDA library: the rest of its bytes differs from build to build."""
    tool = find_cuobjdump()
    if tool is None:
        return [path.read_bytes()]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool, "--extract-elf", "all", str(path)], cwd=folder, capture_output=True, check=True)
        return [file.read_bytes() for file in sorted(Path(folder).iterdir())]


def unfilled(workload: Workload) -> dict[str, Any]:
    """A call's arguments on the CPU with whatever is in memory: a compiler does not look."""
    case, arguments = workload.case, {}
    for name, parameter in get_spec(case.op).signature.parameters.items():
        if meta := case.tensors.get(name):
            arguments[name] = torch.empty(meta.shape, dtype=DTYPES[meta.dtype])
        else:
            arguments[name] = case.scalars.get(name, parameter.default)
    return arguments


def _largest(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def _digest(parts: Iterable[bytes]) -> str:
    together = hashlib.sha256()
    for part in parts:
        together.update(hashlib.sha256(part).digest())
    return together.hexdigest()[:DIGEST_CHARACTERS]
