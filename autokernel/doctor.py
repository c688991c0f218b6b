"""The checks behind `autokernel doctor`: what is here, what is missing, and the command that mends it.

A check never raises. Only those marked `needed` decide whether the main job can run.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from autokernel import machine
from autokernel.agentchoice import API_KEYS, choose_agent
from autokernel.agents import AGENTS
from autokernel.errors import ConfigError
from autokernel.judge import enforcement
from autokernel.keys import available_keys, keys_path, stored_keys

MIN_PYTHON = (3, 11)
SANDBOX_FIX = "Linux 6.12 or newer with Landlock and seccomp, also within the container"
NOISY_SPREAD, BUSY_LOAD = 0.10, 0.50
"""Above these a clock is called restless: the slow tenth of equal loops, and the load per core."""

OPENMP_SOURCE = """
#include <omp.h>
extern "C" int threads() {
  int count = 0;
  #pragma omp parallel
  {
    #pragma omp single
    count = omp_get_num_threads();
  }
  return count;
}
"""


class Status(StrEnum):
    """What a check found."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the table. `fix` is the command or step that mends it, "" when there is nothing to do."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    needed: bool = False


def examine(workdir: Path, environ: Mapping[str, str]) -> list[Check]:
    """All checks, in the order in which a newcomer needs them."""
    return [
        check_python(),
        check_torch(),
        check_compiler(),
        check_git(),
        check_workdir(workdir),
        check_triton(),
        *check_gpu(),
        check_nvcc(),
        check_keys(environ),
        check_agent(environ),
        check_clock(),
        *check_sandbox(),
    ]


def can_run(checks: list[Check]) -> bool:
    """Whether nothing is missing that the main job needs."""
    return not any(check.needed and check.status is Status.MISSING for check in checks)


def check_python() -> Check:
    """This interpreter is new enough."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= MIN_PYTHON:
        return Check(name="Python", status=Status.OK, detail=version, needed=True)
    return Check(name="Python", status=Status.MISSING, detail=version, fix="install Python 3.11 or 3.12", needed=True)


def check_torch() -> Check:
    """torch can be imported."""
    return _import_check("torch", fix="pip install torch", needed=True)


def check_triton() -> Check:
    """triton can be imported; only GPU kernels need it."""
    return _import_check("triton", fix="pip install triton", needed=False, why="only GPU kernels need it")


def _import_check(name: str, *, fix: str, needed: bool, why: str = "") -> Check:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken installation can raise anything
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        problem = "not installed" if missing else f"{type(error).__name__}: {str(error).splitlines()[0]}"
        detail = f"{problem}; {why}" if why else problem
        return Check(name=name, status=Status.MISSING, detail=detail, fix=fix, needed=needed)
    return Check(name=name, status=Status.OK, detail=str(getattr(module, "__version__", "?")), needed=needed)


def check_compiler() -> Check:
    """A C++ compiler builds an OpenMP function, which is then called."""
    from autokernel.native import BuildError, build, compiler_version, find_compiler

    fix = "apt install g++ (or set CXX to a compiler with OpenMP)"
    compiler = find_compiler()
    if compiler is None:
        return Check(name="C++ compiler", status=Status.MISSING, detail="no g++ or clang++", fix=fix, needed=True)
    try:
        with _scratch_builds():
            threads = ctypes.CDLL(str(build(OPENMP_SOURCE).path)).threads()
        version = compiler_version(compiler)
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        detail = f"{compiler} cannot build an OpenMP function: {_error_line(str(error))}"
        return Check(name="C++ compiler", status=Status.MISSING, detail=detail, fix=fix, needed=True)
    return Check(name="C++ compiler", status=Status.OK, detail=f"{version}; OpenMP with {threads} threads", needed=True)


def _error_line(text: str) -> str:
    """The line of a compiler's message that says most."""
    lines = text.splitlines()
    return next((line for line in lines if "error:" in line and line != "compile error:"), lines[0] if lines else "")


