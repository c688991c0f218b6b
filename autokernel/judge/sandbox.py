"""What a child gives up: `begin` when it is forked, `enter` once it knows its folder and before it loads anything.

The judge decides what is to be used (a `Policy`, from what `autokernel.judge.enforcement` found to work here); a child
that cannot do it says so and ends. After `enter` there is no way back, for the candidate or for what it starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autokernel.judge import landlock, readable, seccomp

MAX_FILE_BYTES = 1 << 30
MAX_OPEN_FILES = 4096
_PR_SET_PDEATHSIG = 1
_CAP_DAC_OVERRIDE = 1 << 1
_CAPABILITY_VERSION = 0x20080522
_PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With one of these set an OpenMP runtime pins each of its threads as it starts it."""


class SandboxError(Exception):
    """A measure that works on this machine could not be taken in this child."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which means a child uses. `landlock` is an ABI version, 0 for none; `protected` is what it may not even read.

    `builds` is the folder in which the scratch folders of all children lie.
    """

    landlock: int = 0
    seccomp: bool = False
    capabilities: bool = False
    protected: tuple[str, ...] = ()
    builds: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Policy:
        """Inverse of `to_json`."""
        return Policy(**{**raw, "protected": tuple(raw["protected"])})


def prepare(policy: Policy) -> None:
    """Find out once, before the first fork, what every child would have to find out."""
    if policy.landlock:
        readable.readable_roots(policy.protected)
        readable.openmp_shares_memory()


def begin(policy: Policy, device: str, memory_bytes: int) -> None:
    """Limits, a session of its own, and everything that does not depend on the scratch folder.

    On a GPU the file system is closed in two steps: the driver starts threads, which the second step does not reach,
    so they must not be freer than a candidate that breaks into them may be.
    Raises: SandboxError.
    """
    _limit(memory_bytes)
    try:
        if policy.capabilities:
            drop_capabilities()
        if policy.seccomp:
            pinned = any(os.environ.get(name) for name in _PINNING)
            seccomp.install(unix_sockets=device != "cpu", affinity=pinned)
        if policy.landlock and device != "cpu" and policy.builds:
            _close_files(policy, device, policy.builds, shared_memory=True)
    except OSError as error:
        raise SandboxError(f"the sandbox could not be entered: {error}") from error


def enter(policy: Policy, device: str, scratch: Path, *, trusted: bool = False) -> None:
    """Leave `scratch` as the only folder to write. `trusted` code (PyTorch's own, as baseline) may also use /dev/shm.

    Raises: SandboxError.
    """
    if not policy.landlock:
        return
    try:
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        if device == "cpu" and threads != 1:
            raise SandboxError(f"{threads} threads run before the sandbox is entered; it would hold one of them only")
        shared_memory = trusted or device != "cpu" or readable.openmp_shares_memory()
        _close_files(policy, device, str(scratch), shared_memory=shared_memory)
    except OSError as error:
        raise SandboxError(f"the sandbox could not be entered: {error}") from error


def _close_files(policy: Policy, device: str, writable: str, *, shared_memory: bool) -> None:
    rights = dict.fromkeys(readable.readable_roots(policy.protected), landlock.READ)
    rights |= dict.fromkeys(readable.PLAIN_DEVICES, landlock.DEVICE)
    if device != "cpu":
        rights |= dict.fromkeys(readable.gpu_devices(), landlock.DEVICE)
        rights[f"/proc/{os.getpid()}"] = landlock.ALL  # the driver names its threads there, and fails if it cannot
    if shared_memory:
        rights[readable.SHARED_MEMORY] = landlock.ALL
    rights[os.path.realpath(writable)] = landlock.ALL
    landlock.restrict(policy.landlock, rights, scope_sockets=device == "cpu")


def drop_capabilities() -> None:
    """Give up root's powers but the one over file modes, which Landlock rules. Without root there is nothing to drop.

    Raises: OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the upper 32 of each
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget failed")
    kept = sets[1] & _CAP_DAC_OVERRIDE
    sets[:] = [kept, kept, 0, 0, 0, 0]
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def _limit(memory_bytes: int) -> None:
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        _offer_to_the_memory_killer()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))


def _offer_to_the_memory_killer() -> None:
    """When memory runs out, this process is to be ended, not the judge."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS):
            raise
