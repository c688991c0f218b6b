"""`log`, `show` and `compare` on runs that a journal tells."""

import json
from dataclasses import replace

import pytest
from sample_run import SETTINGS, experiment, rmsnorm, started
from test_report import measured, write_run

from autokernel.cli import main
from autokernel.journal import Journal
from autokernel.records import Decision


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path)


def said(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == code, err
    return out if code == 0 else err


def test_log_has_a_line_for_every_experiment(run, capsys):
    lines = said(capsys, "log").splitlines()
    assert [line.split()[0] for line in lines] == [f"#{number}" for number in range(1, 7)]
    assert lines[0].split(maxsplit=8)[1:4] == ["rmsnorm", "PASS", "KEEP"]
    assert "800.0 us  1.250x [1.238, 1.262]  vectorized loads" in lines[0]
    assert "CRASH     REVERT  -" in lines[3]


def test_log_of_one_op_and_as_json(run, capsys):
    found = json.loads(said(capsys, "log", run.name, "--op", "softmax", "--json"))
    assert found["run"] == run.name
    (only,) = found["experiments"]
    assert (only["number"], only["verdict"], only["decision"], only["latency_us"]) == (6, "PASS", "REVERT", 410.0)
    assert only["speedup"]["estimate"] == pytest.approx(400 / 410)
    assert only["tokens"] is None
    assert "rmsnorm, softmax" in said(capsys, "log", "--op", "matmul", code=2)


def test_log_shows_no_control_characters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, histories=[started().add(experiment(1, idea="\x1b[2Jgone\r\nnext line"))])
    (line,) = said(capsys, "log").splitlines()
    assert line.endswith("\N{REPLACEMENT CHARACTER}[2Jgone next line")


def test_show_compares_with_the_incumbent_of_then(run, capsys):
    text = said(capsys, "show", "2")
    assert "#2 rmsnorm: UNROLL 2 -> 4\n  PASS, REVERT: not surely faster\n" in text
    assert "\n-text 1\n+text 2" in text
    assert "speedup 1.013x [1.003, 1.023] in 12 blocks" in text
    assert "smoke PASS, 2 cases in 0.1 s" in text
    assert "peak memory 80.0 MB" in text
    assert "\n-text 1\n+text 5" in said(capsys, "show", "5", "--run", run.name)
    assert "\n-starter text\n+text 1" in said(capsys, "show", "1")
    assert "not timed" in said(capsys, "show", "4")


def test_show_tells_what_was_asked_and_answered_where_that_was_kept(run, capsys):
    assert "Prompt" not in said(capsys, "show", "2")
    run.request_path("rmsnorm", 2).write_text("Make it faster.\n")
    run.reply_path("rmsnorm", 2).write_text("Unroll it.\x07\n")
    assert "Prompt\nMake it faster.\n\nReply\nUnroll it.\N{REPLACEMENT CHARACTER}\n" in said(capsys, "show", "2")


def test_show_of_an_experiment_that_is_not_there(run, capsys):
    assert "1 to 6" in said(capsys, "show", "7", code=2)
    found = json.loads(said(capsys, "show", "3", "--json"))
    assert (found["verdict"], found["outcome"]["stages"][0]["stage"]) == ("SCREENED", "smoke")
    assert "+text 3" in found["diff"]


def test_show_of_an_experiment_that_is_being_judged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path, histories=[started().add(experiment(1))], ended=False)
    lines = run.journal_path.read_text().splitlines(keepends=True)
    run.journal_path.write_text("".join(line for line in lines if '"judged"' not in line and '"recorded"' not in line))
    assert "not decided yet" in said(capsys, "show", "1", code=2)


def test_compare_says_first_what_differs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = write_run(tmp_path, integration=measured())
    faster = started(starter_us=900.0).add(experiment(1, decision=Decision.KEEP, us=300.0, incumbent_us=900.0))
    other = [replace(faster, device="Another CPU")]
    second = write_run(tmp_path, histories=other, settings=replace(SETTINGS, seed=7))
    text = said(capsys, "compare", first.name, second.name)
    head, model, norm, *_ = text.split("\n\n")
    assert head.splitlines()[0] == f"{first.name} | {second.name}"
    assert "device: Example CPU, 2 cores | Another CPU" in head
    assert "seed: 0 | 7" in head
    assert "against eager: 1.250x [1.200, 1.300] | not measured" in model
    assert "best: 500.0 us | 300.0 us" in norm
    assert "softmax\n  start: 400.0 us | not begun" in text
    assert "same device, model, settings and versions" in said(capsys, "compare", first.name, first.name)
    found = json.loads(said(capsys, "compare", first.name, second.name, "--json"))
    assert found["kernels"]["softmax"][1] is None
    assert {each["name"] for each in found["differences"]} == {"device", "seed"}


def test_status_of_a_run_that_ended_or_was_killed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ended = write_run(tmp_path)
    killed = write_run(tmp_path, histories=[rmsnorm()], ended=False)
    text = said(capsys, "status", ended.name)
    assert f"run {ended.name}: ended: every op of the plan is done" in text
    assert "6 experiments, 2 kept" in text
    assert "softmax: 400.0 us, 0.50x against PyTorch eager, 1 experiments" in text
    assert "autokernel run --resume" in said(capsys, "watch", killed.name)  # and it returns
    with Journal(killed.journal_path) as journal:
        journal.append("run-ended", reason="stopped by the user")
    assert said(capsys, "status").startswith(f"run {killed.name}: ended: stopped by the user\n")


def test_the_runs_are_not_changed_by_looking_at_them(run, capsys):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    said(capsys, "log")
    said(capsys, "show", "1")
    said(capsys, "status")
    said(capsys, "compare", run.name, "latest")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