@contextmanager
def _scratch_builds() -> Iterator[None]:
    """Builds go to a folder that is thrown away: the check must compile, not find last week's library."""
    before = os.environ.get("AUTOKERNEL_BUILD_DIR")
    with tempfile.TemporaryDirectory(prefix="autokernel-doctor-") as folder:
        os.environ["AUTOKERNEL_BUILD_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["AUTOKERNEL_BUILD_DIR"]
            else:
                os.environ["AUTOKERNEL_BUILD_DIR"] = before


def check_git() -> Check:
    """git is installed; no identity is needed, as experiments are committed under the project's own."""
    path = shutil.which("git")
    version = _first_line([path, "--version"]) if path else None
    if version is None:
        return Check(name="git", status=Status.MISSING, detail="not found", fix="apt install git", needed=True)
    return Check(name="git", status=Status.OK, detail=version.removeprefix("git version "), needed=True)


def check_workdir(workdir: Path) -> Check:
    """Run directory and results.tsv can be written here."""
    reason = machine.why_not_writable(workdir)
    if reason is None:
        return Check(name="working directory", status=Status.OK, detail=f"{workdir} is writable", needed=True)
    detail = f"{workdir} is not writable: {reason}"
    fix = "run in a directory of your own"
    return Check(name="working directory", status=Status.MISSING, detail=detail, fix=fix, needed=True)


def check_gpu() -> list[Check]:
    """The GPUs that torch sees, and NVIDIA's driver tool."""
    without = "none; kernels are optimized for the CPU (backend cpp)"
    try:
        torch: Any = importlib.import_module("torch")
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception:  # torch is missing, which has its own line, or the driver is broken
        names = []
    driver = _first_line(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    if names:
        gpu = Check(name="GPU", status=Status.OK, detail=", ".join(names))
    elif driver:
        fix = "pip install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        gpu = Check(name="GPU", status=Status.WARN, detail=f"torch does not see {driver}", fix=fix)
    else:
        gpu = Check(name="GPU", status=Status.MISSING, detail=without)
    found = driver or "not found; only NVIDIA GPUs have it"
    return [gpu, Check(name="nvidia-smi", status=Status.OK if driver else Status.MISSING, detail=found)]


def check_nvcc() -> Check:
    """The CUDA compiler; only CUDA C++ kernels need it."""
    path = shutil.which("nvcc")
    if path is None:
        detail = "not found; only CUDA C++ kernels need it"
        return Check(name="nvcc", status=Status.MISSING, detail=detail, fix="install the CUDA toolkit")
    release = _first_line([path, "--version"], containing="release")
    return Check(name="nvcc", status=Status.OK, detail=release or path)


def check_keys(environ: Mapping[str, str]) -> Check:
    """Where each API key is: in which variable, or in the file, and with which mode; values are never shown."""
    path = keys_path(environ)
    try:
        stored = stored_keys(path)
    except ConfigError as error:  # no run begins with such a file
        return Check(name="API keys", status=Status.MISSING, detail=str(error), fix=error.hint, needed=True)
    places = []
    for agent, variable in API_KEYS.items():
        if environ.get(variable, "").strip():
            hidden = " (before the stored one)" if agent in stored else ""
            places.append(f"{agent}: {variable} is set{hidden}")
        elif agent in stored:
            places.append(f"{agent}: stored in {path} (mode {stat.S_IMODE(path.stat().st_mode):04o})")
    if places:
        return Check(name="API keys", status=Status.OK, detail="; ".join(places))
    return Check(
        name="API keys",
        status=Status.MISSING,
        detail=f"none in the environment or in {path}; the built-in search agent needs none",
        fix="`autokernel keys set anthropic` (or openai) for an LLM agent",
    )


def check_agent(environ: Mapping[str, str]) -> Check:
    """Which agent a run takes that is told nothing of it, and why."""
    try:
        name, why = choose_agent("auto", AGENTS, {**environ, **available_keys(environ)})
    except ConfigError:  # which has its own line
        return Check(name="--agent auto", status=Status.WARN, detail="unknown until the file of keys can be read")
    return Check(name="--agent auto", status=Status.OK, detail=f"{name} ({why})")


def check_clock() -> Check:
    """Cores, and whether the machine is quiet enough for small differences."""
    spread, load = machine.spin_spread(), machine.load_per_core()
    busy = load is not None and load > BUSY_LOAD
    loaded = "unknown" if load is None else f"{load:.2f} per core"
    detail = f"{machine.usable_cores()} cores; load {loaded}; equal loops vary by {spread:.0%}"
    if busy or spread > NOISY_SPREAD:
        fix = "close other programs: intervals get wide and small gains are not kept"
        return Check(name="timing", status=Status.WARN, detail=f"restless: {detail}", fix=fix)
    return Check(name="timing", status=Status.OK, detail=f"quiet: {detail}")


def check_sandbox() -> list[Check]:
    """What the judge enforces on a candidate, measure by measure, as tried just now in a throw-away process."""
    found = enforcement.examine()
    checks = [
        Check(
            name=f"sandbox: {measure.name}",
            status=Status.OK if measure.enforced else Status.WARN,
            detail=measure.detail,
        )
        for measure in found.measures
    ]
    if found.missing:
        detail = "judge only kernels that you would run yourself, or use a machine where all of this is enforced"
        checks.append(Check(name="sandbox", status=Status.WARN, detail=detail, fix=SANDBOX_FIX))
    return checks


def _first_line(command: list[str], containing: str = "") -> str | None:
    """First line of a program's output that holds `containing`, None when it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if containing in line and line.strip()]
    return lines[0] if done.returncode == 0 and lines else None
