"""New content for timed calls: what a kernel remembers of an earlier call is wrong in the next.

Before each timed call a few rows of its inputs change places, in the buffers that the kernel knows already. The judge
draws the changes, keeps them, and makes them in its own copy when it looks at the output of one of the calls. So a
result that is kept by address, version, shape or a sample of the values goes stale, and one kept by the whole content
is never found again. Every change costs microseconds, and keeps the distribution of the values.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autokernel.judge.wire import flat_storage, written_once
from autokernel.spec import Inputs

Change = tuple[int, int, int, int, float]
"""(argument, dimension, i, j, factor): rows i and j change places; if j is -1, all move on by i and are scaled."""

FEW_OUTPUTS = 64
"""With so few numbers in the output, two rows of the input hardly show in it: everything is changed then."""

FACTORS = (-1.0, 2.0, -2.0, 0.5, -0.5)
MOST_SCALED = 4.0
"""Scales stay within this and its inverse: powers of two, so that nothing is lost in any dtype."""

OTHERS_SHARE = 0.5
"""Of the calls, in which weights and the like change: what is kept for as long as they do not is then found, too."""

ROLL_STEP = 7919
"""Elements by which copies of one input are moved against each other: a prime, so that no row meets its like."""


class Refresher:
    """Draws changes for one set of arguments, call by call."""

    def __init__(self, arguments: Sequence[Any], output_elements: int, rng: random.Random) -> None:
        self._rng = rng
        self._all = output_elements <= FEW_OUTPUTS
        self._tensors = [(number, value) for number, value in enumerate(arguments) if isinstance(value, Tensor)]
        self._scale = {number: 1.0 for number, _ in self._tensors}

    def draw(self) -> list[Change]:
        """What to change before the next call: the first argument, and each other in every second call or so."""
        drawn = [pair for pair in self._tensors if pair[0] == 0 or self._rng.random() < OTHERS_SHARE]
        return [change for number, value in drawn if (change := self._one(number, value))]

    def _one(self, number: int, value: Tensor) -> Change | None:
        dim = _widest(value)
        if dim is None:
            return None
        size = value.shape[dim]
        if not self._all:
            i = self._rng.randrange(size)
            return number, dim, i, (i + 1 + self._rng.randrange(size - 1)) % size, 1.0
        factor = 1.0
        if value.is_floating_point():
            allowed = [f for f in FACTORS if 1 / MOST_SCALED <= abs(f * self._scale[number]) <= MOST_SCALED]
            factor = self._rng.choice(allowed)
            self._scale[number] *= factor
        return number, dim, 1 + self._rng.randrange(size - 1), -1, factor


def apply(arguments: Sequence[Any], changes: Sequence[Change]) -> None:
    """Make the changes in place; both sides do it with the same operations, so that every bit agrees.

    The first argument, which a model computes anew for each call, changes behind PyTorch's version counter, as it does
    when a kernel writes it. Of the others, weights above all, a kernel may keep what it computed until that moves.
    """
    for number, dim, i, j, factor in changes:
        value = arguments[number].data if number == 0 else arguments[number]
        value = value[written_once(value.stride())]
        if j < 0:
            moved = torch.roll(value, i, dim)
            value.copy_(moved if factor == 1.0 else moved * factor)
            continue
        first, second = value.select(dim, i), value.select(dim, j)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


def private_copy(value: Any, steps: int = 0) -> Any:
    """A tensor in fresh memory of the usual kind, where a model's own activations would be, with the same strides.

    Its elements have moved on by `steps` * `ROLL_STEP` places. Other values are returned as they are.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    storage = flat_storage(value)
    return storage.roll(steps * ROLL_STEP % storage.numel()).as_strided(value.shape, value.stride())


def private_copies(inputs: Mapping[str, Any], steps: int = 0) -> dict[str, Any]:
    """`private_copy` of every argument."""
    return {name: private_copy(value, steps) for name, value in inputs.items()}


class History:
    """One prepared set in one child: what it held at first, and every change since."""

    def __init__(self, inputs: Inputs, output_elements: int, rng: random.Random) -> None:
        self._first, self._changes = inputs, list[list[Change]]()
        self._refresher = Refresher(list(inputs.values()), output_elements, rng)

    @property
    def count(self) -> int:
        """How often the set was changed."""
        return len(self._changes)

    def draw(self) -> list[Change]:
        """The next changes, noted."""
        self._changes.append(self._refresher.draw())
        return self._changes[-1]

    def inputs(self, count: int) -> Inputs:
        """What the set held after its first `count` changes."""
        copies = private_copies(self._first)
        values = list(copies.values())
        for changes in self._changes[:count]:
            apply(values, changes)
        return copies


def _widest(value: Tensor) -> int | None:
    """The dimension with the most rows, the last being none unless it is the only one; None when all have one."""
    dims = range(value.dim() - 1) if value.dim() > 1 else range(value.dim())
    sizes = {dim: value.shape[dim] for dim in dims if value.stride(dim) and value.shape[dim] > 1}
    if not sizes and value.dim() > 1 and value.shape[-1] > 1 and value.stride(-1):
        return value.dim() - 1
    return max(sizes, key=sizes.__getitem__, default=None) if value.numel() else None
