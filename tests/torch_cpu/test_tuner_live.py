"""Configurations measured on this machine, by real compilers and confined children; and the command on top of it."""

import json
import math
import statistics
from contextlib import closing

import pytest

from autokernel.cli import main
from autokernel.judge import places
from autokernel.judge.folders import LAUNCHER
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.worker import Worker
from autokernel.kernelfile import parse_kernel
from autokernel.loading import get_spec, starter_path
from autokernel.records import TimedCase
from autokernel.sizes import sized_case
from autokernel.spec import describe
from autokernel.target import Target
from autokernel.tuner.compiling import Compiler
from autokernel.tuner.kernel import TIMING, KernelTuner, WrongResults
from autokernel.tuner.live import ROUNDS, LiveProvider
from autokernel.tuner.space import Space
from autokernel.tuner.trials import Status
from autokernel.tuner.tuning import Budget
from tests.loop.conftest import HONEST

pytestmark = pytest.mark.alone

KNOBS = """
TUNABLES = {"WAIT": [0, 2_000, 200_000], "BUG": [0, 1, 2, 3]}  # BUG: wrong results, no compilation, the process ends
CONFIG = {"WAIT": 2_000, "BUG": 0}
"""
TEXT = HONEST.replace("SOURCE = r", KNOBS + "SOURCE = r", 1)
TEXT = TEXT.replace("double scale = 1 /", "for (volatile int i = 0; i < WAIT; ++i) {}\n        double scale = 1 /")
TEXT = TEXT.replace("sum / cols + eps", "sum / cols + eps + (BUG == 1)")
TEXT = TEXT.replace(
    "template <class T> float get(T v);", "static_assert(BUG != 2);\ntemplate <class T> float get(T v);"
)
TEXT = TEXT.replace('flags=["-O2"]', 'flags=["-O2", f"-DWAIT={CONFIG[\'WAIT\']}", f"-DBUG={CONFIG[\'BUG\']}"]')
TEXT = TEXT.replace("import torch\n", "import os\n\nimport torch\n", 1)
TEXT = TEXT.replace(
    "    x = x.contiguous()\n", "    if CONFIG['BUG'] == 3:\n        os._exit(3)\n    x = x.contiguous()\n"
)


