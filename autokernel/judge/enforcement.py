"""What of the sandbox this machine enforces, found out by trying, and what a run does about the rest.

`examine` tries it once; `auto`, `strict` and `off` are the user's choices. No torch.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autokernel.errors import ConfigError
from autokernel.judge.sandbox import Policy
from autokernel.loading import PACKAGE_ROOT
from autokernel.settings import SANDBOX_MODES

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60.0

MEASURES: Mapping[str, tuple[str, str]] = {
    "network": ("no TCP, UDP or other sockets", "seccomp"),
    "UNIX sockets": ("no connection to services of this machine", "seccomp"),
    "writing files": ("only below the candidate's own folder", "Landlock"),
    "reading files": ("Python, compilers and the system only; not your files, not the run", "Landlock"),
    "file modes": ("no chmod, chown or attributes", "seccomp"),
    "signals": ("only to processes that it started", "Landlock ABI 6, Linux 6.12"),
    "other processes": ("no look into them, no change of their limits or priority", "Landlock and seccomp"),
    "namespaces and mounts": ("none", "seccomp"),
    "orphans": ("whatever it starts ends with it", "Linux"),
    "memory limit": ("private memory of each process", "Linux"),
    "file size": ("1 GiB for each file", "rlimit"),
}
"""measure -> (what holds when it is enforced, what it takes)."""

_CPU_ONLY = ("UNIX sockets",)
"""A GPU's driver needs these itself."""

_BOOT = "import sys; sys.path.append(sys.argv[1]); from autokernel.judge.attempts import main; main(*sys.argv[2:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One thing that a candidate must not do. `detail` says what holds, or what is missing."""

    name: str
    enforced: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The means that can be used here, and what they achieve."""

    policy: Policy
    measures: tuple[Measure, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the measures that do not hold."""
        return tuple(measure.name for measure in self.measures if not measure.enforced)


@functools.cache
def examine(device: str = "cpu") -> Examined:
    """Try the sandbox of a child on `device` in a throw-away process."""
    if sys.platform != "linux":
        return _examined({"policy": Policy().to_json(), "faults": {}, "held": {"file size": True}})
    with tempfile.TemporaryDirectory(prefix="autokernel-probe-") as folder:
        command = [sys.executable, "-I", "-c", _BOOT, str(PACKAGE_ROOT.parent), folder, device]
        environment = {**os.environ, "AUTOKERNEL_PROBE": secrets.token_hex(8)}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
            )
            return _examined(json.loads(done.stdout))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            log.warning("the sandbox could not be tried: %s %s", error, getattr(error, "stderr", None) or "")
            return _examined({"policy": Policy().to_json(), "faults": {}, "held": {}})


def _examined(found: Mapping[str, Any]) -> Examined:
    measures = []
    faults = "; ".join(f"{name}: {fault}" for name, fault in found["faults"].items())
    for name, (holds, takes) in MEASURES.items():
        enforced = bool(found["held"].get(name))
        missing = f"not enforced here; it takes {takes}" + (f" ({faults})" if faults else "")
        measures.append(Measure(name=name, enforced=enforced, detail=f"{holds} ({takes})" if enforced else missing))
    return Examined(policy=Policy.from_json(found["policy"]), measures=tuple(measures))


def decide(mode: str, device: str, protected: Sequence[str] = (), builds: Path | None = None) -> Policy:
    """The policy of children on `device` under the user's choice `mode`.

    Raises: ConfigError for `strict` where a measure cannot be enforced.
    """
    if mode not in SANDBOX_MODES:
        raise ConfigError(f"unknown sandbox mode {mode!r}", hint=f"known: {', '.join(SANDBOX_MODES)}")
    if mode == "off":
        return Policy()
    found = examine(device)
    missing = _missing(found, device)
    if missing and mode == "strict":
        raise ConfigError(
            f"the sandbox cannot enforce everything here: {', '.join(missing)}",
            hint="`autokernel doctor` says what each takes; --sandbox auto enforces the rest",
        )
    if missing:
        _warn(missing)
    closed = tuple(dict.fromkeys([*protected, *_homes(), str(Path.cwd())]))
    return replace(found.policy, protected=closed, builds=None if builds is None else str(builds.resolve()))


def summary(mode: str, device: str) -> str:
    """One line for the report: what was not enforced."""
    if mode == "off":
        return "off (--sandbox off): candidates could read and write your files and use the network"
    missing = _missing(examine(device), device)
    exempt = f"; on a GPU not: {', '.join(_CPU_ONLY)}" if device != "cpu" else ""
    if not missing:
        return f"all {len(MEASURES)} measures enforced" + exempt
    return f"not enforced on this machine: {', '.join(missing)}" + exempt


def _missing(found: Examined, device: str) -> tuple[str, ...]:
    return tuple(name for name in found.missing if device == "cpu" or name not in _CPU_ONLY)


@functools.cache
def _warn(missing: tuple[str, ...]) -> None:
    log.warning("not enforced on candidates here: %s (see `autokernel doctor`)", ", ".join(missing))


def _homes() -> list[str]:
    try:
        return [str(Path.home())]
    except RuntimeError:
        return []
