"""The benchmarks of the judge run on a CPU, with the real judge, and without GitPython or Triton."""

import json
import os
import subprocess
import sys

import pytest

from autokernel.loading import load_file, specs, toplevel
from autokernel.records import Interval, Outcome, Timing, Verdict
from autokernel.sizes import SIZES, sized_case

pytestmark = pytest.mark.alone

FOLDER = toplevel("reference.py").parent / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """The modules of the folder, as a script in it imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield {name: load_file(FOLDER / f"{name}.py", name) for name in ("judging", "false_keeps", "judge_speed")}


def run(tmp_path, script, *options):
    """The finished process of a script that finds neither GitPython nor Triton; one thread, as CI has busy machines."""
    for name in ("git", "triton"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def outcome(*speedup, verdict=Verdict.PASS):
    low, estimate, high = speedup
    timing = Timing(candidate_us=9, incumbent_us=10, speedup=Interval(low=low, estimate=estimate, high=high), blocks=12)
    return Outcome(verdict=verdict, stage="", reason="", stages=(), timing=timing, peak_memory_mb=None, seconds=2.0)


def test_false_keeps_by_the_real_judge(tmp_path):
    out = tmp_path / "out.jsonl"
    options = ["--op", "softmax", "--backend", "cpp", "--shape", "4x64", "--no-stages", "--experiments", "2"]
    done = run(tmp_path, "false_keeps.py", *options, "--out", str(out))
    found = json.loads(out.read_text())
    assert done.returncode == (0 if found["passed"] else 1), done.stderr
    assert found["experiments"] == sum(found["verdicts"].values()) == 2
    assert found["case"] == "model 4x64 fp32"
    assert "| false keeps | " in done.stdout


def test_judge_speed_by_the_real_judge(tmp_path):
    options = ["--ops", "softmax", "--backends", "cpp", "--out", str(tmp_path)]
    done = run(tmp_path, "judge_speed.py", *options)
    found = json.loads((tmp_path / "judge_speed.json").read_text())
    (row,) = found["rows"]
    assert row["verdicts"]["stages"] == ["PASS"], done.stderr
    assert row["stage_s"]["smoke"] > 0.1  # it compiles
    assert row["stages_s"] > sum(row["stage_s"].values())
    assert row["full_s"] > 0.1
    assert row["screened_s"] > 0.1
    assert row["original_s"] == 28.6
    assert "| softmax | cpp |" in (tmp_path / "judge_speed.md").read_text()


@pytest.mark.parametrize("script", ["false_keeps", "judge_speed"])
def test_misuse_is_explained(scripts, tmp_path, monkeypatch, capsys, script):
    monkeypatch.setattr(sys, "argv", [script, "--backend=cpp", "--dtype", "fp8", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        scripts[script].main()
    assert "hint: backend cpp knows fp32, bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcomes", "kept", "passed"),
    [
        (300, [], True),
        (300, [1.004], True),
        (300, [1.004, 1.0005], False),
        (600, [1.002, 1.002], True),
        (300, [1.02], False),
        (0, [], False),
    ],
)
def test_what_is_good_enough(scripts, outcomes, kept, passed):
    same = outcome(0.99, 1.0, 1.01)
    tally = scripts["false_keeps"].Tally(
        outcomes=[same] * outcomes, kept=[outcome(speedup, speedup, speedup) for speedup in kept]
    )
    assert tally.passed == passed


def test_summary_counts_intervals_that_exclude_one(scripts):
    outcomes = [
        outcome(0.98, 0.99, 0.995),
        outcome(0.99, 1.0, 1.01),
        outcome(1.001, 1.01, 1.02),
        outcome(1.0, 1.0, 1.0),
    ]
    summary = scripts["false_keeps"].Tally(outcomes=outcomes).summary()
    assert summary["excluding_1"] == 0.5
    assert (summary["median"], summary["low_5"], summary["high_95"]) == (1.0, 0.9915, 1.0085)
    assert summary["seconds"] == 2.0


def test_user_cases_are_calls_of_their_ops(scripts):
    sizes = scripts["judge_speed"].USER_SIZES
    assert set(sizes) == set(specs()) == set(SIZES)
    assert set(scripts["judge_speed"].ORIGINAL_S) == set(specs()) - {"masked_attention"}  # which the original had not
    for op, spec in specs().items():
        case = sized_case(op, sizes[op]).with_dtype("bf16")
        assert spec.oracle(**spec.make_inputs(case, 1)).isfinite().all()


def test_what_is_compiled_is_found_under_the_new_text(scripts, tmp_path):
    judges = scripts["judging"].Judges("cpp")
    judges._builds = tmp_path  # as if entered, with no server
    origin, target = judges._folder("softmax", "a"), judges._folder("softmax", "b")
    (origin / "triton" / "key").mkdir(parents=True)
    (origin / "triton" / "key" / "kernel.cubin").write_text("code")
    group = {"child_paths": {"kernel.cubin": str(origin / "triton" / "key" / "kernel.cubin")}}
    (origin / "triton" / "key" / "__grp__kernel.json").write_text(json.dumps(group))
    judges.share_builds("softmax", "b", "a")
    found = json.loads((target / "triton" / "key" / "__grp__kernel.json").read_text())
    assert found["child_paths"] == {"kernel.cubin": str(target / "triton" / "key" / "kernel.cubin")}
    judges.discard("softmax", "b")
    assert not target.exists()
    assert origin.exists()
