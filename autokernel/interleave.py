"""Several ways to run one model's forward, timed in turns, so that drift of clocks and neighbours hits all alike."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autokernel.model import LoadedModel
from autokernel.stats import MIN_BLOCKS

Run = Callable[..., Any]

BLOCK_S = 0.1  # about how long a block runs each variant
MOST_BLOCKS = 60
WARM_CALLS = 3


def interleave(
    runs: Mapping[str, Run], loaded: LoadedModel, device: torch.device, seconds: float, most_blocks: int
) -> dict[str, list[float]]:
    """Median latency in us of each block, by variant; all variants take turns within a block, each first in turn.

    However few `seconds`, there are `MIN_BLOCKS` blocks with a call of each variant.
    """
    with torch.no_grad():
        for run in runs.values():
            for _ in range(WARM_CALLS):
                _seconds(run, loaded, device)
        names = list(runs)
        times: dict[str, list[float]] = {name: [] for name in names}
        block_s = min(BLOCK_S * len(names), seconds / MIN_BLOCKS)
        end = time.perf_counter() + seconds
        for block in range(most_blocks):
            if block >= MIN_BLOCKS and time.perf_counter() > end:
                break
            samples: dict[str, list[float]] = {name: [] for name in names}
            block_end = time.perf_counter() + block_s
            for turn in itertools.count(block):
                shift = turn % len(names)
                for name in names[shift:] + names[:shift]:
                    samples[name].append(_seconds(runs[name], loaded, device))
                if time.perf_counter() > block_end:
                    break
            for name in names:
                times[name].append(statistics.median(samples[name]) * 1e6)
    return times


def _seconds(run: Run, loaded: LoadedModel, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    run(*loaded.args, **loaded.kwargs)
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
