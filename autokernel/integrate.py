"""Which kernels make the whole model faster, and by how much: measured in the model, against eager, interleaved.

Kernels are tried one after the other on top of those already chosen. What is never called, changes the output or does
not surely help is left out with its reason. This runs in a child process (`model_worker`), as it loads candidates.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from autokernel.capture import compile_call
from autokernel.interleave import MOST_BLOCKS, Run, interleave
from autokernel.judge.devicememory import release_unused
from autokernel.model import LoadedModel
from autokernel.outputs import Expected, disagreement, expect, output_leaves
from autokernel.profiler import model_device
from autokernel.records import Interval
from autokernel.replace import Replacer
from autokernel.sites import Replacement
from autokernel.stats import ratio_interval

CHOICE_LOOKS = (6, 6, 12, 24)  # blocks before each look at whether a kernel surely helps or surely does not
RECORD_S = 2.0  # for the question whether a CUDA graph helps
CHOICE_SHARE = 0.5  # of the time left, for choosing; the rest is for the final measurement
TRIES = "no sure gain in the whole model: {}"
RECORD_GAIN = 1.05
"""How many times faster the model must be as a CUDA graph, whose memory is kept, for kernels to be chosen there."""


@dataclass(kw_only=True)
class Integration:
    """The measurement as it goes into the journal; see `to_json`."""

    used: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    speedup: Interval | None = None
    eager_us: float | None = None
    optimized_us: float | None = None
    compiler: str = "graph"
    inductor_gain: Interval | None = None
    compile_speedup: Interval | None = None
    compile_mode: str = "default"
    speedup_over_compile: Interval | None = None
    autotune_speedup: Interval | None = None
    speedup_over_autotune: Interval | None = None
    graph_overhead: Interval | None = None
    blocks: int = 0
    outputs: str = ""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A JSON object. `speedup` is eager / optimized latency, `speedup_over_compile` torch.compile's / optimized;
        `compiler` (a name in `customop.COMPILERS`) is how that runs, `inductor_gain` the captured graph's latency /
        Inductor's with the same kernels; `compile_speedup` is eager / torch.compile in `compile_mode`, its fastest mode
        that was measured beside them; `autotune_speedup` and `speedup_over_autotune` are the same of its mode
        max-autotune, measured apart; `graph_overhead` the captured graph without a kernel / eager; `calls` and
        `fallbacks` are of one forward."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Integration:
        """The inverse of `to_json`."""
        values = {item.name: raw[item.name] for item in fields(cls)}
        intervals = {name: Interval(**value) for name, value in values.items() if name in _INTERVALS and value}
        return cls(**{**values, **intervals})


_INTERVALS = (
    *("speedup", "inductor_gain", "compile_speedup", "speedup_over_compile", "graph_overhead"),
    *("autotune_speedup", "speedup_over_autotune"),
)

Race = Callable[[Sequence[str], bool], "Integration | None"]
"""The chosen ops, and whether the graph is replayed as a CUDA graph -> what `autokernel.race` found of them in the time
that is left; None when it found nothing."""


def integrate(
    loaded: LoadedModel,
    replacements: Sequence[Replacement],
    *,
    budget_s: float,
    race: Race = lambda _chosen, _record: None,
) -> Integration:
    """Choose among the kernels, in the given order, and measure the model with the chosen ones.

    The choice is made in the captured graph; `race` then tells whether Inductor makes more of the chosen ones.
    At least `MIN_BLOCKS` blocks are timed for each decision, however small the budget.
    """
    result = Integration()
    record = _choose_and_measure(loaded, replacements, time.perf_counter() + budget_s, result)
    gc.collect()  # a race's process needs the GPU memory that the truth and the compiled graphs have taken here
    release_unused(0)
    adopt(race(result.used, record), result)
    if result.used:
        _withdraw_what_slows(result)
    return result


def _choose_and_measure(
    loaded: LoadedModel, replacements: Sequence[Replacement], deadline: float, result: Integration
) -> bool:
    """Fill in what the captured graph tells; whether it is replayed as a CUDA graph."""
    expected = expect(loaded)
    trial = _Trial(loaded, replacements)
    usable = [item for item in replacements if not _unusable(trial, item, expected, result)]
    record = trial.record = _helps_to_record(trial, result)
    chosen = _choose(trial, usable, deadline, result)
    while chosen and (reason := disagreement(trial.outputs(chosen), expected)):
        result.left_out[chosen.pop().op] = f"with the others it changes the output: {reason}"
    if not chosen:
        result.notes.append("no kernel makes the whole model faster; it is left as it was")
        return record
    result.used, result.compiler = [item.op for item in chosen], "cudagraph" if record else "graph"
    result.outputs = (
        f"{len(expected.eager)} tensors agree with {expected.truth_dtype}, within {expected.dtype} tolerance"
    )
    if len(chosen) < len(replacements):
        trial = _Trial(loaded, chosen, record=record)  # as `apply` will do it, without the places of the others
        if reason := disagreement(trial.outputs(chosen), expected):
            raise RuntimeError(f"the chosen kernels alone change the output: {reason}")
    result.calls, result.fallbacks = trial.counts(chosen)
    _measure(trial, chosen, deadline, result)
    return record


class _Trial:
    """The model with a place for each kernel, any subset of which can be switched on."""

    def __init__(self, loaded: LoadedModel, replacements: Sequence[Replacement], *, record: bool = False) -> None:
        self.loaded = loaded
        self.replacements = replacements
        self.device = model_device(loaded)
        self.record = record
        """Whether graphs are replayed as CUDA graphs."""
        self.replacer = Replacer.of(replacements)
        self.compiled: Run = compile_call(loaded.model, self.replacer.backend)
        self.switch(())
        output_leaves(self.compiled, loaded)  # compiles

    def switch(self, on: Sequence[Replacement]) -> None:
        self.replacer.record = self.record
        for item in self.replacements:
            item.enabled = item in on

    def outputs(self, on: Sequence[Replacement]) -> tuple[torch.Tensor, ...]:
        self.switch(on)
        return output_leaves(self.compiled, self.loaded)

    def counts(self, on: Sequence[Replacement]) -> tuple[dict[str, int], dict[str, int]]:
        """Calls and fallbacks by op in one forward."""
        for item in on:
            item.calls = item.fallbacks = 0
        self.outputs(on)
        return {item.op: item.calls for item in on}, {item.op: item.fallbacks for item in on}

    def variant(self, on: Sequence[Replacement], *, record: bool | None = None) -> Run:
        """The compiled model with these kernels on; `record` counts for `self.record` where it is given."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.switch(on)
            self.replacer.record = self.record if record is None else record
            return self.compiled(*args, **kwargs)

        return run


