"""What the kernels that the judge has compiled take of the GPU, read from the folder of a text after its judging.

Nothing is compiled, loaded or run for it. A candidate could have written that folder, so no link is followed, sizes and
counts are bounded, and whatever cannot be read is left out: no binaries, or no tool to read them, is no resources.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autokernel import resources
from autokernel.gpus import Gpu
from autokernel.judge import places
from autokernel.records import KernelResources

MOST_ENTRIES = 4000
"""Of a folder that are looked at."""

MOST_BINARIES = 32
"""Newest ones that are asked for, at 6 ms each for cuobjdump to start."""

MOST_S = 5.0
"""After this no further binary is begun: one that keeps cuobjdump busy must not hold up the night."""

MOST_BYTES, HEAD_BYTES = 8 << 20, 64 << 10

TRITON_DTYPES: Mapping[str, str] = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
NAMED_DTYPES: Mapping[str, re.Pattern[str]] = {
    "fp32": re.compile(r"(?<!b)float|fp?32"),
    "fp16": re.compile(r"half|fp16|(?<!b)f16"),
    "bf16": re.compile(r"bfloat|bf16"),
}
"""How the dtypes are spelled in Triton's signatures, and in the names of C++ functions."""

GROUP = "__grp__"  # Triton's list of the files of a specialization, beside its metadata

_POINTED = re.compile(r"(?:ptr<|tensordesc<tensor<[\dx]*x)(\w+)")
_SIGNATURE = re.compile(r"tt\.func public @.*")


def left_by_judge(folder: Path, dtypes: Collection[str], gpu: Gpu | None) -> tuple[KernelResources, ...]:
    """The kernels in a text's folder that are for tensors of `dtypes`, the hungriest first; () where none is found."""
    found = {*_of_triton(folder / places.TRITON, dtypes), *_of_libraries(folder / places.LIBRARIES, dtypes, gpu)}
    known = [kernel if gpu is None else resources.with_occupancy(kernel, gpu) for kernel in found]
    return tuple(sorted(known, key=_hunger, reverse=True))


def _hunger(kernel: KernelResources) -> tuple[int, int, int, str]:
    return kernel.stack_bytes or 0, kernel.registers or 0, kernel.shared_bytes or 0, kernel.kernel


# -- Triton: a folder per specialization, with what the compiler says of it in NAME.json


def _of_triton(cache: Path, dtypes: Collection[str]) -> Iterator[KernelResources]:
    described = (path for folder in _folders(cache) for path in _files(folder, ".json"))
    single = (path for path in described if not path.name.startswith(GROUP))
    wanted = (path for path in _newest(single) if _is_for(path.with_suffix(".ttir"), dtypes))
    for path in _in_time(wanted):
        if (kernel := _specialization(path)) is not None:
            yield kernel


def _is_for(ttir: Path, dtypes: Collection[str]) -> bool:
    """Whether the kernel's pointers are to one of the dtypes (or to nothing that is floating, or unknown)."""
    signature = _SIGNATURE.search(_head(ttir))
    floating = set(_POINTED.findall(signature[0])) & set(TRITON_DTYPES.values()) if signature else set()
    return not floating or bool(floating & {TRITON_DTYPES.get(dtype, dtype) for dtype in dtypes})


def _specialization(path: Path) -> KernelResources | None:
    """The kernel that a metadata file of Triton's describes; None for any other file."""
    try:
        said = json.loads(_head(path))
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    target = said.get("target")
    warps, lanes = _count(said, "num_warps"), _count(target if isinstance(target, dict) else {}, "warp_size")
    named = KernelResources(
        kernel=said["name"],
        shared_bytes=_count(said, "shared"),
        threads=warps * lanes if warps is not None and lanes is not None else None,
    )
    registers, stack_bytes = _of_binary(path)
    return replace(named, registers=registers, stack_bytes=stack_bytes)


def _of_binary(path: Path) -> tuple[int | None, int | None]:
    """(registers, stack bytes) of the binary beside a metadata file."""
    if _is_plain(path.with_suffix(".cubin")):
        kernels = resources.of_library(path.with_suffix(".cubin"))
        return (kernels[0].registers, kernels[0].stack_bytes) if kernels else (None, None)
    return resources.of_amd_assembly(_whole(path.with_suffix(".amdgcn")))


def _count(said: Mapping[str, Any], name: str) -> int | None:
    value = said.get(name)
    return value if type(value) is int and 0 <= value < 1 << 31 else None


# -- CUDA C++: libraries that nvcc built, each with any number of kernels


def _of_libraries(folder: Path, dtypes: Collection[str], gpu: Gpu | None) -> Iterator[KernelResources]:
    for path in _in_time(_newest(_files(folder, ".so"))):
        for kernel in resources.of_library(path, launch_bounds=True) or ():
            if _names_one_of(kernel.kernel, dtypes):
                yield replace(kernel, shared_bytes=_declared(kernel.shared_bytes, gpu))


def _names_one_of(name: str, dtypes: Collection[str]) -> bool:
    """Whether a function's name says one of the dtypes, or says nothing of any."""
    said = {dtype for dtype, pattern in NAMED_DTYPES.items() if pattern.search(name)}
    return not said or bool(said & set(dtypes))


def _declared(shared_bytes: int | None, gpu: Gpu | None) -> int | None:
    """Shared memory without what the driver keeps; as it is where the GPU is not known."""
    if shared_bytes is None or gpu is None:
        return shared_bytes
    return resources.declared_shared(shared_bytes, gpu.arch)


# -- files that somebody else wrote


def _folders(folder: Path) -> Iterator[Path]:
    return (Path(entry.path) for entry in _entries(folder) if entry.is_dir(follow_symlinks=False))


def _files(folder: Path, suffix: str) -> Iterator[Path]:
    return (Path(e.path) for e in _entries(folder) if e.name.endswith(suffix) and _is_plain(Path(e.path)))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    if folder.is_symlink():
        return []
    try:
        with os.scandir(folder) as entries:
            return list(itertools.islice(entries, MOST_ENTRIES))
    except OSError:
        return []


def _newest(paths: Iterator[Path]) -> Iterator[Path]:
    return iter(sorted(paths, key=lambda path: (-_written_ns(path), path)))


def _written_ns(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_mtime_ns
    except OSError:  # gone since it was listed
        return 0


def _in_time(paths: Iterator[Path]) -> Iterator[Path]:
    """The first of `paths`, as many as are allowed, for as long as there is time."""
    end = time.monotonic() + MOST_S
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.islice(paths, MOST_BINARIES))


def _is_plain(path: Path) -> bool:
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= MOST_BYTES


def _head(path: Path) -> str:
    return _whole(path, HEAD_BYTES)


def _whole(path: Path, limit: int = MOST_BYTES) -> str:
    """Up to `limit` bytes of a plain file; "" for anything else."""
    if not _is_plain(path):
        return ""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""
