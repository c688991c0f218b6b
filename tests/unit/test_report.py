"""The report as text, Markdown and JSON, from a summary and from a journal."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sample_run import SETTINGS, rmsnorm, softmax, summary

from autokernel import report
from autokernel.cli import main
from autokernel.journal import Journal
from autokernel.kerneltext import text_digest
from autokernel.rundir import create_run
from autokernel.state import load_state, started_json


@pytest.fixture
def found():
    return report.from_summary(summary())


def write_run(workdir, *, ended=True, histories=None, settings=SETTINGS, integration=None, plan=None):
    """A run directory whose journal tells the sample run, or one with these histories."""
    run = create_run(workdir, "llama", datetime(2030, 1, 2, 3, 4, tzinfo=UTC))
    with Journal(run.journal_path) as journal:
        journal.append("run-started", settings=settings.to_json(), version="0")
        if plan:
            journal.append("planned", **plan)
        for history in (rmsnorm(), softmax()) if histories is None else histories:
            _write_op(run, journal, history)
        if integration:
            journal.append("integrated", result=integration)
        if ended:
            journal.append("run-ended", reason="every op of the plan is done")
    return run


def _write_op(run, journal, history):
    started = _start_of(history)
    _write_text(run, history.op, 0, started.incumbent)
    digest = text_digest(started.incumbent)
    journal.append("op-started", op=history.op, digest=digest, history=started_json(started), tip="t")
    for e in history.experiments:
        _write_text(run, e.op, e.number, e.proposal.kernel_py)
        journal.append(
            "proposed",
            number=e.number,
            op=e.op,
            hypothesis=e.proposal.hypothesis,
            digest=e.proposal.digest,
            agent_s=e.agent_s,
            tokens=e.proposal.tokens,
            cost_usd=e.proposal.cost_usd,
        )
        journal.append(
            "judged",
            number=e.number,
            op=e.op,
            outcome=e.outcome.to_json(),
            decision=e.decision,
            reason=e.reason,
            seconds=e.seconds,
        )
        journal.append("recorded", number=e.number, op=e.op, commit=e.commit, tip="t")
    if history.stop_reason:
        journal.append("op-stopped", op=history.op, reason=history.stop_reason)


def _start_of(history):
    from dataclasses import replace

    first = history.experiments[0]
    return replace(
        history,
        experiments=(),
        incumbent=history.starter,
        incumbent_us=first.incumbent_us,
        active_s=0.0,
        stop_reason=None,
        starter=None,
    )


def _write_text(run, op, number, text):
    path = run.kernel_path(op, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_kernels_count_every_experiment_once(found):
    fast, slow = found.kernels
    assert (fast.kept, fast.reverted, fast.screened, dict(fast.failed)) == (2, 1, 1, {"CRASH": 1})
    assert fast.experiments == 5
    assert (fast.starter_us, fast.latency_us) == (1000.0, 500.0)
    assert fast.speedup == pytest.approx(3.2)
    assert fast.baseline == "eager"
    assert (slow.op, slow.experiments, slow.speedup) == ("softmax", 1, 0.5)


def test_text_tells_wins_losses_and_reasons(found):
    text = report.render_text(found)
    assert "rmsnorm (cpp): 1000.0 us (starter) -> 500.0 us, 80% of the roofline" in text
    assert "3.20x against PyTorch's fastest, eager (measured: eager 1600.0 us, compile 3200.0 us)" in text
    assert "5 experiments: 2 kept, 1 reverted, 1 screened out, 1 CRASH" in text
    assert "moved on: 3 reverts in a row" in text
    assert "SLOWER than PyTorch's fastest, 0.50x, eager" in text
    assert "6 experiments, 2 kept" in text
    assert "Example CPU, 2 cores" in text
    assert "after 1.5 min" in text


def test_best_ideas_are_the_kept_ones_the_largest_first(found):
    assert [(idea.number, idea.hypothesis) for idea in found.ideas] == [
        (5, "keep the row in cache"),
        (1, "vectorized loads"),
    ]
    assert found.ideas[0].speedup == pytest.approx(1.6)
    assert "#5 rmsnorm 1.60x: keep the row in cache (commit 0000000000)" in report.render_text(found)


def test_what_the_sandbox_did_not_enforce_is_told(found):
    assert "sandbox:" not in report.render_text(found)  # a journal from before there was one
    told = report.from_summary(replace(summary(), sandbox="not enforced on this machine: signals"))
    assert "\n  sandbox: not enforced on this machine: signals\n" in report.render_text(told)
    assert report.to_json(told)["sandbox"] == "not enforced on this machine: signals"


def test_an_unmeasured_model_is_said_to_be_unmeasured(found):
    assert "Whole model\n  not measured" in report.render_text(found)
    assert report.to_json(found)["integration"] is None


def measured(**changes):
    """A whole-model measurement as the journal holds it."""
    fields = {
        "used": ["rmsnorm"],
        "left_out": {"softmax": "no sure gain in the whole model: 0.990x [0.970, 1.010]"},
        "calls": {"rmsnorm": 9},
        "fallbacks": {"rmsnorm": 0},
        "speedup": {"low": 1.2, "estimate": 1.25, "high": 1.3},
        "eager_us": 100_000.0,
        "optimized_us": 80_000.0,
        "graph_overhead": {"low": 1.0, "estimate": 1.0, "high": 1.0},
        "blocks": 60,
        "outputs": "1 tensors agree with fp64, within fp32 tolerance",
        "notes": [],
    }
    return {**fields, **changes}


def model_block(integration):
    """The lines under the heading of the whole model."""
    text = report.render_text(report.from_summary(summary(integration)))
    return [line.strip() for line in text.split("Whole model\n")[1].split("\n\n")[0].splitlines()]


def test_the_whole_model_names_kernels_used_and_left_out():
    assert model_block(measured()) == [
        "1.250x [1.200, 1.300] against eager, faster: 100.00 -> 80.00 ms per forward",
        "rmsnorm: used, 9 calls per forward",
        "softmax: left out, no sure gain in the whole model: 0.990x [0.970, 1.010]",
        "outputs: 1 tensors agree with fp64, within fp32 tolerance",
    ]


@pytest.mark.parametrize(("bounds", "said"), [((0.7, 0.8, 0.9), "SLOWER"), ((0.99, 1.0, 1.01), "no sure difference")])
def test_a_loss_of_the_whole_model_is_in_the_headline(bounds, said):
    interval = dict(zip(("low", "estimate", "high"), bounds, strict=True))
    assert f"against eager, {said}:" in model_block(measured(speedup=interval))[0]


def test_torch_compile_and_fallbacks_are_told():
    compiled = {"low": 1.4, "estimate": 1.5, "high": 1.6}
    lines = model_block(measured(compile_speedup=compiled, fallbacks={"rmsnorm": 2}))
    assert "torch.compile, measured on its own: 1.500x [1.400, 1.600] against eager" in lines
    assert "rmsnorm: used, 9 calls per forward, 2 more run the original" in lines
    failed = model_block(measured(compile_speedup=None, compile_note="torch.compile was not measured: too slow"))
    assert "torch.compile was not measured: too slow" in failed


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("graph", "kernels in the captured graph"), ("inductor", "kernels in a torch.compile'd model")],
)
def test_how_the_kernels_run_and_the_gain_over_torch_compile_are_told(compiler, said):
    compiled = {"low": 1.1, "estimate": 1.2, "high": 1.3}
    over = {"low": 1.02, "estimate": 1.05, "high": 1.08}
    lines = model_block(measured(compiler=compiler, compile_speedup=compiled, speedup_over_compile=over))
    assert lines[1] == said
    assert lines[2] == (
        "1.050x [1.020, 1.080] against torch.compile, faster; torch.compile alone: 1.200x [1.100, 1.300] against eager"
    )


def test_modes_of_torch_compile_are_told():
    compiled, over = ({"low": n - 0.1, "estimate": n, "high": n + 0.1} for n in (1.2, 1.05))
    lines = model_block(
        measured(
            compiler="inductor-cudagraph",
            compile_mode="reduce-overhead",
            compile_speedup=compiled,
            speedup_over_compile=over,
            autotune_speedup=compiled,
            speedup_over_autotune=over,
        )
    )
    assert lines[1] == "kernels in a torch.compile'd model, replayed as a CUDA graph"
    assert lines[2] == (
        "1.050x [0.950, 1.150] against torch.compile in mode reduce-overhead, no sure difference; torch.compile alone: "
        "1.200x [1.100, 1.300] against eager"
    )
    assert lines[3] == (
        "1.050x [0.950, 1.150] against torch.compile in mode max-autotune, no sure difference; that alone: "
        "1.200x [1.100, 1.300] against eager"
    )


def test_a_model_that_no_kernel_helps_has_no_speedup():
    nothing = measured(
        used=[],
        calls={},
        fallbacks={},
        speedup=None,
        eager_us=None,
        optimized_us=None,
        outputs="",
        notes=["left as was"],
    )
    lines = model_block(nothing)
    assert lines[0] == "no speedup: the model runs as it was"
    assert lines[-1] == "left as was"


def test_a_run_without_any_op_has_a_report():
    from dataclasses import replace

    empty = report.from_summary(replace(summary(), histories=()))
    text = report.render_text(empty)
    assert "none was started" in text
    assert "no experiment was kept" in text
    assert empty.device == ""


def test_markdown_has_headings_lists_and_commands(found):
    text = report.render_markdown(found)
    assert text.startswith("# autokernel report: run 20300102-0304-llama\n")
    assert "\n- rmsnorm (cpp):" in text
    assert "\n  - moved on: 3 reverts in a row" in text
    assert "```sh\n# the whole run again\nautokernel run examples/llama.py --minutes 5 --seed 0\n" in text
    assert text.count("```") == 2


def test_environment_names_versions(found):
    assert found.environment["autokernel"]
    assert found.environment["python"]


def test_the_environment_is_that_of_the_run_and_not_of_who_reads_it(tmp_path):
    run = write_run(tmp_path)
    assert dict(report.from_state(run.name, load_state(run)).environment) == {"autokernel": "0"}  # an old journal
    with Journal(run.journal_path) as journal:
        journal.append("run-started", settings=SETTINGS.to_json(), version="1", environment={"torch": "9.9"})
    assert dict(report.from_state(run.name, load_state(run)).environment) == {"torch": "9.9"}


def test_json_report_can_be_written(found):
    read = json.loads(json.dumps(report.to_json(found)))
    assert read["kernels"][0]["failed"] == {"CRASH": 1}
    assert read["settings"]["model"] == "examples/llama.py"


def test_the_journal_tells_the_same_as_the_summary(tmp_path):
    run = write_run(tmp_path)
    found = report.from_state(run.name, load_state(run))
    expected = report.from_summary(summary())
    assert found.kernels == expected.kernels
    assert found.ideas == expected.ideas
    assert found.branch == f"autokernel/{run.name}"
    assert found.reason == "every op of the plan is done"


def test_a_run_that_did_not_end_says_so(tmp_path):
    run = write_run(tmp_path, ended=False)
    assert "not ended" in report.from_state(run.name, load_state(run)).reason


@pytest.mark.parametrize("flags", [[], ["--md"], ["--json"]])
def test_report_command_prints_the_latest_run(flags, tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["report", *flags])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    if flags == ["--json"]:
        assert json.loads(out)["run"] == run.name
    else:
        assert out.startswith(("autokernel report: run ", "# autokernel report: run ")[flags == ["--md"]] + run.name)


def test_report_command_refuses_a_damaged_journal(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path)
    lines = run.journal_path.read_text().splitlines(keepends=True)
    run.journal_path.write_text("".join([lines[0], "garbage\n", *lines[2:]]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["report"])
    assert caught.value.code == 8
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("examples/llama.py", "examples/llama.py"),
        ("/home/someone/project/nets/llama.py:build", "nets/llama.py:build"),
        ("/opt/elsewhere/llama.py:build", "llama.py:build"),
        ("hf:/opt/weights/tiny", "hf:tiny"),
        ("hf:LlamaForCausalLM", "hf:LlamaForCausalLM"),
        ("package.module:Class", "package.module:Class"),
    ],
)
def test_the_model_is_named_without_the_machines_folders(model, shown):
    settings = replace(SETTINGS, model=model, workdir=Path("/home/someone/project"))
    assert report.from_summary(replace(summary(), settings=settings)).model == shown
    assert settings.to_json()["model"] == model
