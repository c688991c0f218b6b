"""Compile native source that stands in a kernel.py to a shared library with a plain C ABI, and call it with tensors.

    lib = build(SOURCE, flags=["-O3"])                      # C++ by g++ or clang++
    lib = build(SOURCE, backend="cuda", flags=["-DVEC=8"])  # CUDA C++ by nvcc, for the GPU that is present
    lib.rmsnorm(x, weight, out, rows, cols, eps)

A tensor is passed as its data pointer, an int or bool as int64_t, a float as double, None as a null pointer; the C
function returns an int, and anything but 0 raises. With backend "cuda" PyTorch's current stream is appended as the
last argument, the call is made on the device of the first tensor, and the returned int is a cudaError_t. No framework
header is included, so a build takes a second or two. Results are cached by content in `$AUTOKERNEL_BUILD_DIR` (the
judge gives each candidate its own).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

COMPILE_TIMEOUT_S = 120
MAX_ERROR_LINES = 25
CPP_FLAGS = ("-std=c++17", "-shared", "-fPIC", "-fopenmp", "-march=native")
CUDA_FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "--split-compile=0")
"""The last one lets nvcc optimize a file's kernels on all cores."""

ARCH_VARIABLE = "AUTOKERNEL_CUDA_ARCH"
"""Names the target ("80", "90a") where no GPU is present to be asked."""


class BuildError(RuntimeError):
    """The compiler refused the source, or is missing; the message holds its own lines."""


class Library:
    """A loaded shared library; each attribute is one of its C functions."""

    def __init__(self, path: Path, backend: str = "cpp") -> None:
        self.path = path
        self._handle = ctypes.CDLL(str(path))
        self._invoke = _invoke_cuda if backend == "cuda" else _invoke

    def __getattr__(self, name: str) -> Callable[..., None]:
        try:
            function = getattr(self._handle, name)
        except AttributeError:
            raise AttributeError(f'the library exports no {name!r}; declare it extern "C"') from None
        function.restype = ctypes.c_int

        invoke = self._invoke

        def call(*args: Any) -> None:
            status = invoke(function, args)
            if status != 0:
                raise RuntimeError(f"{name} returned {status}{_meaning(status) if invoke is _invoke_cuda else ''}")

        setattr(self, name, call)  # later calls skip this lookup
        return call


class _Unloaded(Library):
    """A library that was built and not loaded: its functions do nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args: None


_loading = True


@contextlib.contextmanager
def built_only() -> Iterator[None]:
    """Let `build` compile libraries without loading them, for a process that only fills the cache."""
    global _loading
    _loading = False
    try:
        yield
    finally:
        _loading = True


def _invoke(function: Any, args: tuple[Any, ...]) -> int:
    status: int = function(*[_argument(value) for value in args])
    return status


def _invoke_cuda(function: Any, args: tuple[Any, ...]) -> int:
    """Call on the first tensor's device with its current stream appended."""
    import torch

    index = next((value.device.index for value in args if getattr(value, "is_cuda", False)), None)
    if index is None:
        raise TypeError("a CUDA kernel needs a tensor on a GPU among its arguments")
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
    passed = [_argument(value) for value in args]
    status: int
    if index == torch.cuda.current_device():
        status = function(*passed, stream)
    else:
        with torch.cuda.device(index):
            status = function(*passed, stream)
    return status


def _meaning(status: int) -> str:
    """What the CUDA runtime says about one of its error numbers."""
    import torch

    try:
        return f" ({torch.cuda.CudaError(status)})"
    except (TypeError, ValueError):  # a number of the kernel's own
        return ""


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


def build(source: str, *, backend: str = "cpp", flags: Sequence[str] = ()) -> Library:
    """Compile `source` with `flags` added and load it; the same text and flags are compiled once.

    Raises: BuildError with the compiler's message, or when no compiler or no CUDA target is found.
    """
    path = compile_library(source, backend=backend, flags=flags)
    return Library(path, backend) if _loading else _Unloaded(path)


def compile_library(source: str, *, backend: str = "cpp", flags: Sequence[str] = (), arch: str | None = None) -> Path:
    """Path of the compiled library, which need not be loadable here. `arch` is a CUDA target such as "90a".

    Raises: BuildError.
    """
    command, suffix = _command(backend, arch)
    command += flags
    folder = build_dir()
    target = folder / f"{_key(command, source)}.so"
    if not target.exists():
        with _only_builder_of(target):
            if not target.exists():
                _compile(command, source, suffix, folder, target)
    return target


@contextlib.contextmanager
def _only_builder_of(target: Path) -> Iterator[None]:
    """Wait while another process builds `target`. The system takes the lock from a process that dies."""
    with target.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _command(backend: str, arch: str | None) -> tuple[list[str], str]:
    """(compiler with its flags, suffix of source files) of a backend."""
    if backend == "cuda":
        compiler = find_nvcc()
        if compiler is None:
            raise BuildError("no nvcc found: install the CUDA toolkit, or set CUDA_HOME")
        arch = arch or cuda_arch()
        return [compiler, *CUDA_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}"], ".cu"
    if backend == "cpp":
        compiler = find_compiler()
        if compiler is None:
            raise BuildError("no C++ compiler found: install g++ or set CXX")
        return [compiler, *CPP_FLAGS], ".cpp"
    raise BuildError(f"unknown backend {backend!r}; native code is cpp or cuda")


def cuda_arch() -> str:
    """The target to compile for: `$AUTOKERNEL_CUDA_ARCH`, else the current GPU with its own instructions ("90a").

    Raises: BuildError when there is neither.
    """
    if named := os.environ.get(ARCH_VARIABLE):
        return named
    import torch

    if not torch.cuda.is_available():
        raise BuildError(f"no CUDA GPU to compile for; set {ARCH_VARIABLE}, to 90a for example")
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}a" if major >= 9 else f"{major}{minor}"


def find_nvcc() -> str | None:
    """Path of the CUDA compiler: that of `$CUDA_HOME`, on the path, or in the usual place."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which(str(Path(home) / "bin" / "nvcc") if home else "nvcc") or shutil.which(
        "/usr/local/cuda/bin/nvcc"
    )


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


def _compile(command: Sequence[str], source: str, suffix: str, folder: Path, target: Path) -> None:
    # A folder of its own and an atomic rename: an interrupted build leaves no lock and no half library behind.
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        path = Path(scratch) / f"kernel{suffix}"
        path.write_text(source)
        built = Path(scratch) / "kernel.so"
        try:
            done = subprocess.run(
                [*command, path.name, "-o", "kernel.so"],
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
    """What `compiler --version` says of the version, on one line."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    lines = (done.stdout or done.stderr).splitlines()
    return next((line for line in lines if "release" in line), lines[0] if lines else "unknown")


@functools.cache
def _cpu_flags() -> str:
    """What -march=native depends on: a cache shared between machines must not mix instruction sets."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), sys.platform)
    except OSError:
        return sys.platform
