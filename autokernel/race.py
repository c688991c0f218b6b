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
from autokernel.integrate import MOST_BLOCKS, Integration, Run, interleave
from autokernel.model import LoadedModel
from autokernel.outputs import disagreement, expect, output_leaves
from autokernel.profiler import model_device
from autokernel.records import Interval
from autokernel.replace import Replacer
from autokernel.sites import Replacement
from autokernel.stats import ratio_interval

DROP_BLOCKS = 12  # for the question whether Inductor does better without a kernel
MEASURE_SHARE = 0.2  # of the time, kept for the measurement at the end
MODES = ("default", "reduce-overhead")
"""torch.compile's, the second with CUDA graphs. `max-autotune` takes minutes to compile."""

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

    def fastest(self, names: Sequence[str]) -> str:
        """Of these, the one with the least median; the first where none was run."""
        run = [name for name in names if name in self.times]
        return min(run, key=lambda name: statistics.median(self.times[name]), default=names[0])

    def ratio(self, slow: str, fast: str) -> Interval | None:
        """Latency of `slow` / latency of `fast`; None where either was not run."""
        if slow not in self.times or fast not in self.times:
            return None
        return ratio_interval(self.times[slow], self.times[fast])


def race(
    loaded: LoadedModel,
    kernels: Sequence[Replacement],
    *,
    baseline: bool,
    budget_s: float,
    record: bool = False,
) -> Integration:
    """The fields of an `Integration` that the faster way gives; without kernels, those of torch.compile alone.

    Args:
        baseline: measure torch.compile without kernels, too.
        record: replay the model with its kernels as a CUDA graph; torch.compile is then measured in its mode that does
            so, too, and the faster one is what counts.
    """
    end = time.perf_counter() + budget_s
    result = Integration(used=[item.op for item in kernels])
    runs: dict[str, Run] = {"eager": loaded.model}
    needed_s = 0.0
    if baseline:
        for mode in MODES[: 1 + record]:
            runs[mode] = torch.compile(loaded.model, dynamic=False, mode=mode)
            needed_s = max(needed_s, _first_call_s(runs[mode], loaded))
    base = "cudagraph" if record else "graph"
    ways = _ways(loaded, kernels, needed_s, end - MEASURE_SHARE * budget_s, result, base) if kernels else {}
    runs |= {name: variant.run for name, variant in ways.items()}
    seconds = max(0.0, end - time.perf_counter())
    timed = Timed(times=interleave(runs, loaded, model_device(loaded), seconds, MOST_BLOCKS))
    result.compile_mode = timed.fastest(MODES)
    result.compile_speedup = timed.ratio("eager", result.compile_mode)
    result.blocks = len(timed.times["eager"])
    if ways:
        _take_faster(loaded, ways, timed, result, base)
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


def _take_faster(
    loaded: LoadedModel, ways: Mapping[str, _Variant], timed: Timed, result: Integration, base: str
) -> None:
    """Inductor must be surely faster, as it takes its time to compile."""
    result.inductor_gain = timed.ratio(base, INDUCTORS[base])
    result.compiler = INDUCTORS[base] if result.inductor_gain and result.inductor_gain.low > 1 else base
    best = ways[result.compiler]
    best.outputs(loaded)
    result.used = [item.op for item in best.kernels]
    result.left_out = {op: why for op, why in result.left_out.items() if op not in result.used}
    result.calls = {item.op: item.calls for item in best.kernels}
    result.fallbacks = {item.op: item.fallbacks for item in best.kernels}
    result.speedup = timed.ratio("eager", result.compiler)
    result.speedup_over_compile = timed.ratio(result.compile_mode, result.compiler)
    result.eager_us = statistics.median(timed.times["eager"])
    result.optimized_us = statistics.median(timed.times[result.compiler])


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
    for item in kernels:
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
