"""Do two runs of a model agree? Every tensor of the output tree is compared, the truth being a run in fp64."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autokernel.errors import ConfigError
from autokernel.model import LoadedModel
from autokernel.modelinputs import cache_parts, is_cache
from autokernel.spec import DEFAULT_TOLERANCES, DTYPE_NAMES, DTYPES
from autokernel.usercode import first_line

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
    names: tuple[str, ...] = ()

    def name(self, index: int) -> str:
        """Where in the output tree a tensor is: `output.logits`, `output[1]`."""
        return self.names[index] if self.names else str(index)


@dataclass(frozen=True, kw_only=True)
class LeafError:
    """How far one output tensor is from the truth, at the element that is worst for what is accepted there.

    `eager_error` is the largest error of PyTorch's own run. Errors are None where they are not numbers (integers,
    another shape, NaN), and `reason` says what is wrong, None when nothing is.
    """

    name: str
    shape: tuple[int, ...]
    error: float | None = None
    eager_error: float | None = None
    accepted: float | None = None
    reason: str | None = None

    @property
    def severity(self) -> float:
        """Error as a multiple of what is accepted; infinite where something else is wrong."""
        if self.error is None or self.accepted is None:
            return float("inf") if self.reason else 0.0
        return self.error / self.accepted if self.accepted else (0.0 if self.error == 0 else float("inf"))


def output_leaves(run: Callable[..., Any], loaded: LoadedModel) -> tuple[Tensor, ...]:
    """Every tensor of the output of one forward, without gradients and with fixed random numbers."""
    return tuple(leaf for _, leaf in _named_outputs(run, loaded))


def _named_outputs(run: Callable[..., Any], loaded: LoadedModel) -> list[tuple[str, Tensor]]:
    torch.manual_seed(SEED)
    with torch.no_grad():
        tree = run(*loaded.args, **loaded.kwargs)
    return [(name, leaf.detach()) for name, leaf in named_tensors(tree, "output")]


def named_tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in nested lists, tuples, mappings, dataclasses, caches and registered pytree nodes, and its place."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif is_dataclass(tree) and not isinstance(tree, type):
        for item in fields(tree):
            yield from named_tensors(getattr(tree, item.name), f"{name}.{item.name}")
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for i, value in enumerate(tree):
            yield from named_tensors(value, f"{name}[{i}]")
    elif is_cache(tree):
        yield from _of_cache(tree, name)
    else:
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        yield from ((f"{name} leaf {i}", leaf) for i, leaf in enumerate(leaves))


def _of_cache(cache: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    for key, part in cache_parts(cache).items():
        yield from _of_cache(part, f"{name}.{key}")
    for i, layer in enumerate(getattr(cache, "layers", [])):
        states = {key: value for key, value in vars(layer).items() if isinstance(value, Tensor)}
        yield from ((f"{name}.layers[{i}].{key}", value) for key, value in states.items())


def expect(loaded: LoadedModel) -> Expected:
    """Run the model eagerly as it is, and a copy of it in fp64; where neither that nor fp32 runs, eager is the truth.

    Raises: ConfigError when the output holds no tensor, as there would be nothing to compare.
    """
    named = _named_outputs(loaded.model, loaded)
    eager = tuple(leaf for _, leaf in named)
    if not eager:
        raise ConfigError(
            f"{loaded.name}: the output holds no tensor, so nothing can be compared",
            hint="let forward return tensors, or lists, dicts or dataclasses of them",
        )
    floats = [leaf for leaf in [*loaded.model.parameters(), *eager] if leaf.is_floating_point()]
    narrowest = min((leaf.dtype for leaf in floats), key=lambda dtype: dtype.itemsize, default=torch.float32)
    truth, truth_dtype = _truth(loaded, eager, narrowest)
    return Expected(
        eager=eager,
        truth=truth,
        truth_dtype=truth_dtype,
        dtype=DTYPE_NAMES.get(narrowest, "fp32"),
        names=tuple(name for name, _ in named),
    )


def _truth(loaded: LoadedModel, eager: tuple[Tensor, ...], narrowest: torch.dtype) -> tuple[tuple[Tensor, ...], str]:
    wider = [name for name in ("fp64", "fp32") if DTYPES[name].itemsize > narrowest.itemsize]
    reasons = []
    for name in wider:
        try:
            truth = _widened_run(loaded, DTYPES[name])
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # a model that fixes its own dtypes
            reasons.append(f"{name} ({first_line(error)[:200]})")
            continue
        if [leaf.shape for leaf in truth] != [leaf.shape for leaf in eager]:
            reasons.append(f"{name} (it returns other shapes)")
        elif not all(bool((wide.isfinite() | ~own.isfinite()).all()) for wide, own in zip(truth, eager, strict=True)):
            reasons.append(f"{name} (NaN or infinity where it has none)")  # fp64's lowest number is -inf in fp32, say
        else:
            return truth, name
    if reasons:
        _log.warning("%s does not run in %s: compared with its own eager output", loaded.name, ", ".join(reasons))
    return eager, "eager"


def _widened_run(loaded: LoadedModel, dtype: torch.dtype) -> tuple[Tensor, ...]:
    def widened(tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)

    wide = LoadedModel(
        model=copy.deepcopy(loaded.model).to(dtype),
        args=widened(loaded.args),
        kwargs=widened(loaded.kwargs),
        name=loaded.name,
    )
    return output_leaves(wide.model, wide)


def disagreement(actual: Sequence[Tensor], expected: Expected) -> str | None:
    """None when every leaf is right, else one line about the first that is not."""
    if reason := miscounted(actual, expected):
        return reason
    for i, leaf in enumerate(leaf_errors(actual, expected)):
        if leaf.reason:
            return f"output tensor {i} {leaf.shape}: {leaf.reason}"
    return None


def miscounted(actual: Sequence[Tensor], expected: Expected) -> str | None:
    """None when there are as many tensors as there should be, else one line."""
    if len(actual) == len(expected.eager):
        return None
    return f"{len(actual)} output tensors instead of {len(expected.eager)}"


def leaf_errors(actual: Sequence[Tensor], expected: Expected) -> Iterator[LeafError]:
    """How far each output tensor is from the truth; there must be as many as expected."""
    for i, (got, eager, truth) in enumerate(zip(actual, expected.eager, expected.truth, strict=True)):
        yield _leaf_error(expected.name(i), got, eager, truth, expected.dtype)


def _leaf_error(name: str, got: Tensor, eager: Tensor, truth: Tensor, dtype: str) -> LeafError:
    shape = tuple(eager.shape)
    if (got.shape, got.dtype, got.device) != (eager.shape, eager.dtype, eager.device):
        reason = f"is {tuple(got.shape)} {got.dtype} on {got.device}, should be {eager.dtype} on {eager.device}"
        return LeafError(name=name, shape=shape, reason=reason)
    if not got.is_floating_point():
        wrong = int((got != eager).sum())
        return LeafError(name=name, shape=shape, reason=f"{wrong} elements differ" if wrong else None)
    finite = eager.isfinite()
    if not torch.equal(got.isfinite(), finite):
        reason = "NaN or infinity where eager has none, or the other way round"
        return LeafError(name=name, shape=shape, reason=reason)
    if not bool(finite.any()):
        return LeafError(name=name, shape=shape)
    return _finite_error(name, shape, got[finite].double(), eager[finite].double(), truth.double()[finite], dtype)


def _finite_error(
    name: str, shape: tuple[int, ...], got: Tensor, eager: Tensor, right: Tensor, dtype: str
) -> LeafError:
    size = right.abs()
    error = (got - right).abs()
    own = (eager - right).abs().max()
    tolerance = DEFAULT_TOLERANCES.get(dtype, DEFAULT_TOLERANCES["fp32"])
    promised = tolerance.atol * size.square().mean().sqrt() + tolerance.rtol * size
    limit = torch.maximum(promised, EAGER_FACTOR * own)
    at = int((error / limit.clamp_min(torch.finfo(torch.float64).tiny)).argmax())
    worst, accepted, eager_error = float(error[at]), float(limit[at]), float(own)
    reason = f"an error of {worst:.3g} where {accepted:.3g} is accepted (eager's: {eager_error:.3g})"
    return LeafError(
        name=name,
        shape=shape,
        error=worst,
        eager_error=eager_error,
        accepted=accepted,
        reason=None if bool((error <= limit).all()) else reason,
    )
