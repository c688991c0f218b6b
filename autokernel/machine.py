"""What this machine offers to confine and to time a child process: kernel features, memory limits, a quiet clock.

Each probe answers for itself and changes nothing here; what Linux does not offer, or another system, reads as absent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

_LANDLOCK_CREATE_RULESET = 444  # the same number on every architecture
_LANDLOCK_VERSION_FLAG = 1
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

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


def user_namespaces() -> bool:
    """Whether an ordinary process may make a user and a network namespace; tried in a child of its own."""
    if sys.platform != "linux":
        return False
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({_CLONE_NEWUSER | _CLONE_NEWNET}) != 0)"
    try:
        return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def seccomp() -> bool:
    """Whether the kernel has seccomp filters."""
    return any(
        line.startswith("Seccomp_filters:") or line.startswith("Seccomp:") for line in _lines("/proc/self/status")
    )


def cgroup_memory() -> str | None:
    """How a memory limit by cgroup could be set (`v2, limit 8.0 GiB`), or None without the memory controller."""
    if "memory" in " ".join(_lines("/sys/fs/cgroup/cgroup.controllers")).split():
        limits = _lines("/sys/fs/cgroup/memory.max")
        return f"v2, {_limit(limits[0])}" if limits else "v2"
    limits = _lines("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return f"v1, {_limit(limits[0])}" if limits else None


def _limit(text: str) -> str:
    unlimited = not text.isdigit() or int(text) > 1 << 60
    return "no limit set" if unlimited else f"limit {int(text) / 2**30:.1f} GiB"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


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
