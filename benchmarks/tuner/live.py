"""`autokernel tune` against Triton's own autotune, live on a GPU: the same kernel, the same configurations.

    python benchmarks/tuner/live.py --out results/live.json
    python benchmarks/tuner/live.py --kernels softmax --evaluations 16

Triton times every configuration, one after the other, each compiled as it comes. Both begin with empty caches; wall
time is from the call to the answer, processes that are started included. Then both winners are timed in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from workloads import WORKLOADS, Workload

from autokernel.judge.stopwatch import DeviceStopwatch
from autokernel.kernelfile import Config
from autokernel.loading import get_spec, load_file
from autokernel.records import TimedCase
from autokernel.stats import ratio_interval
from autokernel.tuner.kernel import tuner_for
from autokernel.tuner.space import Space
from autokernel.tuner.tuning import Budget

SPACES: Mapping[str, Mapping[str, list[Any]]] = {
    "matmul_4096": {
        "BLOCK_M": [64, 128],
        "BLOCK_N": [128, 256],
        "BLOCK_K": [32, 64],
        "GROUP_M": [8],
        "num_warps": [4, 8],
        "num_stages": [3, 4, 5],
    },
    "softmax": {
        "BLOCK": [1024, 2048, 4096, 8192],
        "ROWS": [1],
        "WRITE": [""],
        "num_warps": [2, 4, 8, 16],
        "num_stages": [1, 2, 3],
    },
    "attention_64": {
        "BLOCK_M": [64, 128],
        "BLOCK_N": [32, 64, 128],
        "DIAGONAL": [1],
        "ORDER": ["last"],
        "num_warps": [4, 8],
        "num_stages": [1, 2, 3, 4],
    },
}
"""About fifty configurations of each kernel, as people write them into a decorator."""

OPTIONS = ("num_warps", "num_stages")
PAIRS, CALLS = 30, 10


@dataclass(frozen=True, kw_only=True)
class Result:
    """One kernel. `ratio` is the latency of Triton's winner over ours, with its interval, from pairs in turns."""

    kernel: str
    configurations: int
    evaluations: int
    ours_s: float
    triton_s: float
    ours_us: float
    triton_us: float
    ratio: tuple[float, float, float]
    ours: Config
    triton: Config


def narrowed(text: str, values: Mapping[str, list[Any]]) -> str:
    """The kernel.py with these lists in TUNABLES, and a CONFIG of their first values."""
    for name, choices in values.items():
        text, count = re.subn(rf'"{name}": \[[^\]]*\]', f'"{name}": {choices!r}', text, count=1)
        assert count == 1, name
    first = {name: choices[0] for name, choices in values.items()}
    return re.sub(r"(?m)^CONFIG = \{.*\}$", f"CONFIG = {first!r}", text)


