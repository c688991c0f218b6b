"""What the heuristics say of a table's kernel with no measurement: its default, seeds and features."""

from __future__ import annotations

import functools
import re

from simulated import WORKERS
from tables import Table
from workloads import WORKLOADS

from autokernel import gpus
from autokernel.kernelfile import parse_kernel
from autokernel.tuner.compiling import Compiler
from autokernel.tuner.heuristics import Heuristics
from autokernel.tuner.studies import gather

CPU_TARGET = "sm_90"
"""A target must be named; the heuristics of a C++ kernel do not look at it."""

STUDY_DEADLINE_S = 300.0

STUDY_S, RANK_S = 0.07, 0.1
"""What the heuristics cost: to study one choice of tiles, on one core, and to rank the configurations and choose seeds.
Rounded up from 0.03-0.063 s on five of the tables and 0.015-0.1 s on six, on a busy 2-core x86-64 machine."""


def heuristics_of(table: Table) -> Heuristics:
    """The heuristics on a table's kernel, case and device; worked out once."""
    return _heuristics(table.name, table.device, table.target or CPU_TARGET, tuple(table.knobs))


def cost_s(knowing: Heuristics) -> float:
    """Seconds that the heuristics take beside the compilation of CONFIG, which has one of the workers."""
    return len(knowing.facts.studies) * STUDY_S / (WORKERS - 1) + RANK_S


@functools.cache
def _heuristics(name: str, device: str, target: str, knobs: tuple[str, ...]) -> Heuristics:
    workload = WORKLOADS[name]
    text = _with_knobs(workload.path.read_text(), knobs)
    with Compiler([workload.case], target, sandbox="off", deadline_s=STUDY_DEADLINE_S) as compiler:
        return Heuristics(gather(text, workload.case, compiler, gpus.lookup(device)))


def _with_knobs(text: str, knobs: tuple[str, ...]) -> str:
    """A kernel.py with these knobs alone in its TUNABLES, which has one knob to a line."""
    for name in parse_kernel(text).tunables:
        if name not in knobs:
            text = re.sub(rf'^ +"{name}": \[.*\n', "", text, count=1, flags=re.MULTILINE)
    return text
