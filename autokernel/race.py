"""The ways to run a model with its kernels, against each other and against torch.compile, interleaved in one process.

Inductor's compilation cannot be bounded from inside: this runs in a child process (`model_worker`) that may be killed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autokernel.capture import compile_call
from autokernel.customop import way_of
from autokernel.integrate import Integration
from autokernel.interleave import MOST_BLOCKS, Run, interleave
from autokernel.loading import get_spec
from autokernel.model import LoadedModel
from autokernel.outputs import disagreement, expect, output_leaves
from autokernel.profiler import model_device
from autokernel.records import Interval
from autokernel.replace import Replacer
from autokernel.sites import Replacement
from autokernel.stats import ratio_interval

DROP_BLOCKS = 12  # for the question whether Inductor does better without a kernel
MEASURE_SHARE = 0.2  # of the time, kept for the measurement at the end
DEFAULT, REDUCE_OVERHEAD, MAX_AUTOTUNE = "default", "reduce-overhead", "max-autotune"
"""torch.compile's modes: the second replays CUDA graphs, and so does the third, which takes minutes to compile."""

INDUCTORS = {"graph": "inductor", "cudagraph": "inductor-cudagraph"}
"""How Inductor's way is called beside each of the captured graph's."""

ROOM = 3.0  # times a compilation's seconds, for another without a kernel and for its measurement