def command(*arguments):
    """The exit code of an autokernel command."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return ended.value.code


@pytest.fixture
def tuner(tmp_path):
    """A tuner of rmsnorm for one small call."""
    case = TimedCase(case=sized_case("rmsnorm", (64, 256)), calls=1)
    with (
        ForkServer("cpu", builds=tmp_path) as server,
        KernelTuner(get_spec("rmsnorm"), [case], server=server, folder=tmp_path / "tuning") as made,
    ):
        yield made


def test_every_way_to_fail_is_a_trial_and_the_fastest_that_is_right_wins(tuner, tmp_path):
    told = []
    tuning = tuner.tune(TEXT, Budget(), search="exhaustive", told=told.append)
    found = {tuple(tuning.space.config_at(trial.point).values()): trial for trial in tuning.outcome.trials}
    assert len(found) == 12
    assert found[2_000, 0].status is Status.OK
    assert found[0, 0].status is Status.OK
    assert found[200_000, 0].status is Status.CENSORED
    assert {found[wait, 1].status for wait in (0, 2_000, 200_000)} == {Status.WRONG}
    assert {found[wait, 2].status for wait in (0, 2_000, 200_000)} == {Status.COMPILE_ERROR}
    assert "static" in found[0, 2].error
    assert {found[wait, 3].status for wait in (0, 2_000, 200_000)} == {Status.COMPILE_ERROR}  # compilers call it, too
    assert "exit code 3" in found[0, 3].error
    assert tuning.outcome.config == {"WAIT": 0, "BUG": 0}
    assert parse_kernel(tuning.text).config == {"WAIT": 0, "BUG": 0}
    assert tuning.is_faster
    assert tuning.own_us == pytest.approx(found[2_000, 0].latency_us)
    assert tuning.numbers.config == {"WAIT": 0, "BUG": 0}
    assert {trial.point for trial in told} == {trial.point for trial in tuning.outcome.trials}
    assert "WAIT" in tuning.words
    assert not [path for path in (tmp_path / "tuning").iterdir() if path.is_dir()]  # a night has thousands


def test_a_kernel_that_is_wrong_as_it_is_ends_the_search(tuner):
    with pytest.raises(WrongResults):
        tuner.tune(TEXT.replace('"BUG": 0}', '"BUG": 1}'), Budget(), right_only=True)


def test_what_another_process_measured_is_compiled_before_it_is_compared(tmp_path):
    space = Space.read(TEXT)
    slow, fast = (space.locate({"WAIT": wait, "BUG": 0}) for wait in (200_000, 0))
    spec, case = get_spec("rmsnorm"), TimedCase(case=sized_case("rmsnorm", (64, 256)), calls=1)
    with (
        ForkServer("cpu", builds=tmp_path) as server,
        Compiler([case.case], Target(), builds=tmp_path / "tuning") as compiler,
        closing(
            LiveProvider(TEXT, space, spec, [case], server=server, compiler=compiler, folder=tmp_path / "tuning")
        ) as provider,
    ):
        provider.get_ready(None)
        of_slow, of_fast = provider.confirm([slow, fast])
    assert len(of_slow) == len(of_fast) == ROUNDS
    assert statistics.median(of_fast) < statistics.median(of_slow) < math.inf


def test_launchers_pass_from_folder_to_folder_inside_the_sandbox(tmp_path):
    for name in ("first", "second"):
        folder = tmp_path / "scratch" / name
        folder.mkdir(parents=True)
        (folder / "kernel.py").write_text(HONEST)
    built = tmp_path / "scratch" / "first" / places.TRITON / "KEY"
    built.mkdir(parents=True)
    (built / LAUNCHER.replace("*", ".so")).write_bytes(b"built")
    with ForkServer("cpu", builds=tmp_path) as server:
        first = tmp_path / "scratch" / "first" / "kernel.py"
        with Worker(server, {"kernel": str(first)}, tmp_path / "scratch") as worker:
            worker.load()
            worker.switch(first)
            worker.switch(tmp_path / "scratch" / "second" / "kernel.py")
    copied = tmp_path / "scratch" / "second" / places.TRITON / "KEY" / LAUNCHER.replace("*", ".so")
    assert copied.read_bytes() == b"built"


def test_a_child_that_times_starts_without_what_records_operators(tmp_path):
    (tmp_path / "kernel.py").write_text(
        "import sys\nimport torch\n\ndef kernel_fn(x, weight, eps):\n"
        "    return torch.full_like(x, float('torch._dynamo' in sys.modules))\n"
    )
    spec = get_spec("rmsnorm")
    inputs = spec.make_inputs(sized_case("rmsnorm", (2, 8)), 1)
    with (
        ForkServer("cpu", builds=tmp_path, body=TIMING) as server,
        Worker(server, {"kernel": str(tmp_path / "kernel.py")}, tmp_path) as worker,
    ):
        worker.load()
        (output,), names = worker.run([inputs], [describe(inputs["x"])], recorded=False)
    assert names == set()
    assert (output == 0).all()


def test_tune_writes_the_winner_only_when_told(tmp_path, capsys):
    path = tmp_path / "kernel.py"
    path.write_text(TEXT)
    flags = ["tune", path, "--shape", "64x256", "--shape", "32x128*3", "--budget", "12", "--search", "exhaustive"]
    assert command(*flags, "--json", "--dispatch") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["config"] == {"WAIT": 0, "BUG": 0}
    assert said["evaluations"] >= 9  # those that do not compile are no evaluations of their own binary
    assert [row["case"] for row in said["dispatch"]] == ["64x256 fp32", "32x128 fp32"]
    assert path.read_text() == TEXT
    assert command(*flags, "--write") == 0
    assert parse_kernel(path.read_text()).config == {"WAIT": 0, "BUG": 0}


def test_tune_chooses_for_a_gpu_that_is_not_here(tmp_path, capsys):
    path = tmp_path / "kernel.py"
    path.write_text(starter_path("softmax", "triton").read_text())
    assert command("tune", path, "--shape", "4096x1024", "--target", "sm_90", "--explain", "--write") == 0
    said = capsys.readouterr().out
    assert "compiled: ok" in said
    assert "kind: reduction" in said
    assert parse_kernel(path.read_text()).config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--budget", "soon"], "'soon' is no budget"),
        (["--shape", "4xx"], "'4xx' is no shape"),
        (["--shape", "64x256*0"], "'0' in '64x256*0' is no weight"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
        (["--search", "luck"], "there is no search 'luck'"),
        (["--target", "sm_1"], "unknown target 'sm_1'"),
    ],
)
def test_tune_says_what_is_wrong_with_its_arguments(tmp_path, capsys, flags, words):
    path = tmp_path / "kernel.py"
    path.write_text(TEXT)
    assert command("tune", path, *flags) == 2
    assert words in capsys.readouterr().err
    assert path.read_text() == TEXT
