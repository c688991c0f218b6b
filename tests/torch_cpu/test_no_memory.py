"""A model whose calls leave the judge's own process no memory costs an op, not the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autokernel.errors import OracleError
from autokernel.judge.devicememory import is_out_of_memory

ROOT = Path(__file__).parents[2]

SCRIPT = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from autokernel.bench import Bench
from autokernel.errors import MeasurementError
from autokernel.loading import get_spec, starter_path
from autokernel.records import PlannedOp, TimedCase
from autokernel.spec import build_case

def planned(case):
    return PlannedOp(op="rmsnorm", cases=(TimedCase(case=case, calls=1),), time_us=1.0, share=0.5, headroom=None,
                     potential=1.5)

honest = Path(sys.argv[1]).read_text()
small = planned(get_spec("rmsnorm").cases[0])
large = planned(build_case("rmsnorm", "recorded", x=(16384, 16384), weight=(16384,)))
with Bench(Path(sys.argv[2]), "cpp", "off") as bench:
    bench.turn_to(small)
    print(bench.judge(honest, None).verdict)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (512 << 20), limits[1]))
    bench.turn_to(large)
    outcome = bench.judge(honest + "# again", None)
    print(outcome.verdict, outcome.reason)
    try:
        print(bench.baseline(honest, compiled=False))
    except MeasurementError as error:
        print(type(error).__name__, error)
    starter = starter_path("rmsnorm", "cpp").read_text()
    print(bench.tune(starter, 5.0, seed=0, journal=Path(sys.argv[2]) / "trials.jsonl", parent=()))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    bench.turn_to(small)
    print(bench.judge(honest + "# and again", None).verdict)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_judge_without_memory_tells_so_and_goes_on(tmp_path):
    honest = ROOT / "tests" / "loop" / "honest.py"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(honest), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    first, judged, timed, tuned, last = done.stdout.splitlines()
    assert (first, tuned, last) == ("PASS", "None", "PASS")
    assert judged.startswith("OOM the judge has no memory for its inputs and results")
    assert timed.startswith("MeasurementError the judge has no memory for its inputs and results")
    assert "the search for the best configuration failed (the judge has no memory" in done.stderr


def test_errors_that_say_that_there_is_no_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nSearch for"))  # torch.AcceleratorError is one
    assert is_out_of_memory(MemoryError())
    wrapped = OracleError("failed on its own inputs", hint="")
    assert not is_out_of_memory(wrapped)
    wrapped.__cause__ = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(RuntimeError("an illegal memory access was encountered"))
