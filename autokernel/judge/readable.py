"""Which folders a candidate's process may read: Python, PyTorch, compilers and the system; nothing of the user's.

Landlock knows no exceptions, so this is a list of what is allowed. A folder of the list that contains something to be
protected (the home folder, the run, the project's checkout) is replaced by its other children.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from autokernel.loading import PACKAGE_ROOT, toplevel

SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/opt",
    "/proc",
    "/sys",
    "/nix/store",
    "/gnu/store",
    "/run/opengl-driver",
)
CONFIGURATION = (
    "alternatives",
    "ccache.conf",
    "clang",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "nvidia",
    "OpenCL",
    "os-release",
    "passwd",
)
"""What is read of /etc; the rest (keys of hosts and services, password hashes) is nothing to a kernel."""

SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/home", "/root", "/mnt", "/srv")
"""Where other programs and users keep things: nothing there is readable as a whole, whatever lists it."""

PLAIN_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
GPU_DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/dxg")
COMPILERS = ("g++", "gcc", "clang++", "clang", "nvcc", "hipcc")
OF_A_TOOLCHAIN = ("bin", "include", "lib", "lib32", "lib64", "libexec", "nvvm", "targets", "amdgcn")
SHARED_MEMORY = "/dev/shm"


@functools.cache
def readable_roots(protected: tuple[str, ...]) -> tuple[str, ...]:
    """Folders and files, resolved, that this interpreter and the compilers on its path live in.

    Nothing at or above a path of `protected` is among them; something below it can be (a virtual environment in the
    user's project).
    """
    closed = {os.path.realpath(path) for path in (*protected, *SHARED)} - _foundations()
    if (PACKAGE_ROOT.parent / "pyproject.toml").is_file():
        closed.add(str(PACKAGE_ROOT.parent))  # a checkout: its history and its runs lie beside the package
    found: set[str] = set()
    for root in {os.path.realpath(path) for path in _candidates()} - {"/"}:
        found.update(_without(root, closed))
    return tuple(sorted(root for root in found if not any(_inside(root, other) for other in found)))


def gpu_devices() -> tuple[str, ...]:
    """Device files that a GPU's runtime opens."""
    return tuple(str(path) for pattern in GPU_DEVICES for path in Path("/").glob(pattern.lstrip("/")))


@functools.cache
def openmp_shares_memory() -> bool:
    """Whether the loaded OpenMP runtime, LLVM's or Intel's, registers itself in /dev/shm and may abort without it."""
    names = {Path(path).name for path in _mapped_files()}
    return any(name.startswith(("libomp", "libiomp")) for name in names)


def _candidates() -> Iterator[str]:
    yield from SYSTEM
    yield from (f"/etc/{name}" for name in CONFIGURATION)
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix)
    yield from sysconfig.get_paths().values()
    yield from filter(None, sys.path)
    yield from (str(PACKAGE_ROOT), str(toplevel("reference.py")), str(toplevel("kernels")))
    for name in ("PATH", "LD_LIBRARY_PATH"):
        yield from filter(os.path.isabs, os.environ.get(name, "").split(os.pathsep))
    yield from filter(None, (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "ROCM_PATH")))
    for path in filter(None, map(shutil.which, (*COMPILERS, os.environ.get("CXX", ""), os.environ.get("CC", "")))):
        # Its headers lie beside its bin folder; so may anything else, if the user installed it into ~/.local.
        yield from (str(Path(path).resolve().parent.parent / name) for name in OF_A_TOOLCHAIN)
    yield from (str(Path(path).parent) for path in _mapped_files())


def _mapped_files() -> set[str]:
    """Files that are mapped here: every shared library that importing PyTorch has brought."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return {path for path in paths if path.startswith("/") and ".so" in Path(path).name}


def _foundations() -> set[str]:
    """Folders that are never closed, even when somebody works in them: without them nothing starts."""
    return {os.path.realpath(path) for path in (*SYSTEM, sys.prefix, sys.base_prefix, str(PACKAGE_ROOT), "/")}


def _without(root: str, closed: Iterable[str]) -> list[str]:
    """`root` as a list of paths that leave out everything in `closed`."""
    inside = [path for path in closed if _inside(path, root)]
    if root in closed or not os.access(root, os.F_OK):
        return []
    if not inside:
        return [root]
    try:
        children = [entry.path for entry in os.scandir(root) if not entry.is_symlink()]
    except OSError:
        return []
    return [path for child in children for path in _without(child, inside)]


def _inside(path: str, folder: str) -> bool:
    """Whether `path` lies below `folder`."""
    return path.startswith(folder.rstrip("/") + "/")
