"""Record whole latency grids: compile every configuration on the CPUs, time it on the GPU, write one table per kernel.

    python benchmarks/tuner/record.py --out benchmarks/tuner/tables                     # on a machine with a GPU
    python benchmarks/tuner/record.py --out DIR --tables matmul_4096,softmax --jobs 14  # some, by 14 compilers
    python benchmarks/tuner/record.py --out DIR --tables rmsnorm_cpp --jobs 1           # of C++, on the CPU

While a table is timed the next ones are compiled. Each configuration is checked against the oracle once and timed in
three passes, each in an order of its own; a process that hangs, dies or loses the GPU's context is replaced and the
next configuration goes on. Tables that exist are skipped, so an interrupted recording is taken up by the same command.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from building import compiler
from clocking import cpu_clock, gpu_clock
from crew import Answering, Child, ChildLost, Message, answer_all
from tables import Cell, Table, table_path, write_table
from workloads import WORKLOADS, Workload, grid_of

from autokernel.kernelfile import parse_kernel
from autokernel.tuner.space import Point, Space

PASSES = 3
COMPILE_DEADLINE_S, CALL_DEADLINE_S, OPEN_DEADLINE_S = 60.0, 20.0, 120.0
MOST_REPLACED = 12
"""Children lost on one table before it is given up: each costs seconds of the GPU's time."""

SPARE_CORES = 2
"""Left to the process that times and to this one."""


class Bench:
    """The timing child and its replacements; `facts` says what machine it is on."""

    def __init__(self, make: Callable[[], Answering]) -> None:
        self._make, self._workload, self._replaced = make, "", 0
        self._child = self._ready()
        self.facts = self._ask({"do": "hello"}, OPEN_DEADLINE_S)

    def open(self, workload: str) -> None:
        """Make its inputs and truth there. Raises: RuntimeError when that fails: no cell could be measured."""
        if workload != self._workload:  # and not a replacement's opening
            self._workload, self._replaced = workload, 0
        if problem := self._ask({"do": "open", "workload": workload}, OPEN_DEADLINE_S).get("error"):
            raise RuntimeError(f"{workload} could not be opened: {problem}")

    def run(self, message: Message) -> Message:
        """The answer for one configuration; a lost child is its fault and is replaced."""
        try:
            answer = self._ask(message, CALL_DEADLINE_S)
        except ChildLost as lost:
            status = "TIMEOUT" if lost.late else "LAUNCH_ERROR"
            answer = {"status": status, "error": str(lost), "timing_s": CALL_DEADLINE_S if lost.late else 0.0}
            self._replace()
        if answer.get("lost"):
            self._child.kill()
            self._replace()
        return answer

    def renew(self) -> None:
        """A fresh child, with nothing open."""
        self._child.kill()
        self._child, self._workload = self._ready(), ""

    def close(self) -> None:
        """End the child."""
        self._child.kill()

    def _ask(self, message: Message, deadline_s: float) -> Message:
        self._child.send(message, deadline_s)
        return self._child.receive()

    def _replace(self) -> None:
        self._replaced += 1
        if self._replaced > MOST_REPLACED:
            raise RuntimeError(f"{self._workload}: {self._replaced} processes were lost")
        self._child = self._ready()
        self.open(self._workload)

    def _ready(self) -> Child:
        child = Child(self._make)
        child.receive()
        return child


def compile_grid(workload: Workload, grid: Space, target: str, jobs: int, stop: threading.Event) -> list[Cell]:
    """A cell for each point, with everything but times; OK means that it compiled. Raises: Stopped."""
    points = list(grid.points())
    messages = [{"workload": workload.name, "config": grid.config_at(point), "target": target} for point in points]
    answers = answer_all(compiler, messages, children=jobs, deadline_s=COMPILE_DEADLINE_S, stop=stop)
    return [_compiled(point, answer) for point, answer in zip(points, answers, strict=True)]


def _compiled(point: Point, answer: Message | ChildLost) -> Cell:
    if isinstance(answer, ChildLost):
        status = "TIMEOUT" if answer.late else "COMPILE_ERROR"
        return Cell(point=point, status=status, compile_s=COMPILE_DEADLINE_S, error=f"compiler: {answer}")
    taken = dict(answer)
    status = "OK" if taken.pop("ok") else "COMPILE_ERROR"
    return Cell(point=point, status=status, **taken)


def time_grid(bench: Bench, grid: Space, cells: Sequence[Cell], shuffle: random.Random) -> list[Cell]:
    """The cells with their times: the first pass checks, too."""
    timed = {cell.point: cell for cell in cells}
    best: float | None = None
    for number in range(PASSES):
        open_points = [point for point in timed if timed[point].status == "OK"]
        for point in shuffle.sample(open_points, len(open_points)):
            cell = timed[point]
            if number == 0:
                answer = bench.run({"do": "first", "config": grid.config_at(point), "best_us": best})
            else:
                answer = bench.run({"do": "again", "config": grid.config_at(point), "calls": cell.calls})
            timed[point] = _timed(cell, answer)
            if answer["status"] == "OK":
                best = min(answer["us"], best or answer["us"])
    return [timed[cell.point] for cell in cells]


