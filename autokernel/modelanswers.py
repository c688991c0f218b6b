"""What the model's own process answers: profile, choice of kernels, races, outputs. It loads whatever it is told to."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autokernel.applied import load_kernel, load_kernels, measured_compiler
from autokernel.ceilings import measure_ceilings
from autokernel.errors import AutokernelError, WorkerError
from autokernel.integrate import Integration, integrate
from autokernel.journal import write_whole
from autokernel.model import LoadedModel, load_model
from autokernel.model_worker import call_worker
from autokernel.plan import make_plan
from autokernel.profiler import profile_model
from autokernel.race import DEFAULT, MAX_AUTOTUNE, race
from autokernel.records import Case
from autokernel.sites import Replacement
from autokernel.verify import verify

COMPILE_SHARE = 0.6  # of an integration's budget, for torch.compile with the kernels and without
COMPILE_LEAST_S = 20.0  # less is not worth a start
AUTOTUNE_FROM_S, AUTOTUNE_SHARE = 240.0, 0.4  # of a budget from there on, for torch.compile's mode max-autotune
RACE_SHARE = 0.9  # of the time after which it is killed, that a race plans with


def _load(request: Mapping[str, Any]) -> LoadedModel:
    return load_model(
        request["model"],
        device=request["device"],
        dtype=request.get("dtype"),
        seed=request.get("seed", 0),
    )


def _profile(request: Mapping[str, Any]) -> dict[str, Any]:
    loaded = _load(request)
    profile = profile_model(loaded)
    ceilings = measure_ceilings(profile.device)
    backend = request.get("backend") or ("cpp" if request["device"] == "cpu" else "triton")
    plan = make_plan(loaded, profile=profile, ceilings=ceilings, ops=request.get("ops"), backend=backend)
    return {
        "profile": profile.to_json(),
        "plan": plan.to_json(),
        "ceilings": ceilings.to_json(),
        "notes": [*loaded.notes, *plan.notes],
    }


def _integrate(request: Mapping[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    loaded = _load(request)
    kernels = _kernels(request)
    budget_s = float(request["budget_s"])
    note: dict[str, str] = {}

    def raced(chosen: Sequence[str], record: bool) -> Integration | None:
        """In a child of its own: a compilation cannot be stopped otherwise."""
        asked = {
            **request,
            "record": record,
            "kernels": [kernel for kernel in request["kernels"] if kernel["op"] in chosen],
        }
        left_s = budget_s - autotune_s - (time.perf_counter() - started)
        if not (chosen or request.get("compile_baseline")):
            return None
        try:
            return Integration.from_json(_ask_race(asked, left_s))
        except AutokernelError as error:
            note["compile_note"] = f"torch.compile was not measured: {error}"
            return None

    autotune_s = AUTOTUNE_SHARE * budget_s if budget_s >= AUTOTUNE_FROM_S and request.get("compile_baseline") else 0.0
    race_s = COMPILE_SHARE * (budget_s - autotune_s)
    own_s = budget_s - autotune_s - (race_s if race_s >= COMPILE_LEAST_S else 0) - (time.perf_counter() - started)
    result = integrate(loaded, kernels, budget_s=own_s, race=raced)
    if autotune_s and result.used:
        _against_max_autotune(request, result, budget_s - (time.perf_counter() - started))
    for kernel in request["kernels"]:
        _mark(Path(kernel["path"]).parent / "meta.json", kernel["op"] in result.used, result.compiler)
    return {**result.to_json(), **note}


def _against_max_autotune(request: Mapping[str, Any], result: Integration, left_s: float) -> None:
    """Measure the chosen way against torch.compile's slowest mode to compile, in a child that may be killed for it."""
    used = [kernel for kernel in request["kernels"] if kernel["op"] in result.used]
    try:
        asked = {**request, "kernels": used, "modes": [MAX_AUTOTUNE], "only": result.compiler}
        found = Integration.from_json(_ask_race(asked, left_s))
        result.autotune_speedup, result.speedup_over_autotune = found.compile_speedup, found.speedup_over_compile
    except AutokernelError as error:
        result.notes.append(f"torch.compile in mode {MAX_AUTOTUNE} was not measured: {error}")


def _kernels(request: Mapping[str, Any]) -> list[Replacement]:
    return [
        load_kernel(
            Path(kernel["path"]),
            op=kernel["op"],
            cases=[Case.from_json(raw) for raw in kernel["cases"]],
            builds=Path(kernel["path"]).parent / "builds",
        )
        for kernel in request["kernels"]
    ]


def _verify(request: Mapping[str, Any]) -> dict[str, Any]:
    loaded = _load(request)
    folder = Path(request["run"])
    return verify(loaded, load_kernels(folder), measured_compiler(folder)).to_json()


def _mark(meta: Path, used: bool, compiler: str) -> None:
    """Tell `autokernel.apply` whether the kernel helps the whole model, and how the model is then run."""
    if meta.is_file():
        told = {**json.loads(meta.read_text()), "used": used, "compiler": compiler}
        write_whole(meta, json.dumps(told, indent=1))


def _ask_race(request: Mapping[str, Any], left_s: float) -> dict[str, Any]:
    """What a race in `left_s` seconds finds. Raises: AutokernelError when it fails, or the time does not suffice."""
    if left_s < COMPILE_LEAST_S:
        raise WorkerError(f"{max(left_s, 0):.0f} s are left", hint="allow the run more time")
    asked = {**request, "request": "race", "budget_s": RACE_SHARE * left_s}
    return call_worker(asked, deadline_s=left_s, workdir=Path.cwd())


def _race(request: Mapping[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    loaded = _load(request)
    kernels = _kernels(request)
    left_s = float(request["budget_s"]) - (time.perf_counter() - started)
    modes = request.get("modes", [DEFAULT] if request.get("compile_baseline") else [])
    record, only = bool(request.get("record")), request.get("only")
    return race(loaded, kernels, budget_s=left_s, modes=modes, record=record, only=only).to_json()


ANSWERS = {"profile": _profile, "integrate": _integrate, "verify": _verify, "race": _race}
"""What to do for a request, by its name; a JSON object answers a JSON object."""
