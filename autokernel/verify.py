"""Does a model with a run's kernels in it still compute what it did, and are the kernels called at all?

The whole output tree is compared with a wider run of the same model, PyTorch's own error being the yardstick. When it
disagrees, each kernel is switched on alone to find the one at fault. Runs and files are not known here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autokernel.applied import Applied
from autokernel.errors import ConfigError
from autokernel.model import LoadedModel
from autokernel.outputs import Expected, LeafError, expect, leaf_errors, miscounted, output_leaves
from autokernel.sites import Replacement


@dataclass(kw_only=True)
class Verification:
    """What was found; see `to_json`.

    `compiler` (a name in `customop.COMPILERS`) is how the model ran with the kernels; `calls` and `fallbacks` are of
    one forward. `problem` is what is wrong with the output when all kernels are on, and `alone` what is wrong when only
    that kernel is. `worst` is the output tensor nearest to what is not accepted.
    """

    model: str
    dtype: str
    truth: str
    tensors: int
    compiler: str = "graph"
    worst: LeafError | None = None
    problem: str | None = None
    alone: dict[str, str] = field(default_factory=dict)
    idle: str | None = None
    calls: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether the output agrees and every kernel was called."""
        return self.problem is None and self.idle is None

    def to_json(self) -> dict[str, Any]:
        """A JSON object with `agrees` beside the fields."""
        return {**asdict(self), "agrees": self.agrees}


def verify(loaded: LoadedModel, replacements: Sequence[Replacement], compiler: str = "graph") -> Verification:
    """Compare the model with all kernels in it; when it disagrees, with each of them alone.

    Args:
        compiler: as `apply` takes it; what is compared is the second forward, as a CUDA graph is recorded in the first.
    """
    expected = expect(loaded)
    found = Verification(
        model=loaded.name,
        dtype=expected.dtype,
        truth=expected.truth_dtype,
        tensors=len(expected.eager),
        compiler=compiler,
    )
    with Applied(loaded.model, replacements, compiler=compiler) as applied:
        with contextlib.suppress(Exception):  # whatever it is, the second forward raises it, too
            output_leaves(loaded.model, loaded)
        for item in replacements:
            item.calls = item.fallbacks = 0
        found.worst, found.problem = _compared(loaded, expected)
        found.calls, found.fallbacks = dict(applied.calls), dict(applied.fallbacks)
        try:
            applied.check()
        except ConfigError as error:
            found.idle = f"{error}: {error.hint}"
        if found.problem:
            found.alone = _alone(loaded, expected, replacements)
    return found


def _alone(loaded: LoadedModel, expected: Expected, replacements: Sequence[Replacement]) -> dict[str, str]:
    """What is wrong with the output when only one kernel is on, by op; ops whose kernel is right are left out."""
    found: dict[str, str] = {}
    for item in replacements:
        for other in replacements:
            other.enabled = other is item
        _, problem = _compared(loaded, expected)
        if problem:
            found[item.op] = problem
    for item in replacements:
        item.enabled = True
    return found


def _compared(loaded: LoadedModel, expected: Expected) -> tuple[LeafError | None, str | None]:
    """The worst output tensor of one forward, and what is wrong with it, if anything."""
    try:
        actual = output_leaves(loaded.model, loaded)
    except Exception as error:  # a kernel may raise anything
        return None, f"the forward raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if reason := miscounted(actual, expected):
        return None, reason
    worst = max(leaf_errors(actual, expected), key=lambda leaf: (leaf.reason is not None, leaf.severity))
    return worst, f"{worst.name} {worst.shape}: {worst.reason}" if worst.reason else None
