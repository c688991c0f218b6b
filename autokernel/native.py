"""Compile native source that stands in a kernel.py to a shared library with a plain C ABI, and call it with tensors.

    lib = build(SOURCE, flags=["-O3"])
    lib.rmsnorm(x, weight, out, rows, cols, eps)

A tensor is passed as its data pointer, an int or bool as int64_t, a float as double, None as a null pointer; the C
function returns an int, and anything but 0 raises. No framework header is included, so a build takes well under a
second. Results are cached by content in `$AUTOKERNEL_BUILD_DIR` (the judge gives each candidate its own).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COMPILE_TIMEOUT_S = 120
MAX_ERROR_LINES = 25
CPP_FLAGS = ("-std=c++17", "-shared", "-fPIC", "-fopenmp", "-march=native")


class BuildError(RuntimeError):
    """The compiler refused the source, or is missing; the message holds its own lines."""


class Library:
    """A loaded shared library; each attribute is one of its C functions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Callable[..., None]:
        try:
            function = getattr(self._handle, name)
        except AttributeError:
            raise AttributeError(f'the library exports no {name!r}; declare it extern "C"') from None
        function.restype = ctypes.c_int

        def call(*args: Any) -> None:
            status = function(*[_argument(value) for value in args])
            if status != 0:
                raise RuntimeError(f"{name} returned {status}")

        setattr(self, name, call)  # later calls skip this lookup
        return call


def _argument(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, (bool, int)):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    pointer = getattr(value, "data_ptr", None)
    if pointer is None:
        raise TypeError(f"cannot pass a {type(value).__name__} to native code; pass tensors, ints, floats or None")
    return ctypes.c_void_p(pointer())


def build(source: str, *, flags: Sequence[str] = ()) -> Library:
    """Compile C++ `source` with `flags` added and load it; the same text and flags are compiled once.

    Raises: BuildError with the compiler's message, or when no compiler is found.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found: install g++ or set CXX")
    command = [compiler, *CPP_FLAGS, *flags]
    folder = build_dir()
    target = folder / f"{_key(command, source)}.so"
    if not target.exists():
        _compile(command, source, folder, target)
    return Library(target)


def find_compiler() -> str | None:
    """Path of the C++ compiler: `$CXX` if set, else g++, else clang++."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++"]:
        if path := shutil.which(name):
            return path
    return None


def build_dir() -> Path:
    """Folder of compiled libraries: `$AUTOKERNEL_BUILD_DIR`, else the user's cache."""
    root = os.environ.get("AUTOKERNEL_BUILD_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) if root else Path(cache) / "autokernel" / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(command: Sequence[str], source: str, folder: Path, target: Path) -> None:
    # A folder of its own and an atomic rename: an interrupted build leaves no lock and no half library behind.
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        path = Path(scratch) / "kernel.cpp"
        path.write_text(source)
        built = Path(scratch) / "kernel.so"
        try:
            done = subprocess.run(
                [*command, "kernel.cpp", "-o", "kernel.so"],
                cwd=scratch,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMPILE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"the compiler did not finish within {COMPILE_TIMEOUT_S} s") from None
        if done.returncode != 0 or not built.exists():
            lines = (done.stderr or done.stdout or f"exit code {done.returncode}").splitlines()
            raise BuildError("\n".join(["compile error:", *lines[:MAX_ERROR_LINES]]))
        built.replace(target)


def _key(command: Sequence[str], source: str) -> str:
    text = "\0".join([*command, compiler_version(command[0]), _cpu_flags(), source])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def compiler_version(compiler: str) -> str:
    """First line of `compiler --version`."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    return (done.stdout or done.stderr).splitlines()[0] if (done.stdout or done.stderr) else "unknown"


@functools.cache
def _cpu_flags() -> str:
    """What -march=native depends on: a cache shared between machines must not mix instruction sets."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), sys.platform)
    except OSError:
        return sys.platform
