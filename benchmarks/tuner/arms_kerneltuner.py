"""Kernel Tuner's strategies on a recorded table, in its own simulation mode with a cache file made from the table.

It evaluates one configuration at a time. The order of its evaluations is read from its results and then charged in a
session, compilations one after the other.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulated import Over, Session

from autokernel.tuner.space import Point

FAILURES = {"COMPILE_ERROR": "CompilationFailedConfig"}
"""Its word for a failure; every other one happens at run time."""


def kernel_tuner_arm(strategy: str) -> Callable[[Session], None]:
    """A run of `strategy` with its default options, and as many evaluations as the session allows."""

    def run(session: Session) -> None:
        with contextlib.suppress(Over):
            for point in _order(session, strategy):
                session.measure([point])

    return run


def _order(session: Session, strategy: str) -> list[Point]:
    import numpy as np
    from kernel_tuner import tune_kernel

    random.seed(session.seed)
    np.random.seed(session.seed)
    space = session.table.space
    names = [knob.name for knob in space.knobs]
    params = {knob.name: [_plain(value) for value in knob.values] for knob in space.knobs}
    values = {name: {value: index for index, value in enumerate(params[name])} for name in names}

    def allowed(config: dict[str, Any]) -> bool:
        return tuple(values[name][config[name]] for name in names) in session.cells

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "cache.json"
        path.write_text(json.dumps(_cache(session, params)))
        with contextlib.redirect_stdout(io.StringIO()):
            results, _ = tune_kernel(
                "kernel", "", (1,), [], params,
                restrictions=allowed, strategy=strategy, strategy_options={"max_fevals": session.budget},
                cache=str(path), simulation_mode=True, quiet=True,
            )  # fmt: skip
    return list(dict.fromkeys(tuple(values[name][result[name]] for name in names) for result in results if result))


def _cache(session: Session, params: dict[str, list[Any]]) -> dict[str, Any]:
    """Its cache file: one reading per cell, drawn as the session would; times are in ms."""
    cells = {}
    for point, cell in session.cells.items():
        entry: dict[str, Any] = {name: params[name][index] for name, index in zip(params, point, strict=True)}
        us = random.Random(f"{session.table.name}/{session.seed}/{point}").choice(cell.us) if cell.us else None
        entry["time"] = us / 1e3 if us is not None else FAILURES.get(cell.status, "RuntimeFailedConfig")
        entry |= {"compile_time": cell.compile_s * 1e3, "benchmark_time": cell.timing_s * 1e3, "verification_time": 0}
        cells[",".join(str(entry[name]) for name in params)] = entry
    return {
        "device_name": "recorded",
        "kernel_name": "kernel",
        "problem_size": [1],
        "tune_params_keys": list(params),
        "tune_params": params,
        "objective": "time",
        "cache": cells,
    }


def _plain(value: Any) -> Any:
    """Empty text is no value in its files."""
    return "none" if value == "" else value