def _timed(cell: Cell, answer: Message) -> Cell:
    if answer["status"] != "OK":
        spent = answer.get("timing_s", 0.0) or cell.timing_s
        return replace(cell, status=answer["status"], us=(), timing_s=spent, error=answer.get("error", ""))
    return replace(
        cell,
        us=(*cell.us, answer["us"]),
        timing_s=answer.get("timing_s", cell.timing_s),
        calls=answer.get("calls", cell.calls),
    )


def finished(workload: Workload, grid: Space, cells: list[Cell], facts: Message) -> Table:
    """The table of a workload."""
    text, case = workload.path.read_text(), workload.case
    return Table(
        name=workload.name,
        op=case.op,
        backend=parse_kernel(text).backend,
        kernel=workload.path.name,
        source=hashlib.sha256(text.encode()).hexdigest(),
        device=facts["device"],
        target=facts["target"],
        torch=facts["torch"],
        triton=facts["triton"],
        recorded=datetime.now(UTC).isoformat(timespec="seconds"),
        dtype=case.dtype,
        shapes={name: list(meta.shape) for name, meta in case.tensors.items()},
        scalars=dict(case.scalars),  # type: ignore[arg-type]
        knobs={knob.name: list(knob.values) for knob in grid.knobs},
        default=dict(grid.config),
        constraints=[rule.text for rule in grid.constraints],
        cells=cells,
    )


def record(workloads: Sequence[Workload], out: Path, jobs: int, deadline: float) -> None:
    """Record each workload into `out`; at `deadline` (monotonic seconds) nothing further is begun."""
    bench = Bench(gpu_clock if workloads[0].device == "cuda" else cpu_clock)
    target, stop = bench.facts["target"], threading.Event()
    if target:
        major, minor = target[3:-1], target[-1]
        os.environ["AUTOKERNEL_CUDA_ARCH"] = f"{major}{minor}a" if int(major) >= 9 else f"{major}{minor}"
    grids = {workload.name: grid_of(workload) for workload in workloads}
    shuffle = random.Random(0)
    with ThreadPoolExecutor(1) as ahead:
        compiled: dict[object, Future[list[Cell]]] = {}
        for workload in workloads:  # one after the other, ahead of the GPU
            if workload.binaries not in compiled:
                compiled[workload.binaries] = ahead.submit(
                    compile_grid, workload, grids[workload.name], target, jobs, stop
                )
        try:
            for workload in workloads:
                _record_one(bench, workload, grids[workload.name], compiled[workload.binaries], out, deadline, shuffle)
        except TimeoutError:
            print("the time is over", flush=True)
        finally:
            stop.set()
            ahead.shutdown(wait=False, cancel_futures=True)
            bench.close()


def _record_one(
    bench: Bench,
    workload: Workload,
    grid: Space,
    compiling: Future[list[Cell]],
    out: Path,
    deadline: float,
    shuffle: random.Random,
) -> None:
    """Write one table. Raises: TimeoutError when its compilation is not done by the deadline."""
    begin = time.monotonic()
    try:
        bench.open(workload.name)
        cells = compiling.result(timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        ready = time.monotonic()
        cells = time_grid(bench, grid, cells, shuffle)
    except (RuntimeError, ChildLost) as error:  # the other tables may still come out well
        print(f"{workload.name}: not recorded: {error}", flush=True)
        bench.renew()
        return
    table = finished(workload, grid, cells, bench.facts)
    write_table(table_path(out, workload.name), table)
    print(summary(table, ready - begin, time.monotonic() - ready), flush=True)


def summary(table: Table, waited_s: float, timed_s: float) -> str:
    """One line about a table."""
    right = [cell for cell in table.cells if cell.status == "OK"]
    counts = {status: sum(cell.status == status for cell in table.cells) for status in sorted(_statuses(table))}
    best = min((min(cell.us) for cell in right), default=float("nan"))
    compiling = sum(cell.compile_s for cell in table.cells)
    return (
        f"{table.name}: {len(table.cells)} cells {counts}, best {best:.1f} us, {compiling:.0f} s of compiling,"
        f" waited {waited_s:.0f} s, timed for {timed_s:.0f} s"
    )


def _statuses(table: Table) -> set[str]:
    return {cell.status for cell in table.cells}


def main() -> None:
    """Read the command line and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables")
    parser.add_argument("--tables", help=f"only these, separated by commas: {', '.join(WORKLOADS)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no table after this many")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - SPARE_CORES), help="compilers")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    wanted = (
        args.tables.split(",") if args.tables else [name for name, one in WORKLOADS.items() if one.device == "cuda"]
    )
    if unknown := [name for name in wanted if name not in WORKLOADS]:
        sys.exit(f"error: no table is called {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    missing = [WORKLOADS[name] for name in wanted if not table_path(args.out, name).exists()]
    if len({workload.device for workload in missing}) > 1:
        sys.exit("error: tables of the GPU and of the CPU are recorded by separate commands")
    with tempfile.TemporaryDirectory() as caches:  # fresh, so that every compilation is a whole one
        os.environ["TRITON_CACHE_DIR"] = f"{caches}/triton"
        os.environ["AUTOKERNEL_BUILD_DIR"] = f"{caches}/native"
        if missing:
            record(missing, args.out, args.jobs, deadline)


if __name__ == "__main__":
    main()
