"""What this machine is, and offers to confine and to time a child process: Landlock, cores, a quiet clock.

Each probe answers for itself and changes nothing here; what Linux does not offer, or another system, reads as absent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import statistics
import sys
import time
from pathlib import Path

_LANDLOCK_CREATE_RULESET = 444  # the same number on every architecture
_LANDLOCK_VERSION_FLAG = 1

_DRIVERS = ("nvidia", "amdgpu")
"""Kernel modules that tell their version; the amdgpu of Linux itself has none of its own."""

SPIN_SAMPLES = 80
SPIN_TURNS = 20_000
"""Turns of an empty loop per sample, about a quarter of a millisecond."""


def landlock_abi() -> int | None:
    """Version of the Landlock interface, or None when the kernel lacks it or has it switched off."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    version: int = libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE_RULESET),
        ctypes.c_void_p(None),
        ctypes.c_size_t(0),
        ctypes.c_uint32(_LANDLOCK_VERSION_FLAG),
    )
    return version if version > 0 else None


def gpu_driver(modules: Path = Path("/sys/module")) -> str | None:
    """The GPU driver's name and version, `nvidia 580.95.05`; None where none is loaded or it does not say."""
    for name in _DRIVERS:
        try:
            return f"{name} {(modules / name / 'version').read_text().strip()}"
        except OSError:
            continue
    return None


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's name as Linux tells it, which it does not on every architecture."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_per_core() -> float | None:
    """Load average of the last minute per usable core, this process included; None where the system has none."""
    try:
        return os.getloadavg()[0] / usable_cores()
    except OSError:
        return None


def spin_spread() -> float:
    """How much longer the slow tenth of equal short loops takes than the median one: 0.05 means 5 %."""
    samples = []
    for _ in range(SPIN_SAMPLES):
        start = time.perf_counter()
        for _ in range(SPIN_TURNS):
            pass
        samples.append(time.perf_counter() - start)
    slow = statistics.quantiles(samples, n=10)[-1]
    return slow / statistics.median(samples) - 1


def why_not_writable(folder: Path) -> str | None:
    """None when a file can be created in `folder`, else the system's reason."""
    probe = folder / f".autokernel-probe-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return error.strerror or errno.errorcode.get(error.errno or 0, "unknown reason")
    return None