@dataclass(kw_only=True)
class _Variant:
    """The model with these kernels, compiled one way; counters of its own."""

    compiler: str
    kernels: list[Replacement]
    replacer: Replacer
    run: Run
    seconds: float  # to compile

    @classmethod
    def of(cls, loaded: LoadedModel, kernels: Sequence[Replacement], compiler: str) -> _Variant:
        own = [replace(item, calls=0, fallbacks=0) for item in kernels]
        replacer = Replacer.of(own, way_of(compiler))
        run = compile_call(loaded.model, replacer.backend)
        seconds = _first_call_s(run, loaded)
        return cls(compiler=compiler, kernels=own, replacer=replacer, run=run, seconds=seconds)

    def outputs(self, loaded: LoadedModel) -> tuple[Tensor, ...]:
        """Those of one forward, which alone is in the counters then."""
        for item in self.kernels:
            item.calls = item.fallbacks = 0
        return output_leaves(self.run, loaded)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Block medians in us of eager, of torch.compile by mode if that was asked for, and of the ways with kernels."""

    times: Mapping[str, Sequence[float]]

    def median_us(self, name: str) -> float:
        """Of the blocks of one of them."""
        return statistics.median(self.times[name])

    def ratio(self, slow: str, fast: str) -> Interval | None:
        """Latency of `slow` / latency of `fast`; None where either was not run."""
        if slow not in self.times or fast not in self.times:
            return None
        return ratio_interval(self.times[slow], self.times[fast])


def race(
    loaded: LoadedModel,
    kernels: Sequence[Replacement],
    *,
    budget_s: float,
    modes: Sequence[str] = (DEFAULT,),
    record: bool = False,
    only: str | None = None,
) -> Integration:
    """The fields of an `Integration` that the faster way gives; without kernels, those of torch.compile alone.

    Args:
        modes: those of torch.compile in which the model without kernels is measured, too; the fastest is what counts.
        record: replay the model with its kernels as a CUDA graph; beside torch.compile's default, its mode that does so
            is measured, too.
        only: the way of `customop.COMPILERS` to measure, where that is known.
    """
    modes = [*modes, *([REDUCE_OVERHEAD] if record and DEFAULT in modes else [])]
    end = time.perf_counter() + budget_s
    result = Integration(used=[item.op for item in kernels])
    runs: dict[str, Run] = {"eager": loaded.model}
    needed_s = 0.0
    for mode in modes:
        runs[mode] = torch.compile(loaded.model, dynamic=False, mode=mode)
        needed_s = max(needed_s, _first_call_s(runs[mode], loaded))
    base = "cudagraph" if record else "graph"
    ways: Mapping[str, _Variant] = {}
    if kernels and only:
        ways = {only: _Variant.of(loaded, kernels, only)}
    elif kernels:
        ways = _ways(loaded, kernels, needed_s, end - MEASURE_SHARE * budget_s, result, base)
    runs |= {name: variant.run for name, variant in ways.items()}
    seconds = max(0.0, end - time.perf_counter())
    timed = Timed(times=interleave(runs, loaded, model_device(loaded), seconds, MOST_BLOCKS))
    if modes:
        result.compile_mode = min(modes, key=timed.median_us)
        result.compile_speedup = timed.ratio("eager", result.compile_mode)
    result.blocks = len(timed.times["eager"])
    if ways:
        result.inductor_gain = timed.ratio(base, INDUCTORS[base])
        sure = result.inductor_gain and result.inductor_gain.low > 1  # Inductor takes its time to compile
        result.compiler = only or (INDUCTORS[base] if sure else base)
        _take(loaded, ways[result.compiler], timed, result)
    return result


def _ways(
    loaded: LoadedModel, kernels: Sequence[Replacement], compile_s: float, end: float, result: Integration, base: str
) -> dict[str, _Variant]:
    """The model with its kernels by compiler. Inductor is not begun with what it may not end before `end`."""
    ways = {base: _Variant.of(loaded, kernels, base)}
    needed_s = compile_s + ways[base].seconds  # without what Inductor's first use costs, but with the kernels' match
    left_s = end - time.perf_counter()
    if left_s < needed_s:
        result.notes.append(
            f"torch.compile with the kernels was not tried: about {needed_s:.0f} s needed, {max(left_s, 0):.0f} s left"
        )
    elif found := _inductor(loaded, kernels, end, result, INDUCTORS[base]):
        ways[found.compiler] = found
    return ways


def _first_call_s(run: Run, loaded: LoadedModel) -> float:
    started = time.perf_counter()
    output_leaves(run, loaded)
    return time.perf_counter() - started


def _take(loaded: LoadedModel, best: _Variant, timed: Timed, result: Integration) -> None:
    best.outputs(loaded)
    result.used = [item.op for item in best.kernels]
    result.left_out = {op: why for op, why in result.left_out.items() if op not in result.used}
    result.calls = {item.op: item.calls for item in best.kernels}
    result.fallbacks = {item.op: item.fallbacks for item in best.kernels}
    result.speedup = timed.ratio("eager", result.compiler)
    result.speedup_over_compile = timed.ratio(result.compile_mode, result.compiler)
    result.eager_us, result.optimized_us = timed.median_us("eager"), timed.median_us(result.compiler)


def _intensity(item: Replacement) -> float:
    """FLOPs of a byte moved, over the kernel's calls. The less, the more does Inductor gain from having it in sight: it
    fuses such an op with its neighbours, and time may not suffice to try without each kernel."""
    spec = get_spec(item.op)
    return sum(map(spec.flops, item.cases)) / max(1, sum(map(spec.bytes_moved, item.cases)))


def _inductor(
    loaded: LoadedModel, kernels: Sequence[Replacement], end: float, result: Integration, compiler: str
) -> _Variant | None:
    """The model as Inductor compiles it with the kernels, or with those of them that help it there, as time allows.

    None when it fails or changes the output: then the captured graph is the way.
    """
    try:
        best = _Variant.of(loaded, kernels, compiler)
    except Exception as error:  # Inductor's own failures have no common class
        first = (str(error).strip().splitlines() or [""])[0]
        result.notes.append(f"torch.compile with the kernels fails: {type(error).__name__}: {first}")
        return None
    expected = expect(loaded)
    if reason := disagreement(best.outputs(loaded), expected):
        result.notes.append(f"torch.compile with the kernels changes the output: {reason}")
        return None
    if best.replacer.record and (reasons := best.replacer.unrecorded):
        result.notes.append(f"torch.compile with the kernels is not recorded as a CUDA graph: {reasons[0]}")
    for item in sorted(kernels, key=_intensity):
        left_s = end - time.perf_counter()
        if len(best.kernels) < 2 or left_s < ROOM * best.seconds:
            break
        fewer = _Variant.of(loaded, [kernel for kernel in best.kernels if kernel.op != item.op], compiler)
        runs = {"with": best.run, "without": fewer.run}
        times = interleave(runs, loaded, model_device(loaded), left_s / len(kernels) / 2, DROP_BLOCKS)
        gain = ratio_interval(times["without"], times["with"])
        if gain.high < 1 and not disagreement(fewer.outputs(loaded), expected):
            result.left_out[item.op] = f"the torch.compile'd model is faster without it: {gain}"
            best = fewer
    return best
