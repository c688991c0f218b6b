"""The judge on a GPU: every starter passes, cheats are caught, and its clock is right."""

import ast
import statistics
from pathlib import Path

import pytest
import torch

from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.loading import get_spec, specs, starter_path
from autokernel.records import TimedCase
from autokernel.settings import DTYPES_OF_BACKEND
from autokernel.spec import build_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FOLDER = Path(__file__).parent / "wrong"
HONEST = (Path(__file__).parent / "honest.py").read_text()
WRONG = sorted(FOLDER.glob("*.py"))
USER_CASE = TimedCase(case=build_case("rmsnorm", "model", dtype="bf16", x=(4, 512, 1024), weight=(1024,)), calls=3)


@pytest.fixture(scope="module")
def server():
    with ForkServer("cuda") as server:
        yield server


def judge_of(server, op, backend, builds, cases=()):
    return Judge(
        server=server, spec=get_spec(op), dtypes=DTYPES_OF_BACKEND[backend], cases=cases, builds=builds / backend / op
    )


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("op", list(specs()))
def test_starter_passes(server, tmp_path, op, backend):
    path = starter_path(op, backend)
    assert path is not None
    outcome = judge_of(server, op, backend, tmp_path).evaluate(path.read_text())
    assert outcome.verdict == "PASS", f"{outcome.stage}: {outcome.reason}"


def expectation(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path.name} does not say what catches it")


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_wrong_kernel_is_caught_where_it_says(server, tmp_path, path):
    stage, verdict = expectation(path)
    incumbent = HONEST if stage == "timing" else None
    judge = judge_of(server, "rmsnorm", "triton", tmp_path, [USER_CASE])
    outcome = judge.evaluate(HONEST + path.read_text(), incumbent)
    assert (outcome.stage, outcome.verdict) == (stage, verdict), outcome.reason
    assert outcome.timing is None


def test_a_kernel_against_itself_is_equal_and_its_times_are_whole(server, tmp_path):
    judge = judge_of(server, "rmsnorm", "triton", tmp_path, [USER_CASE])
    outcome = judge.evaluate(HONEST + "\n# the same\n", HONEST)
    assert outcome.verdict == "PASS", outcome.reason
    timing = outcome.timing
    assert 0.97 < timing.speedup.estimate < 1.03
    assert timing.host_us > 0
    assert 0 < timing.graph_us < 3 * timing.candidate_us
    assert outcome.peak_memory_mb > 0


def test_clock_reads_the_bandwidth_of_a_copy(server):
    from autokernel.judge.stopwatch import DeviceStopwatch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    clock = DeviceStopwatch()
    block = clock.block(lambda: target.copy_(source), [()] * 23, warm=3, keep=0)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        target.copy_(source)
    stop.record()
    stop.synchronize()
    assert statistics.median(block.calls_us) == pytest.approx(start.elapsed_time(stop) * 1e3 / 20, rel=0.1)


def test_clock_does_not_count_the_hosts_time():
    """A call that keeps the host for 300 us before a tiny kernel is timed as the tiny kernel."""
    import time

    from autokernel.judge.stopwatch import DeviceStopwatch

    x = torch.zeros(1024, device="cuda")

    def slow_host():
        end = time.perf_counter() + 300e-6
        while time.perf_counter() < end:
            pass
        x.add_(1)

    clock = DeviceStopwatch()
    clock.block(slow_host, [()] * 21, warm=1, keep=0)
    block = clock.block(slow_host, [()] * 21, warm=1, keep=0)
    assert statistics.median(block.calls_us) < 60
    assert statistics.median(block.host_us) > 290
