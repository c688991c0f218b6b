"""What runs under compute-sanitizer: one kernel on a few cases. It compares nothing; the tool looks on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autokernel.judge import child, folders, sandbox
from autokernel.judge.sandbox import Policy
from autokernel.judge.wire import flat_storage
from autokernel.records import Case

ALIGNED_BYTES = 16


def main(text: str) -> None:
    """Do the job described in `text` (see `autokernel.judge.sanitizer.sanitize`)."""
    job = json.loads(text)
    policy, scratch = Policy.from_json(job["sandbox"]), Path(job["scratch"])
    cases = [Case.from_json(raw) for raw in job["cases"]]
    torch.zeros(1, device="cuda")  # the tool connects while the process may still do what it needs
    sandbox.begin(policy, "cuda", memory_bytes=-1)
    sandbox.enter(policy, "cuda", scratch)
    os.chdir(scratch)
    folders.keep_files_in(scratch)
    kernel = child.load_target({"kernel": job["kernel"]})
    for number, case in enumerate(cases):
        inputs = child.known_spec(case.op, job["source"]).make_inputs(case, job["seed"] + number, "cuda")
        kernel(*map(_padded, inputs.values()))
        torch.cuda.synchronize()


def _padded(value: Any) -> Any:
    """A copy in memory that ends on a multiple of 16 bytes: to load 16 aligned bytes at once, of which some are of no
    use, is no fault, as they never lie on two pages nor in two allocations."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    storage = flat_storage(value)
    nbytes = storage.numel() * storage.element_size()
    memory = torch.zeros(-(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES, dtype=torch.uint8, device=value.device)
    copied = memory[:nbytes].view(value.dtype).copy_(storage)
    return copied.as_strided(value.shape, value.stride())
