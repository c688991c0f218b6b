"""Time of each node of a captured graph, by running the graph op by op."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

HEAD_START_CYCLES = 100_000
"""GPU cycles (about 60 us) that the device sleeps before a node, so that its kernel is queued when the clock starts."""


def attribute_nodes(
    graph_module: GraphModule, inputs: Sequence[Any], *, passes: int = 5, seconds: float = 5.0
) -> dict[str, float]:
    """Median time in us of each `call_function` node by name, over several passes after one for warm-up.

    Args:
        inputs: the graph's placeholders in order.
        seconds: no new pass starts after this long.

    Raises: whatever an op of the graph raises.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(list(inputs)) if isinstance(leaf, torch.Tensor)]
    tensors = [*leaves, *graph_module.parameters(), *graph_module.buffers()]
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    timed = _CpuTimer(graph_module) if device is None else _CudaTimer(graph_module, device)
    samples: dict[str, list[float]] = {}
    end = time.perf_counter() + seconds
    with torch.no_grad():
        timed.one_pass(inputs)
        for done in range(passes):
            if done and time.perf_counter() > end:
                break
            for name, us in timed.one_pass(inputs).items():
                samples.setdefault(name, []).append(us)
    return {name: statistics.median(times) for name, times in samples.items()}


class _CpuTimer(Interpreter):
    """Times the call alone: the interpreter's own bookkeeping is several microseconds a node."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.times_us: dict[str, float] = {}

    def one_pass(self, inputs: Sequence[Any]) -> dict[str, float]:
        self.times_us = {}
        self.run(*inputs)
        return self.times_us

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        start = time.perf_counter_ns()
        result = self.call_function(n.target, args, kwargs)
        self.times_us[n.name] = (time.perf_counter_ns() - start) / 1e3
        return result


class _CudaTimer(Interpreter):
    """Times between events on the current stream, read after the pass."""

    def __init__(self, graph_module: GraphModule, device: torch.device) -> None:
        super().__init__(graph_module)
        self.device = device
        self.events: dict[str, tuple[Any, Any]] = {}

    def one_pass(self, inputs: Sequence[Any]) -> dict[str, float]:
        self.events = {}
        with torch.cuda.device(self.device):
            self.run(*inputs)
        torch.cuda.synchronize(self.device)
        return {name: start.elapsed_time(stop) * 1e3 for name, (start, stop) in self.events.items()}

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        result = self.call_function(n.target, args, kwargs)
        stop.record()
        self.events[n.name] = (start, stop)
        return result
