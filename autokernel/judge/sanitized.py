"""What runs under compute-sanitizer: one kernel on a few cases. It compares nothing; the tool looks on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from autokernel.judge import child, sandbox
from autokernel.judge.sandbox import Policy
from autokernel.loading import get_spec
from autokernel.records import Case


def main(text: str) -> None:
    """Do the job described in `text` (see `autokernel.judge.sanitizer.sanitize`)."""
    job = json.loads(text)
    policy, scratch = Policy.from_json(job["sandbox"]), Path(job["scratch"])
    cases = [Case.from_json(raw) for raw in job["cases"]]
    torch.zeros(1, device="cuda")  # the tool connects while the process may still do what it needs
    sandbox.begin(policy, "cuda", memory_bytes=-1)
    sandbox.enter(policy, "cuda", scratch)
    os.chdir(scratch)
    child.keep_files_in(scratch)
    kernel = child.load_target({"kernel": job["kernel"]})
    for number, case in enumerate(cases):
        inputs = get_spec(case.op).make_inputs(case, job["seed"] + number, "cuda")
        kernel(*inputs.values())
        torch.cuda.synchronize()
