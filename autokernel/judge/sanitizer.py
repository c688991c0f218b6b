"""compute-sanitizer on a kernel that is about to be kept: out-of-bounds accesses (memcheck) and races (racecheck).

Both see what no output shows: a read behind a buffer, a missing barrier that happens not to matter on an idle GPU. The
tools run in processes of their own, as confined as the judge's children, on small cases: they slow kernels down by one
to two orders of magnitude. Where a tool cannot run, that is said, and nothing is refused for it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from autokernel.judge.forkserver import scrubbed_environment
from autokernel.loading import PACKAGE_ROOT
from autokernel.records import Case, TimedCase
from autokernel.spec import KernelSpec

log = logging.getLogger(__name__)

TOOLS = ("memcheck", "racecheck")
DEADLINE_S = 120.0
FOUND = 87
"""Exit status by which the tool says that it found something."""

MOST_USER_BYTES, MOST_CASES = 8 << 20, 6
ERRORS = re.compile(r"=+ (Invalid|Misaligned|Out-of-range|Error: |Program hit|Race reported|Uninitialized|Barrier).*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one tool says: `fault` in its own words, or None; `failure` is why it could not be run to the end."""

    tool: str
    fault: str | None = None
    failure: str | None = None


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer: on the PATH, or in the CUDA toolkit."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which(str(Path(home) / "bin" / "compute-sanitizer"))


def cases_for(spec: KernelSpec, user: Sequence[TimedCase]) -> list[Case]:
    """The user's calls as far as they are small, then the op's own: a few, in the dtype of the user's."""
    small = [item.case for item in user if spec.bytes_moved(item.case) <= MOST_USER_BYTES]
    dtype = user[0].case.dtype if user else "bf16"
    own = [case.with_dtype(dtype) for case in (spec.stress_case, *spec.cases[:2], *spec.edges[:2])]
    return [*small, *own][:MOST_CASES]


def sanitize(
    kernel: Path, cases: Sequence[Case], policy: dict[str, object], scratch: Path, source: str | None = None
) -> list[Finding]:
    """Every tool's finding on the kernel file for `cases`; empty where compute-sanitizer is not installed.

    Args:
        source: `KernelSpec.source` of the cases' op.
    """
    program = find_sanitizer()
    if program is None:
        return []
    job = {
        "kernel": str(kernel),
        "scratch": str(scratch),
        "sandbox": policy,
        "cases": [case.to_json() for case in cases],
        "seed": secrets.randbits(62),
        "source": source,
    }
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        findings = list(pool.map(lambda tool: _run(program, tool, json.dumps(job), scratch), TOOLS))
    return [_believed(finding, kernel, scratch) for finding in findings]


def _believed(finding: Finding, kernel: Path, scratch: Path) -> Finding:
    """racecheck knows no barriers in shared memory: it takes the bulk copies that they order for races."""
    if finding.tool != "racecheck" or finding.fault is None:
        return finding
    texts = [kernel, *scratch.rglob("*.ptx"), *scratch.rglob("*.cu")]
    if any(b"mbarrier" in path.read_bytes() for path in texts if path.is_file() and not path.is_symlink()):
        return _failed("racecheck", "it cannot follow bulk copies")
    return finding


def _run(program: str, tool: str, job: str, scratch: Path) -> Finding:
    code = (
        f"import sys; sys.path.append({str(PACKAGE_ROOT.parent)!r}); "
        "from autokernel.judge.sanitized import main; main(sys.stdin.read())"
    )
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    command += ["--target-processes", "application-only", sys.executable, "-I", "-c", code]
    # Each allocation is then one of the driver's, whose end the tool knows.
    environment = {**scrubbed_environment(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(job, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return _failed(tool, f"not done within {DEADLINE_S:g} s")
    faults = [match.group(0).lstrip("= ") for match in map(ERRORS.match, output.splitlines()) if match]
    if process.returncode == FOUND and faults:
        return Finding(tool=tool, fault=f"{faults[0]} ({len(faults)} reports)")
    if process.returncode not in (0, FOUND):
        last = [line for line in output.splitlines() if line.strip()][-1:]
        return _failed(tool, f"exit status {process.returncode}: {''.join(last)[:300]}")
    return Finding(tool=tool)


def _failed(tool: str, why: str) -> Finding:
    log.warning("compute-sanitizer's %s did not look at the kernel: %s", tool, why)
    return Finding(tool=tool, failure=why)
