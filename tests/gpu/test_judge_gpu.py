"""The judge on a GPU: starters and right kernels pass, wrong ones are caught where they say, and its clock is right.

With the name of a file in AUTOKERNEL_CORPUS_TABLE a table is written there, with a row for every kernel of the corpus:
what was expected, what came, and how long it took.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from autokernel.judge import devicehealth
from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.margin import KEEP_MARGIN
from autokernel.judge.stages import STAGES
from autokernel.loading import get_spec, load_file, specs, starter_path
from autokernel.records import TimedCase
from autokernel.settings import DTYPES_OF_BACKEND
from autokernel.sizes import sized_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

corpus = load_file(Path(__file__).parent / "corpus.py", "gpu_corpus")
HONEST = corpus.base_text("rmsnorm_triton")
USER_CASE = corpus.user_case("rmsnorm", "bf16")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder in which all children's scratch folders lie: they may write nowhere else."""
    return tmp_path_factory.mktemp("builds")


@pytest.fixture
def tmp_path(root):
    return Path(tempfile.mkdtemp(dir=root))


@pytest.fixture(scope="module")
def server(root):
    with ForkServer("cuda", sandbox=os.environ.get("AUTOKERNEL_TEST_SANDBOX", "auto"), builds=root) as server:
        yield server


@pytest.fixture(scope="module")
def table():
    """Rows (file, kind, expected, got, seconds), written to the file AUTOKERNEL_CORPUS_TABLE at the end."""
    rows = []
    yield rows
    if path := os.environ.get("AUTOKERNEL_CORPUS_TABLE"):
        lines = ["| kernel | what it does | expected | got | seconds |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(row[:-1])} | {row[-1]:.1f} |" for row in rows]
        Path(path).write_text("\n".join([*lines, "", f"{len(rows)} kernels, {sum(row[-1] for row in rows):.0f} s", ""]))


def judge_of(server, op, backend, builds, cases=(), dtypes=None):
    return Judge(
        server=server,
        spec=get_spec(op),
        dtypes=dtypes or DTYPES_OF_BACKEND[backend],
        cases=cases,
        builds=builds / backend / op,
    )


def judged(server, builds, fragment):
    """The judge's outcome for a fragment of the corpus."""
    judge = judge_of(server, fragment.op, fragment.backend, builds, [fragment.user_case], fragment.dtypes)
    return judge.evaluate(fragment.text, fragment.incumbent)


def row_of(fragment, outcome):
    expected = " ".join(filter(None, (fragment.caught_by, fragment.verdict)))
    got = " ".join(filter(None, (outcome.stage, outcome.verdict)))
    return f"{fragment.path.parent.name}/{fragment.path.name}", fragment.kind, expected, got, outcome.seconds


def gained(outcome):
    """Whether a loop would keep this candidate."""
    return outcome.verdict == "PASS" and (outcome.timing is None or outcome.timing.speedup.low > 1 + KEEP_MARGIN)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("op", list(specs()))
def test_starter_passes(server, tmp_path, op, backend):
    path = starter_path(op, backend)
    assert path is not None
    outcome = judge_of(server, op, backend, tmp_path).evaluate(path.read_text())
    assert outcome.verdict == "PASS", f"{outcome.stage}: {outcome.reason}"


@pytest.mark.parametrize("base", list(corpus.BASES))
def test_base_passes(server, tmp_path, base):
    op, backend = corpus.op_and_backend(base)
    judge = judge_of(server, op, backend, tmp_path, [corpus.user_case(op, "bf16")], ("bf16", "fp32"))
    outcome = judge.evaluate(corpus.base_text(base))
    assert outcome.verdict == "PASS", f"{outcome.stage}: {outcome.reason}"


@pytest.mark.parametrize("fragment", corpus.fragments("wrong"), ids=lambda fragment: fragment.path.stem)
def test_wrong_kernel_is_caught_where_it_says(server, tmp_path, table, fragment):
    outcome = judged(server, tmp_path, fragment)
    table.append(row_of(fragment, outcome))
    if fragment.or_no_gain and outcome.verdict in ("PASS", "SCREENED"):
        assert not gained(outcome), f"kept, at {outcome.timing}"
        return
    assert (outcome.stage, outcome.verdict) == (fragment.caught_by, fragment.verdict), outcome.reason
    assert outcome.timing is None


@pytest.mark.parametrize("fragment", corpus.fragments("right"), ids=lambda fragment: fragment.path.stem)
def test_right_kernel_passes(server, tmp_path, table, fragment):
    outcome = judged(server, tmp_path, fragment)
    table.append(row_of(fragment, outcome))
    assert outcome.verdict == "PASS", f"{outcome.stage}: {outcome.reason}"
    assert {name for name, _ in STAGES} <= {stage.stage for stage in outcome.stages}


def test_calls_that_read_gigabytes_leave_room_for_each_other(server, tmp_path):
    """As the loss of a Llama over a long vocabulary: 4 GB of logits, of which each pair of children has copies."""
    calls = [TimedCase(case=sized_case("cross_entropy", (8192, 128256)).with_dtype("fp32"), calls=1)]
    judge = judge_of(server, "cross_entropy", "triton", tmp_path, calls, ("fp32",))
    text = starter_path("cross_entropy", "triton").read_text()
    outcome = judge.evaluate(text + "\n# as it was\n", text)
    assert outcome.verdict == "PASS", f"{outcome.stage}: {outcome.reason}"
    assert outcome.timing.speedup.low > 0.9
    assert torch.cuda.memory_reserved() < 4 << 30


@pytest.mark.parametrize("crash", ["traps", "out_of_bounds"])
def test_the_next_kernel_is_unharmed_by_a_crash(server, tmp_path, crash):
    (fragment,) = [fragment for fragment in corpus.fragments("wrong") if fragment.path.stem == crash]
    assert judged(server, tmp_path, fragment).verdict == "CRASH"
    judge = judge_of(server, "rmsnorm", "triton", tmp_path, [USER_CASE], ("bf16",))
    outcome = judge.evaluate(HONEST)
    assert outcome.verdict == "PASS", outcome.reason


def test_memory_that_another_program_takes_is_no_fault(caplog):
    before = devicehealth.usable_bytes()
    hold = "import torch; x = torch.empty(16 << 30, dtype=torch.uint8, device='cuda'); print('held', flush=1); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout.readline() == b"held\n"
        devicehealth.await_memory(before, within_s=0.2)
        neighbour.communicate(b"\n")
    assert "did not come back" in caplog.text
    caplog.clear()
    devicehealth.await_memory(before, within_s=10)
    assert not caplog.text


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
