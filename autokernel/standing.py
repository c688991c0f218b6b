"""Where the incumbent stands, as the prompt tells it: roofline, what binds, compiled resources, and what is kept.

Pure. What is unknown is left out; the numbers are worked out in `timed.py` and `binaries.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autokernel import experience
from autokernel.history import SHORTER, KernelHistory
from autokernel.records import Decision, KernelResources
from autokernel.roofline import Bound, arithmetic_intensity

BINDS = {
    Bound.MEMORY: "moving the bytes binds (memory)",
    Bound.COMPUTE: "the arithmetic binds (compute)",
    Bound.OVERHEAD: "starting the work costs more than doing it (overhead)",
}

NEAR_A_CEILING = 0.6
"""Below this share of the floor neither ceiling is what holds a kernel up."""

SHOWN_KERNELS = 6
NAME_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePosition:
    """Where the incumbent stands, per forward. `headroom` is the share of its time that is left, in [0, 1].

    `flops` and `nbytes` are the useful work of the calls; `ridge` the FLOP/byte above which compute binds. `host_us` is
    what the host needs to start the calls, `graph_us` their time in a replayed CUDA graph.
    """

    latency_us: float
    floor_us: float | None = None
    bound: Bound | None = None
    headroom: float | None = None
    flops: int | None = None
    nbytes: int | None = None
    ridge: float | None = None
    host_us: float | None = None
    graph_us: float | None = None


def standing(
    history: KernelHistory,
    position: RooflinePosition | None,
    latencies_us: Mapping[str, float],
    resources: Sequence[KernelResources],
) -> str:
    """The section of the prompt. `latencies_us` are PyTorch's; without a position the history's own numbers stand."""
    position = position or RooflinePosition(latency_us=history.incumbent_us, floor_us=history.floor_us)
    lines = [
        "## Where the incumbent stands",
        "",
        f"- {position.latency_us:.1f} us for one forward's calls{_against(position.latency_us, latencies_us)}.",
        *_roofline(position),
        *_host(position),
        *(f"- {_compiled(kernel, history.backend)}" for kernel in resources[:SHOWN_KERNELS]),
        *_several(resources),
        f"- Its kernel.py has {len(history.incumbent)} characters: one that is as fast within the noise is kept, too, "
        f"if simpler code (not fewer comments) makes it {int(SHORTER * len(history.incumbent))} or less.",
    ]
    return "\n".join(lines)


def measured_apart(history: KernelHistory) -> tuple[float | None, float | None]:
    """(host time, time in a CUDA graph) of the incumbent's calls in us, from the timing that made it the incumbent."""
    for experiment in reversed(history.experiments):
        if experiment.decision is Decision.KEEP and (timing := experiment.outcome.timing) is not None:
            return timing.host_us, timing.graph_us
    return None, None


def _against(latency_us: float, latencies_us: Mapping[str, float]) -> str:
    if not latencies_us:
        return ""
    fastest = min(latencies_us, key=lambda name: latencies_us[name])
    return f": {latencies_us[fastest] / latency_us:.2f}x PyTorch's fastest way ({fastest})"


def _roofline(position: RooflinePosition) -> Iterator[str]:
    if position.floor_us is None:
        yield "- The floor is unknown: nobody has measured this device's ceilings for this dtype."
    else:
        fraction = position.floor_us / position.latency_us
        headroom = max(0.0, 1 - fraction) if position.headroom is None else position.headroom
        binds = "" if position.bound is None else f"; {BINDS[position.bound]}"
        yield f"- Floor by the roofline: {position.floor_us:.1f} us, so {headroom:.0%} of the time is left{binds}."
        if fraction < NEAR_A_CEILING and position.bound in (Bound.MEMORY, Bound.COMPUTE):
            yield "- Neither ceiling is near: latency, too little work in flight, or wasted work holds it up now."
    if position.nbytes and position.flops is not None:
        gbps, tflops = position.nbytes / position.latency_us / 1e3, position.flops / position.latency_us / 1e6
        ridge = "" if position.ridge is None else f", and compute binds above {_figure(position.ridge)}"
        yield (
            f"- Reached: {_figure(gbps)} GB/s and {_figure(tflops)} TFLOP/s of useful work; it has "
            f"{_figure(arithmetic_intensity(position.flops, position.nbytes))} FLOP/byte{ridge}."
        )


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _host(position: RooflinePosition) -> Iterator[str]:
    if position.host_us is not None:
        longer = ", longer than the GPU works on them: launches bind" if position.host_us > position.latency_us else ""
        graph = "" if position.graph_us is None else f"; in a CUDA graph they take {position.graph_us:.1f} us"
        yield f"- The host needs {position.host_us:.1f} us to start these calls{longer}{graph}."


def _compiled(kernel: KernelResources, backend: str) -> str:
    cuda = backend == "cuda"  # what its launches add to static memory, and whether they fill the block, is not known
    occupancy = "" if kernel.occupancy is None else f" (occupancy {kernel.occupancy:.0%})"
    known = [
        (kernel.registers, "registers per thread"),
        (kernel.stack_bytes, "bytes of stack per thread (spills, if any, go there)"),
        (kernel.shared_bytes, f"bytes of {'static ' if cuda else ''}shared memory per block"),
        (kernel.threads, f"threads per block{' at most' if cuda else ''}"),
        (kernel.blocks_per_sm, f"blocks of that size fit on a multiprocessor{occupancy}"),
    ]
    said = ", ".join(f"{value} {what}" for value, what in known if value is not None)
    return f"Compiled `{experience.one_line(kernel.kernel, NAME_CHARS)}`: {said or 'resources unknown'}."


def _several(resources: Sequence[KernelResources]) -> Iterator[str]:
    """What the kernels are, where there are several: which of them the calls launch is not known."""
    more = len(resources) - SHOWN_KERNELS
    if len(resources) > 1:
        rest = f" {more} that take less are left out." if more > 0 else ""
        yield f"- These are for all sizes that the judge tries in the calls' dtypes, not for the calls alone.{rest}"
