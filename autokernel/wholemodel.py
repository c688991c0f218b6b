"""The run's dealings with the whole model: profile it at the start, put the best kernels back and measure at the end.

Both happen in a child process of their own: the user's code may crash, and the run's process never imports a candidate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autokernel.gitrepo import RunRepository
from autokernel.history import KernelHistory
from autokernel.journal import write_whole
from autokernel.loading import REFERENCE, STARTER
from autokernel.model_worker import call_worker
from autokernel.rundir import RunDir
from autokernel.settings import Settings, device_of

PROFILE_DEADLINE_S = 900.0
VERIFY_DEADLINE_S = 900.0
INTEGRATE_SLACK_S = 120.0
"""What the measurement at the end may take beyond its budget (a last block, a compilation) before it is killed."""


def short_name(model: str) -> str:
    """A name for the run's id: `examples/llama.py:build` -> `llama`, `hf:LlamaForCausalLM` -> `LlamaForCausalLM`."""
    return Path(model.removeprefix("hf:").split(":")[0]).stem


def profile(settings: Settings) -> dict[str, Any]:
    """Profile, plan and ceilings of the model, as JSON objects under these names.

    Raises: ConfigError with the user's own exception when the model does not run.
    """
    return _ask(settings, "profile", PROFILE_DEADLINE_S, ops=settings.ops)


def export(run_dir: RunDir, history: KernelHistory) -> None:
    """Write the op's best kernel and its verified cases where `autokernel.apply` looks for them."""
    folder = run_dir.optimized_dir(history.op)
    write_whole(folder / "kernel.py", history.incumbent)
    for name, text in _own_files(run_dir, history.op).items():
        write_whole(folder / name, text)
    meta = {
        "op": history.op,
        "backend": history.backend,
        "cases": [item.case.to_json() for item in history.planned.cases],
        "used": True,
    }
    write_whole(folder / "meta.json", json.dumps(meta, indent=1))


def _own_files(run_dir: RunDir, op: str) -> dict[str, str]:
    """The files that make an op of a captured subgraph, by name; none for the ops of `reference.py`."""
    found = (run_dir.regions / op / name for name in (REFERENCE, STARTER))
    return {path.name: path.read_text() for path in found if path.is_file()}


def commit(repo: RunRepository, run_dir: RunDir, history: KernelHistory) -> str:
    """Commit the op's best kernel as `optimized/<op>.py`, with what the op is where it is a captured subgraph; the new
    tip of the run's branch."""
    files = {f"optimized/{history.op}.py": history.incumbent}
    if reference := _own_files(run_dir, history.op).get(REFERENCE):
        files[f"optimized/{history.op}.{REFERENCE}"] = reference
    return repo.commit_files(
        files,
        subject=f"{history.op}: best kernel of this run",
        trailers={"Op": history.op, "Latency-us": f"{history.incumbent_us:.2f}"},
    )


def measure(settings: Settings, run_dir: RunDir, histories: Iterable[KernelHistory], budget_s: float) -> dict[str, Any]:
    """Which of the kernels make the whole model faster, and by how much; kernels left out are marked as not used."""
    kernels = [
        {
            "op": history.op,
            "path": str(run_dir.optimized_dir(history.op) / "kernel.py"),
            "cases": [item.case.to_json() for item in history.planned.cases],
        }
        for history in histories
    ]
    more = {"kernels": kernels, "budget_s": budget_s, "compile_baseline": settings.compile_baseline}
    return _ask(settings, "integrate", budget_s + INTEGRATE_SLACK_S, **more)


def verify(settings: Settings, run_dir: RunDir) -> dict[str, Any]:
    """Whether the run's model still computes the same with the run's kernels in it: a `Verification` as JSON.

    Raises: ConfigError when the model does not run or the run has no kernel in use; WorkerError when a kernel crashes.
    """
    return _ask(settings, "verify", VERIFY_DEADLINE_S, run=str(run_dir.path))


def _ask(settings: Settings, request: str, deadline_s: float, **more: Any) -> dict[str, Any]:
    """The answer of the model's own process to a request about the run's model."""
    asked = {
        "request": request,
        "model": settings.model,
        "dtype": settings.dtype,
        "device": device_of(settings.backend),
        "backend": settings.backend,
        "seed": settings.seed,
        **more,
    }
    return call_worker(asked, deadline_s=deadline_s, workdir=settings.workdir)
