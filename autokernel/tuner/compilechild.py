"""What runs in a child that compiles: load one candidate for a target that need not be present, and say what came out.

A child lives for one request. It is confined as a judged candidate is, and the parent believes nothing of what it says
but numbers and texts of bounded size.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autokernel.judge import sandbox, wire
from autokernel.judge.child import failure
from autokernel.judge.folders import settle
from autokernel.judge.sandbox import Policy
from autokernel.loading import load_file
from autokernel.records import Case
from autokernel.spec import Inputs
from autokernel.target import Target, assume
from autokernel.tuner import digests

MAX_TTIR_CHARS = 400_000
"""Of all kernels together: an answer must stay below a message's limit."""

_LOCATION = re.compile(r"(?m)^#loc.*\n| loc\(.*\)$")


def preload(device: str) -> None:
    """Import once, in the server, what each child would spend seconds on."""
    import autokernel.native
    import autokernel.resources

    with contextlib.suppress(ImportError):  # CUDA C++ and C++ need no Triton
        import autokernel.offgpu  # noqa: F401


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Enter the sandbox, answer one request, end."""
    policy = Policy.from_json(setup["sandbox"])
    try:
        sandbox.begin(policy, "cpu", setup["memory_bytes"])
        request, _ = wire.receive(sock)
        scratch = Path(request["scratch"])
        sandbox.enter(policy, "cpu", scratch)
        settle(scratch)
    except EOFError:
        return
    except BaseException as error:
        wire.send(sock, failure(error) | {"kind": "sandbox"})
        return
    try:
        answer = {"ok": True, **_COMMANDS[request["command"]](request)}
    except BaseException as error:
        answer = failure(error)
    wire.send(sock, answer)


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    target = Target(**request["target"])
    cases = [Case.from_json(raw) for raw in request["cases"]]
    if request["backend"] == "triton":
        return _compile_triton(Path(request["kernel"]), cases, target)
    return _compile_native(Path(request["kernel"]), cases, target, request["backend"])


def _study(request: dict[str, Any]) -> dict[str, Any]:
    """The launches of each kernel file and the work of one program of each, or why there are none."""
    from autokernel.offgpu import ir_of_launches
    from autokernel.tuner.kinds import work_of

    target, case = Target(**request["target"]), Case.from_json(request["case"])
    studies: list[Any] = []
    for path in request["kernels"]:
        try:
            kernel_fn = load_file(Path(path), f"autokernel_{Path(path).stem}").kernel_fn
            studies.append(
                [
                    {
                        "kernel": call.kernel,
                        "warps": warps,
                        "stages": stages,
                        "work": asdict(work_of(ir, call.grid or (1,), call.arguments)),
                    }
                    for call, ir, warps, stages in ir_of_launches(kernel_fn, unfilled(case), target)
                ]
            )
        except Exception as error:
            studies.append(str(failure(error)["reason"]))
    return {"studies": studies}


_COMMANDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"compile": _compile, "study": _study}


def unfilled(case: Case) -> Inputs:
    """Arguments of a call with whatever is in memory: a compiler does not look."""
    from autokernel import spec

    tensors = {name: spec.unfilled(meta) for name, meta in case.tensors.items()}
    scalars = {name: tuple(value) if isinstance(value, list) else value for name, value in case.scalars.items()}
    return {**tensors, **scalars}


# -- Triton


def _compile_triton(path: Path, cases: Sequence[Case], target: Target) -> dict[str, Any]:
    from autokernel.offgpu import compile_launches
    from autokernel.resources import of_launches

    kernel_fn = load_file(path, "autokernel_candidate").kernel_fn
    launches = [launch for case in cases for launch in compile_launches(kernel_fn, unfilled(case), target)]
    if not launches:
        raise RuntimeError("kernel_fn launches no Triton kernel")
    parts, told = [], True
    for launch in launches:
        binary = launch.asm.get("cubin", launch.asm.get("hsaco"))
        parts.append(digests.of_code(binary) if isinstance(binary, bytes) else repr(binary))
        parts += [repr(asdict(call)) for call in launch.calls]
        told = told and all(call.grid is not None for call in launch.calls)
    return {
        "kernels": [asdict(kernel) for kernel in of_launches(launches, target.warp_size)],
        "digest": digests.together(parts) if told else None,
        "ttir": _texts(launch.asm.get("ttir") for launch in launches),
    }


def _texts(texts: Iterator[Any]) -> list[str]:
    """Those that fit into an answer, without source locations."""
    kept, room = [], MAX_TTIR_CHARS
    for text in texts:
        short = _LOCATION.sub("", str(text))
        if len(short) <= room:
            kept.append(short)
            room -= len(short)
    return kept


# -- CUDA and C++


class _Recorded:
    """Stands for a built library: notes what its functions are called with, and runs nothing."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self._calls.append(f"{name}({', '.join(_shown(value) for value in args)})")

        setattr(self, name, call)
        return call


def _shown(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    return repr(value)


def _compile_native(path: Path, cases: Sequence[Case], target: Target, backend: str) -> dict[str, Any]:
    """Build what the candidate builds, when it is loaded or called. Its library is not loaded."""
    from autokernel import native

    libraries: dict[Path, None] = {}
    calls: list[str] = []

    def build(source: str, *, backend: str = "cpp", flags: Sequence[str] = ()) -> _Recorded:
        libraries[native.compile_library(source, backend=backend, flags=flags)] = None
        return _Recorded(calls)

    arch = f"sm_{target.arch}"
    if backend == "cuda":
        os.environ[native.ARCH_VARIABLE] = target.cuda_arch
    native.build = build  # type: ignore[assignment]
    kernel_fn = load_file(path, "autokernel_candidate").kernel_fn
    called = True
    for case in cases:
        try:
            with assume(target):
                kernel_fn(**(_as_on_gpu(unfilled(case)) if backend == "cuda" else unfilled(case)))
        except native.BuildError:
            raise
        except Exception:  # it needs a GPU for more, or looks at what it should have got
            called = False
    if not libraries:
        raise RuntimeError("kernel_fn builds no library")
    parts = [digests.of_code(library.read_bytes()) for library in libraries]
    return {
        "kernels": _resources_of(libraries, arch) if backend == "cuda" else [],
        "digest": digests.together([*parts, *calls]) if called else None,
        "ttir": [],
    }


def _as_on_gpu(inputs: Inputs) -> Inputs:
    """The same arguments with tensors that say they are on a GPU: a kernel_fn for CUDA refuses others."""
    import torch

    class OnGpu(torch.Tensor):
        is_cuda = True

    return {name: v.as_subclass(OnGpu) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}


def _resources_of(libraries: dict[Path, None], arch: str) -> list[dict[str, Any]]:
    from autokernel.resources import declared_shared, of_library

    found = [kernel for library in libraries for kernel in of_library(library, launch_bounds=True) or ()]
    return [asdict(k) | {"shared_bytes": declared_shared(k.shared_bytes or 0, arch)} for k in found]
