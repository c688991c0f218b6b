"""Run, check and time one configuration in a child process that holds the inputs and the truth.

A first call of a configuration checks its output and times it; later passes only time. On a GPU a call's time is that
between events on the stream, with the L2 cache overwritten before each; on a CPU it is the wall clock's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from building import configured, one_line
from torch import Tensor
from workloads import WORKLOADS

from autokernel.judge.compare import mismatch
from autokernel.judge.stopwatch import DeviceStopwatch, HostStopwatch
from autokernel.judge.trial import same_bits, truth_of
from autokernel.loading import get_spec
from autokernel.spec import Inputs

PASS_US, LEAST_CALLS, MOST_CALLS = 6_000.0, 3, 20
"""What a pass spends on a configuration, in calls of so many at least and at most."""

HOPELESS = 10.0
"""Times slower than the fastest so far: such a configuration is timed by few calls."""

SEED = 20


class Clock:
    """Answers {do: open | first | again}; one workload is open at a time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._clock = DeviceStopwatch() if device == "cuda" else HostStopwatch()
        self._modules: dict[str, ModuleType] = {}
        self._workload: Any = None
        self._inputs: Inputs = {}
        self._truth: Any = None
        self._right: Tensor | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Raises nothing: what a kernel does wrong is in the answer, as `status` and `error`."""
        try:
            found: dict[str, Any] = getattr(self, f"_{message['do']}")(message)
        except Exception as error:  # a kernel may raise anything
            found = {"status": "LAUNCH_ERROR", "error": one_line(error)}
            found["lost"] = self._is_lost()
        return found

    def _hello(self, _message: dict[str, Any]) -> dict[str, Any]:
        import triton

        found = {"device": "cpu", "target": "", "torch": torch.__version__, "triton": triton.__version__}
        if self._device == "cuda":
            major, minor = torch.cuda.get_device_capability()
            found |= {"device": torch.cuda.get_device_name(), "target": f"sm_{major}{minor}"}
        return found

    def _open(self, message: dict[str, Any]) -> dict[str, Any]:
        self._inputs, self._truth, self._right = {}, None, None
        if self._device == "cuda":
            torch.cuda.empty_cache()
        self._workload = WORKLOADS[message["workload"]]
        spec = get_spec(self._workload.case.op)
        self._inputs = spec.make_inputs(self._workload.case, SEED, self._device)
        self._truth, _ = truth_of(spec, self._inputs)
        return {}

    def _first(self, message: dict[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        kernel = configured(self._workload, message["config"], self._modules).kernel_fn
        arguments = list(self._inputs.values())
        out = kernel(*arguments)
        self._synchronize()
        if reason := self._wrong(out):
            return {"status": "WRONG", "error": reason[:160], "timing_s": time.perf_counter() - begin}
        del out
        few = self._clock.block(kernel, [arguments] * (1 + LEAST_CALLS), warm=1, keep=0).calls_us
        middle, best = statistics.median(few), message["best_us"]
        hopeless = best is not None and middle > HOPELESS * best
        calls = 1 if hopeless else max(LEAST_CALLS, min(MOST_CALLS, round(PASS_US / middle)))
        if not hopeless and calls > LEAST_CALLS:
            few += self._clock.block(kernel, [arguments] * (1 + calls - LEAST_CALLS), warm=1, keep=0).calls_us
        us = statistics.median(few)
        return {"status": "OK", "us": us, "calls": calls, "timing_s": time.perf_counter() - begin}

    def _again(self, message: dict[str, Any]) -> dict[str, Any]:
        kernel = configured(self._workload, message["config"], self._modules).kernel_fn
        arguments = list(self._inputs.values())
        block = self._clock.block(kernel, [arguments] * (1 + message["calls"]), warm=1, keep=0)
        return {"status": "OK", "us": statistics.median(block.calls_us)}

    def _wrong(self, out: Tensor) -> str | None:
        """What is wrong with an output; most configurations give the very bits of an earlier one that was right."""
        if self._right is not None and same_bits(out, self._right):
            return None
        case = self._workload.case
        if tuple(out.shape) != tuple(self._truth.value.shape):
            return f"shape {tuple(out.shape)}"
        reason = mismatch(out, self._truth, case.dtype, get_spec(case.op).tolerances[case.dtype])
        if reason is None:
            self._right = out.clone()
        return reason

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _is_lost(self) -> bool:
        """Whether the GPU's context is beyond use: an illegal access makes every later call fail, too."""
        try:
            self._synchronize()
            if self._device == "cuda":
                torch.zeros(1, device=self._device).item()
        except Exception:  # whatever it says, this process can measure nothing more
            return True
        return False


def gpu_clock() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What the timing child of GPU tables does."""
    return Clock("cuda").answer


def cpu_clock() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What the timing child of CPU tables does."""
    return Clock("cpu").answer
