"""`--notify`: what the program is told, and that the run does not depend on it."""

import json
import logging
import shlex
import sys

import pytest
from sample_run import summary

from autokernel import notify, report
from autokernel.errors import DeviceError
from autokernel.notify import Notifier


def writes_stdin_to(path):
    code = f"import sys, pathlib; pathlib.Path({str(path)!r}).write_text(sys.stdin.read())"
    return shlex.join([sys.executable, "-c", code])


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("autokernel"), "propagate", True)
    return caplog


def test_the_end_is_told_with_the_report(tmp_path):
    Notifier(writes_stdin_to(tmp_path / "told")).ended(report.from_summary(summary()))
    told = json.loads((tmp_path / "told").read_text())
    assert told["event"] == "ended"
    assert told["reason"] == "every op of the plan is done"
    assert told["report"]["kernels"][0]["op"] == "rmsnorm"
    assert told["text"].startswith("autokernel report: run ")


def test_a_stop_is_told_with_what_to_do(tmp_path):
    error = DeviceError("the GPU is gone", hint="restart the machine")
    Notifier(writes_stdin_to(tmp_path / "told")).stopped(error, "20300102-0304-llama")
    assert json.loads((tmp_path / "told").read_text()) == {
        "event": "stopped",
        "run": "20300102-0304-llama",
        "reason": "the GPU is gone",
        "hint": "restart the machine",
        "exit_code": 3,
    }


def test_a_failing_program_is_a_warning(warnings):
    Notifier("sh -c 'echo no network >&2; exit 3'").stopped(ValueError(), None)
    assert "--notify did not work: sh ended with 3: no network" in warnings.text


def test_a_program_that_hangs_is_given_up(warnings, monkeypatch):
    monkeypatch.setattr(notify, "DEADLINE_S", 0.2)
    Notifier("sleep 60").stopped(ValueError("x"), None)
    assert "timed out" in warnings.text
