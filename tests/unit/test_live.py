"""The three views, fed with the same events."""

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console
from sample_run import experiment, planned, rmsnorm, softmax, started, summary

from autokernel.live import JsonView, PlainView, RichView
from autokernel.records import Decision
from autokernel.screen import sparkline

HERE = Path(__file__).resolve().parent


def play(view):
    """A short run as the loop tells it."""
    view.note("no LLM agent in this version: the built-in search agent proposes the edits")
    view.stage("profiling the model")
    view.planned([planned("rmsnorm", 0.14), planned("softmax", 0.03, None)], 84_000.0, [planned("reduce", 0.001)])
    history = started()
    view.op_started(history)
    for one in rmsnorm().experiments:
        view.stage(f"rmsnorm: judging experiment {one.number}")
        history = history.add(one)
        view.experiment(history, one)


def screen(width, height=30):
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, legacy_windows=False)


def drawn(view, width, height=30):
    """What the view looks like now on a screen of that size, as lines without colours."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, force_terminal=False)
    console.print(view)
    return console.file.getvalue().splitlines()


@pytest.fixture
def rich_view():
    view = RichView(model="examples/llama.py", budget_s=300.0, console=screen(80))
    yield view
    view.close()


def test_plain_view_prints_one_line_per_event():
    stream = io.StringIO()
    view = PlainView(stream)
    play(view)
    view.op_stopped(rmsnorm())
    view.finished(summary())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 1 + 4 + 1 + 2 * 5 + 1 + 1
    kept = next(line for line in lines if "#1 rmsnorm" in line)
    assert "PASS KEEP: 1000.0 -> 800.0 us, faster | vectorized loads" in kept
    crash = next(line for line in lines if "#4 rmsnorm" in line)
    assert "CRASH REVERT: compile error" in crash
    assert "3 reverts in a row" in lines[-2]
    assert "3.20x against eager" in lines[-2]


def test_plain_view_keeps_a_message_of_many_lines_on_one_line():
    stream = io.StringIO()
    PlainView(stream).note("first\nsecond")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("view_class", [PlainView, JsonView])
def test_a_closed_stream_does_not_end_the_run(view_class):
    stream = io.StringIO()
    stream.close()
    play(view_class(stream))
    assert stream.closed


def test_json_view_prints_only_json_objects_with_the_measurements():
    stream = io.StringIO()
    view = JsonView(stream)
    play(view)
    view.op_stopped(rmsnorm())
    view.finished(summary())
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [e["event"] for e in events if e["event"] != "stage"] == [
        "note",
        "planned",
        "op-started",
        *["experiment"] * 5,
        "op-stopped",
        "finished",
    ]
    first = next(e for e in events if e["event"] == "experiment")
    assert (first["verdict"], first["decision"], first["latency_us"]) == ("PASS", "KEEP", 800.0)
    assert first["speedup"]["estimate"] == pytest.approx(1.25)
    crashed = next(e for e in events if e.get("verdict") == "CRASH")
    assert crashed["speedup"] is None
    assert crashed["latency_us"] is None


@pytest.mark.parametrize("width", [80, 100, 200])
def test_rich_view_shows_plan_and_experiments_at_any_width(rich_view, width):
    play(rich_view)
    lines = drawn(rich_view, width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "examples/llama.py" in text
    assert "judging experiment 5" in text
    plan = next(line for line in lines if line.startswith("rmsnorm") and "14.0%" in line)
    assert plan.split() == ["rmsnorm", "14.0%", "80%", "now", "2/5", "500.0", "3.20x", "eager"]
    assert next(line for line in lines if line.startswith("softmax")).split()[2:] == ["?", "waiting"]
    crash = next(line for line in lines if "CRASH" in line)
    assert "compile error" in crash
    assert "best 500.0 us" in lines[-1]
    assert "1.600x [1.584, 1.616]" in text


def test_rich_view_draws_the_latencies_from_before_a_run_was_resumed_too(rich_view):
    history = rmsnorm()
    rich_view.op_started(history)
    assert sparkline([800.0, 790.0, 990.0, 500.0]) in drawn(rich_view, 80)[-1]
    newest = experiment(6, us=2000.0)
    rich_view.experiment(history.add(newest), newest)
    assert sparkline([800.0, 790.0, 990.0, 500.0, 2000.0]) in drawn(rich_view, 80)[-1]


def test_rich_view_fits_a_small_terminal_and_keeps_the_newest_experiment(rich_view):
    play(rich_view)
    lines = drawn(rich_view, 80, height=16)
    assert len(lines) <= 16
    assert any(line.lstrip().startswith("5 rmsnorm") for line in lines)


def test_rich_view_closes_the_op_and_says_why_the_run_ended(rich_view):
    play(rich_view)
    rich_view.op_stopped(rmsnorm())
    rich_view.op_started(softmax())
    rich_view.op_stopped(softmax())
    rich_view.finished(summary())
    lines = drawn(rich_view, 80)
    assert next(line for line in lines if "14.0%" in line).split()[3] == "done"
    assert any("is over: every op of the plan is done" in line for line in lines)


def test_rich_view_shows_the_last_eight_experiments_only(rich_view):
    rich_view.planned([planned("rmsnorm", 0.14)], 84_000.0, [])
    history = started()
    for number in range(1, 21):
        one = experiment(number, decision=Decision.REVERT)
        history = history.add(one)
        rich_view.experiment(history, one)
    lines = drawn(rich_view, 80, height=60)
    numbers = [int(line.split()[0]) for line in lines if "REVERT" in line]
    assert numbers == list(range(13, 21))


def test_notes_scroll_above_the_screen():
    console = screen(80)
    view = RichView(model="m.py", budget_s=60.0, console=console)
    view.note("the starter of reduce is skipped")
    view.close()
    view.close()  # a second time is harmless
    assert "the starter of reduce is skipped" in console.file.getvalue()


def test_one_drawing_costs_little(rich_view):
    play(rich_view)
    drawn(rich_view, 80)
    start = time.thread_time()
    for _ in range(5):
        drawn(rich_view, 80)
    assert (time.thread_time() - start) / 5 < 0.05  # twice a second, beside the measurements


def test_sparkline_spans_the_values_and_survives_equal_ones():
    assert sparkline([1000.0, 500.0]) == "█▁"
    assert sparkline([7.0, 7.0, 7.0]) == "▁▁▁"
    assert sparkline([]) == ""


def test_rich_view_in_a_pseudo_terminal_restores_the_cursor_and_leaves_its_last_state():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    code = "\n".join(
        [
            "import sys",
            f"sys.path[:0] = [{str(HERE)!r}, {str(HERE.parents[1])!r}]",
            "from test_live import play",
            "from sample_run import summary",
            "from autokernel.live import RichView",
            "view = RichView(model='examples/llama.py', budget_s=300.0)",
            "play(view)",
            "view.finished(summary())",
            "view.close()",
            "print('the report')",
        ]
    )
    env = {**os.environ, "TERM": "xterm", "PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    assert child.wait(timeout=30) == 0, shown.decode()
    text = shown.decode()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden and came back
    assert "\x1b[1A" in text or "\x1b[2K" in text  # it redrew in place
    last = text[text.rindex("examples/llama.py") :]
    assert "is over: every op of the plan is done" in last
    assert last.rstrip().endswith("the report")
