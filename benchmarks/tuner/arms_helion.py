"""Helion's own searches on a recorded table: the real package, with a provider that reads the table.

The searches run through Helion's adapter for kernels that are not its own. Knobs become its fragments, block sizes and
warps their special kinds, as its searches move those in ways of their own; what the constraints forbid is filtered
before it is measured, by its own setting.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from simulated import Over, Session

from autokernel.tuner.knobs import Knob, Pow2
from autokernel.tuner.space import Point

QUICK = {"initial_population": 30, "copies": 2, "max_generations": 5}
"""What the package's quick effort sets."""


NO_FINAL_ROUNDS = {"HELION_AUTOTUNE_FINAL_SELECTION_ROUNDS": "0", "HELION_AUTOTUNE_FINAL_REBENCHMARK_TOP_K": "0"}
"""After its search it times the finalists for seconds each on the GPU, which measures nothing new."""


def helion_arm(algorithm: str, **settings: Any) -> Callable[[Session], None]:
    """A run of `algorithm` with its defaults, but for `settings` of its constructor."""

    def run(session: Session) -> None:
        import numpy as np

        os.environ.update(NO_FINAL_ROUNDS)
        random.seed(session.seed)
        np.random.seed(session.seed)
        torch.manual_seed(session.seed)
        with contextlib.suppress(Over):
            _search(session, algorithm, settings).autotune()

    return run


def _search(session: Session, algorithm: str, settings: dict[str, Any]) -> Any:
    from helion.autotuner import external, search_algorithms

    space = session.table.space

    def allowed(config: Any) -> Any:
        point = _point(session, config)
        return config if point is not None and space.allowed(point) else None

    kernel = external._ExternalKernelAdapter(
        external.create_user_config_spec(
            {knob.name: _fragment(knob, session.table.default[knob.name]) for knob in space.knobs}
        ),
        compile_fn=lambda config: lambda: _point(session, config),
        args=(torch.zeros(1),),
        device=torch.device("cpu"),
        autotune_random_seed=session.seed,
        autotune_log_level=logging.CRITICAL,
        autotune_progress_bar=False,
        autotune_accuracy_check=False,
        autotune_config_filter=allowed,
    )
    search = search_algorithms[algorithm](kernel, (torch.zeros(1),), **settings)
    search._benchmark_provider_cls = lambda **given: _provider(session, **given)
    return search


def _point(session: Session, config: Any) -> Point | None:
    return session.table.space.locate({**session.table.default, **config.config})


def _provider(session: Session, **given: Any) -> Any:
    from helion.autotuner.benchmark_provider import BenchmarkProvider, BenchmarkResult

    class Recorded(BenchmarkProvider):
        """Answers from the table."""

        def __init__(self, **given: Any) -> None:
            self.mutated_arg_indices: Sequence[int] = ()

        def setup(self) -> None:
            pass

        def cleanup(self) -> None:
            pass

        def benchmark(self, configs: list[Any], **_options: Any) -> list[Any]:
            points = [_point(session, config) for config in configs]
            known = [point for point in points if point is not None]
            session.measure(known)
            return [self._result(config, point) for config, point in zip(configs, points, strict=True)]

        def benchmark_isolated(self, fns: list[Any], **_options: Any) -> list[Any]:
            """Times again what its functions stand for."""
            points = [fn() for fn in fns]
            return [min(times) / 1e3 if times else None for times in map(sorted, session.again(points))]

        def _result(self, config: Any, point: Point | None) -> Any:
            cell = session.cells.get(point) if point is not None else None
            us = session.reading(point) if point is not None else None
            return BenchmarkResult(
                config=config,
                fn=lambda: point,
                perf=us / 1e3 if us is not None else float("inf"),
                status="ok" if us is not None else "error",
                compile_time=cell.compile_s if cell else None,
            )

    return Recorded(**given)


def _fragment(knob: Knob, default: Any) -> Any:
    from helion.autotuner import config_fragment as fragments

    values = knob.values
    if isinstance(knob, Pow2) and len(values) > 1 and list(values) == [values[0] << i for i in range(len(values))]:
        kind = fragments.PowerOfTwoFragment
        if knob.name.startswith("BLOCK"):
            kind = fragments.BlockSizeFragment
        if knob.name == "num_warps":
            kind = fragments.NumWarpsFragment
        return kind(values[0], values[-1], default)
    if all(type(value) is int for value in values) and list(values) == list(range(values[0], values[-1] + 1)):
        return fragments.IntegerFragment(values[0], values[-1], default)
    # Its enumerations have no default but their first value.
    return fragments.EnumFragment((default, *(value for value in values if value != default)))
