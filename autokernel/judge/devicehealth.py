"""Is the GPU well? Its memory must come back when a candidate's processes are gone, and it must answer a new one."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Any

import torch

from autokernel.errors import WorkerError

log = logging.getLogger(__name__)

SLACK_BYTES = 2 << 30
"""What other programs may take meanwhile."""

CONTEXT_BYTES, CONTEXTS_SHARE, MOST_CONTEXTS = 600 << 20, 0.05, 8
"""What an idle child with a context takes, and which part of the GPU's memory, and how many, they may take together."""

COMES_BACK_WITHIN_S, ANSWERS_WITHIN_S = 10.0, 90.0
ASK_AGAIN_S, MOST_WAITING_S = 30.0, 3600.0
PROBE = "import torch; x = torch.ones(1024, device='cuda'); assert float((x + x).sum()) == 2048"


def usable_bytes() -> int:
    """Free memory of the current GPU, and what this process's allocator keeps for itself."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def idle_children() -> int:
    """How many children with a context the GPU can well spare."""
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return max(1, min(MOST_CONTEXTS, int(CONTEXTS_SHARE * properties.total_memory / CONTEXT_BYTES)))


def await_memory(before: int, *, within_s: float = COMES_BACK_WITHIN_S) -> None:
    """Wait until about as much memory is usable as `before` the children ran, in bytes.

    What another program takes meanwhile is no fault: there is a warning, and the run goes on with what is left.
    Raises: WorkerError when the GPU does not answer either: a process hangs in it that cannot be ended.
    """
    end = time.monotonic() + within_s
    slack = SLACK_BYTES + idle_children() * CONTEXT_BYTES  # whose contexts may not all have been made at first
    while (missing := before - slack - usable_bytes()) > 0:
        if time.monotonic() > end:
            lost = f"{(missing + slack) / 2**30:.1f} GiB of GPU memory did not come back when a candidate ended"
            if not answers():
                raise WorkerError(f"{lost}, and the GPU does not answer", hint="nvidia-smi shows who holds it")
            log.warning("%s; nvidia-smi shows who holds it. The run goes on with the rest", lost)
            return
        time.sleep(0.1)


def answers() -> bool:
    """Whether a new process can compute on the GPU."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=ANSWERS_WITHIN_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def wait_until_it_answers() -> None:
    """Return once the GPU answers, asking again for an hour. Raises: WorkerError."""
    start = time.monotonic()
    while not answers():
        if time.monotonic() - start > MOST_WAITING_S:
            raise WorkerError("the GPU has not answered for an hour", hint="reset it, then go on with --resume")
        log.warning("the GPU does not answer: the run waits and asks again every %g s", ASK_AGAIN_S)
        time.sleep(ASK_AGAIN_S)