class Autotuned:
    """Stands for a kernel's @triton.jit function: its launches go to Triton's autotuner over all configurations."""

    def __init__(self, module: ModuleType, name: str, space: Space) -> None:
        self._module, self._name, self._jit = module, name, getattr(module, name)
        self._knobs = [knob.name for knob in space.knobs] + [n for n in space.config if n in module.TUNABLES]
        self._launches: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}
        self._recorded: tuple[Any, dict[str, Any]] = ((), {})
        self._arguments: tuple[Any, ...] = ()
        configs = [self._config(space.config_at(point)) for point in space.points()]
        self.tuner = triton.autotune(configs=configs, key=[])(self._jit)

    def call(self, *arguments: Any) -> Any:
        """`kernel_fn`, tuned; later calls take the winner."""
        self._arguments = arguments
        setattr(self._module, self._name, _Launching(self._launch))
        return self._module.kernel_fn(*arguments)

    @property
    def best(self) -> Config:
        """The winner."""
        chosen = self.tuner.best_config.all_kwargs()
        return {name: chosen[name] for name in self._module.TUNABLES}

    @staticmethod
    def _config(config: Config) -> Any:
        shape = {name: value for name, value in config.items() if name not in OPTIONS}
        return triton.Config(shape, **{name: config[name] for name in OPTIONS})

    def _launch(self, _grid: Any, *arguments: Any, **named: Any) -> None:
        others = {name: value for name, value in named.items() if name not in self._module.TUNABLES}
        derived = {name: (lambda meta, name=name: self._of(meta)[1][name]) for name in others if name == "ONCE"}
        passed = {name: value for name, value in others.items() if name not in derived}
        if derived and not isinstance(self.tuner.fn, triton.runtime.Heuristics):
            self.tuner.fn = triton.heuristics(derived)(self.tuner.fn)
        self.tuner[lambda meta: self._of(meta)[0]](*arguments, **passed)

    def _of(self, meta: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Grid and named arguments that `kernel_fn` launches with under a configuration."""
        chosen = {name: meta[name] for name in self._module.TUNABLES if name in meta}  # no options of the launch
        key = tuple(chosen.items())
        if key not in self._launches:
            before = dict(self._module.CONFIG)
            self._module.CONFIG.update(chosen)
            setattr(self._module, self._name, _Launching(self._record))
            self._module.kernel_fn(*self._arguments)
            self._module.CONFIG.update(before)
            setattr(self._module, self._name, _Launching(self._launch))
            self._launches[key] = self._recorded
        return self._launches[key]

    def _record(self, grid: Any, *_arguments: Any, **named: Any) -> None:
        self._recorded = (grid, named)


class _Launching:
    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **named: self._launch(grid, *arguments, **named)


def compared(workload: Workload, values: Mapping[str, list[Any]], evaluations: int, folder: Path) -> Result:
    """Both ways on one kernel."""
    text = narrowed(workload.path.read_text(), values)
    path = folder / f"{workload.name}.py"
    path.write_text(text)
    spec, space = get_spec(workload.case.op), Space.read(text)
    begin = time.perf_counter()
    with tuner_for(spec, [TimedCase(case=workload.case, calls=1)], "triton") as tuner:
        ours = tuner.tune(text, Budget(evaluations=evaluations)).outcome
    ours_s = time.perf_counter() - begin
    assert ours.config is not None, "no configuration ran"
    inputs = list(spec.make_inputs(workload.case, 1, "cuda").values())
    module = load_file(path, f"live_{workload.name}")
    name = launched(module, text)
    begin = time.perf_counter()
    autotuned = Autotuned(module, name, space)
    autotuned.call(*inputs)
    torch.cuda.synchronize()
    triton_s = time.perf_counter() - begin
    theirs = autotuned.best
    interval, ours_us, triton_us = in_turns(path, ours.config, theirs, inputs)
    return Result(
        kernel=workload.name,
        configurations=sum(1 for _ in space.points()),
        evaluations=ours.evaluations,
        ours_s=round(ours_s, 1),
        triton_s=round(triton_s, 1),
        ours_us=round(ours_us, 2),
        triton_us=round(triton_us, 2),
        ratio=interval,
        ours=ours.config,
        triton=theirs,
    )


def launched(module: ModuleType, text: str) -> str:
    """Name of the @triton.jit function that the kernel.py launches; others are called by it."""
    return next(name for name in vars(module) if f"    {name}[" in text)


def in_turns(
    path: Path, ours: Config, theirs: Config, inputs: list[Any]
) -> tuple[tuple[float, float, float], float, float]:
    """Latency of `theirs` over `ours` with its interval, and both medians in us."""
    clock, kernels, times = DeviceStopwatch(), [], ([], [])
    for number, config in enumerate((ours, theirs)):
        module = load_file(path, f"turn_{number}")
        module.CONFIG.update(config)
        kernels.append(module.kernel_fn)
    for _, side in itertools.product(range(PAIRS), (0, 1)):
        block = clock.block(kernels[side], [inputs] * (CALLS + 1), warm=1, keep=0)
        times[side].append(statistics.median(block.calls_us))
    found = ratio_interval(times[1], times[0])
    return (found.estimate, found.low, found.high), statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Compare, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(SPACES), help="default: %(default)s")
    parser.add_argument("--evaluations", type=int, default=16, help="of our search (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    results = []
    print("| kernel | configurations | ours measured | ours s | Triton s | ours us | Triton us | Triton/ours |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
        for name in args.kernels.split(","):
            r = compared(WORKLOADS[name], SPACES[name], args.evaluations, Path(folder))
            results.append(asdict(r))
            print(
                f"| {r.kernel} | {r.configurations} | {r.evaluations} | {r.ours_s} | {r.triton_s} | {r.ours_us} |"
                f" {r.triton_us} | {r.ratio[0]:.3f} [{r.ratio[1]:.3f}, {r.ratio[2]:.3f}] |",
                flush=True,
            )
            if args.out:
                args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
