"""Do two runs of a model agree? Every tensor of the output tree is compared, the truth being a run in fp64."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autokernel.model import LoadedModel
from autokernel.spec import DEFAULT_TOLERANCES, DTYPE_NAMES

_log = logging.getLogger(__name__)

EAGER_FACTOR = 8.0
"""How many times eager's own largest error is still accepted: sums in another order differ by a few times."""

SEED = 0  # of a model that draws random numbers in its forward


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Eager's output tensors and the truth, leaf by leaf; `dtype` is the narrowest floating one of the model."""

    eager: tuple[Tensor, ...]
    truth: tuple[Tensor, ...]
    truth_dtype: str
    dtype: str


def output_leaves(run: Callable[..., Any], loaded: LoadedModel) -> tuple[Tensor, ...]:
    """Every tensor of the output of one forward, without gradients and with fixed random numbers."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        tree = run(*loaded.args, **loaded.kwargs)
    return tuple(leaf.detach() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def expect(loaded: LoadedModel) -> Expected:
    """Run the model eagerly as it is, and a copy of it in fp64; where that fails, eager itself is the truth."""
    eager = output_leaves(loaded.model, loaded)
    floats = [leaf for leaf in [*loaded.model.parameters(), *eager] if leaf.is_floating_point()]
    narrowest = min((leaf.dtype for leaf in floats), key=lambda dtype: dtype.itemsize, default=torch.float32)
    truth, truth_dtype = _truth(loaded, eager)
    return Expected(eager=eager, truth=truth, truth_dtype=truth_dtype, dtype=DTYPE_NAMES.get(narrowest, "fp32"))


def _truth(loaded: LoadedModel, eager: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], str]:
    try:
        wide = LoadedModel(
            model=copy.deepcopy(loaded.model).double(),
            args=_widened(loaded.args),
            kwargs=_widened(loaded.kwargs),
            name=loaded.name,
        )
        truth = output_leaves(wide.model, wide)
        if [leaf.shape for leaf in truth] == [leaf.shape for leaf in eager]:
            return truth, "fp64"
        _log.warning("%s in fp64 returns other shapes: compared with its own eager output", loaded.name)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # a model that fixes its own dtypes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _log.warning("%s does not run in fp64 (%s): compared with its own eager output", loaded.name, reason[:200])
    return eager, "eager"


def _widened(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, tree)


def disagreement(actual: Sequence[Tensor], expected: Expected) -> str | None:
    """None when every leaf is right, else one line about the first that is not."""
    if len(actual) != len(expected.eager):
        return f"{len(actual)} output tensors instead of {len(expected.eager)}"
    for i, (got, eager, truth) in enumerate(zip(actual, expected.eager, expected.truth, strict=True)):
        if reason := _leaf_disagreement(got, eager, truth, expected.dtype):
            return f"output tensor {i} {tuple(eager.shape)}: {reason}"
    return None


def _leaf_disagreement(got: Tensor, eager: Tensor, truth: Tensor, dtype: str) -> str | None:
    if (got.shape, got.dtype, got.device) != (eager.shape, eager.dtype, eager.device):
        return f"is {tuple(got.shape)} {got.dtype} on {got.device}, should be {eager.dtype} on {eager.device}"
    if not got.is_floating_point():
        return None if torch.equal(got, eager) else f"{int((got != eager).sum())} elements differ"
    if not torch.equal(got.isfinite(), eager.isfinite()):
        return "NaN or infinity where eager has none, or the other way round"
    right, finite = truth.double(), eager.isfinite()
    if not bool(finite.any()):
        return None
    size = right[finite].abs()
    error = (got.double()[finite] - right[finite]).abs()
    own = (eager.double()[finite] - right[finite]).abs().max()
    tolerance = DEFAULT_TOLERANCES.get(dtype, DEFAULT_TOLERANCES["fp32"])
    promised = tolerance.atol * size.square().mean().sqrt() + tolerance.rtol * size
    limit = torch.maximum(promised, EAGER_FACTOR * own)
    if bool((error <= limit).all()):
        return None
    worst = int((error - limit).argmax())
    return (
        f"an error of {float(error[worst]):.3g} where {float(limit[worst]):.3g} is accepted (eager's: {float(own):.3g})"
    )