def _helps_to_record(trial: _Trial, result: Integration) -> bool:
    """Whether the model waits for the host so much that a CUDA graph of it, without a kernel, is far faster."""
    if trial.device.type != "cuda":
        return False
    gain = _gain(trial, {"without": trial.variant((), record=False), "with": trial.variant((), record=True)}, RECORD_S)
    if gain.low > 1:
        result.notes.append(f"as a CUDA graph the captured model without a kernel is {gain} as fast")
    elif reasons := trial.replacer.unrecorded:
        result.notes.append(f"not recorded as a CUDA graph: {reasons[0]}")
    helps = gain.low > RECORD_GAIN
    if not helps:
        trial.replacer.forget_recordings()
    return helps


def _unusable(trial: _Trial, item: Replacement, expected: Expected, result: Integration) -> bool:
    calls, fallbacks = trial.counts([item])
    if calls[item.op] == 0:
        met = f"; {fallbacks[item.op]} calls with other shapes ran the original" if fallbacks[item.op] else ""
        result.left_out[item.op] = f"never called in the model{met}"
    elif reason := disagreement(trial.outputs([item]), expected):
        result.left_out[item.op] = f"changes the output: {reason}"
    return item.op in result.left_out


def _choose(trial: _Trial, usable: Sequence[Replacement], deadline: float, result: Integration) -> list[Replacement]:
    chosen: list[Replacement] = []
    end = time.perf_counter() + CHOICE_SHARE * max(0.0, deadline - time.perf_counter())
    for i, item in enumerate(usable):
        share_s = max(0.0, end - time.perf_counter()) / (len(usable) - i)
        runs = {"without": trial.variant(tuple(chosen)), "with": trial.variant((*chosen, item))}
        gain = _gain(trial, runs, share_s)
        if gain.low > 1:
            chosen.append(item)
        else:
            result.left_out[item.op] = TRIES.format(gain)
    return chosen


def _gain(trial: _Trial, runs: Mapping[str, Run], seconds: float) -> Interval:
    """Latency without / with the kernel. A clear answer ends it early; a wrong one costs little, as the chosen set is
    measured afresh."""
    end = time.perf_counter() + seconds
    without: list[float] = []
    with_it: list[float] = []
    for blocks in CHOICE_LOOKS:
        times = interleave(runs, trial.loaded, trial.device, end - time.perf_counter(), blocks)
        without += times["without"]
        with_it += times["with"]
        gain = ratio_interval(without, with_it)
        if gain.low > 1 or gain.high < 1 or time.perf_counter() > end:
            break
    return gain


def _measure(trial: _Trial, chosen: Sequence[Replacement], deadline: float, result: Integration) -> None:
    runs: dict[str, Run] = {
        "eager": trial.loaded.model,
        "graph": trial.variant(()),
        "kernels": trial.variant(tuple(chosen)),
    }
    times = interleave(runs, trial.loaded, trial.device, deadline - time.perf_counter(), MOST_BLOCKS)
    result.speedup = ratio_interval(times["eager"], times["kernels"])
    result.graph_overhead = ratio_interval(times["graph"], times["eager"])
    result.eager_us = statistics.median(times["eager"])
    result.optimized_us = statistics.median(times["kernels"])
    result.blocks = len(times["eager"])


def adopt(found: Integration | None, result: Integration) -> None:
    """What a race measured stands for what was measured before; the reasons why kernels are out are put together."""
    if found is None:
        return
    result.left_out |= found.left_out
    result.notes += found.notes
    result.compile_speedup, result.compile_mode = found.compile_speedup, found.compile_mode
    if found.speedup is None:
        return
    for name in _RACED:
        setattr(result, name, getattr(found, name))


_RACED = (
    *("used", "calls", "fallbacks", "speedup", "eager_us", "optimized_us", "blocks"),
    *("compiler", "inductor_gain", "speedup_over_compile"),
)


def _withdraw_what_slows(result: Integration) -> None:
    """Kernels help the captured graph; where that itself costs more than they gain, the model is better off without.

    What was measured stays in the result: a loss is reported like a win.
    """
    assert result.speedup is not None
    assert result.graph_overhead is not None
    if result.speedup.high >= 1:
        return
    why = "with the kernels the model is slower than eager"
    if result.compiler in ("graph", "cudagraph"):
        why += f"; the captured graph alone takes {result.graph_overhead}"
    result.left_out |= dict.fromkeys(result.used, why)
    result.used = []
    result.notes.append("the model is left as it was")
