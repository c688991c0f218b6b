"""One run that is driven from outside, step by step: every step a process of its own, then the same over MCP."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest

from autokernel import results
from autokernel.cli import main
from autokernel.commands.finish import finish
from autokernel.rundir import find_run, list_runs, lock
from autokernel.state import load_state
from tests.loop.conftest import HERE, HONEST, SLOW, git
from tests.loop.test_orchestrate import end_at, events, measure_the_model_for

# These tests are steps of one run, in this order: one worker must take them all (--dist loadfile).

STARTER = SLOW.replace("i < 3000", "i < 9000")
ZEROS = HONEST.replace("return right(x, weight, eps)", "return torch.zeros_like(x)")
RAISES = HONEST.replace("return right(x, weight, eps)", "raise RuntimeError('not today')")
FLAGS = [
    "--ops",
    "rmsnorm,matmul",
    "--starters",
    "starters",
    "--no-compile-baseline",
    "--patience",
    "2",
    "--minutes",
    "30",
]


def start(folder, *arguments):
    command = [sys.executable, "-m", "autokernel", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def step(folder, *arguments):
    """What a command prints, as JSON; it must succeed."""
    process = start(folder, *arguments, "--json")
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert len(stdout.splitlines()) == 1
    return json.loads(stdout)


@pytest.fixture
def refused(project, monkeypatch, capfd):
    """The message of a command that must be refused, and must leave the journal alone."""
    folder, _ = project
    monkeypatch.chdir(folder)

    def refuse(*arguments):
        before = events(folder)
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        said = capfd.readouterr()
        assert (caught.value.code, said.out) == (2, ""), said.err
        assert "hint:" in said.err
        assert events(folder) == before
        return said.err

    return refuse


def decisions(folder):
    rows = results.read_rows(folder / "results.tsv") if (folder / "results.tsv").exists() else []
    return [(row.experiment, row.correctness, row.decision, row.agent) for row in rows]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A directory with a model in it, and what the first `next` said."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "starters").mkdir()
    (folder / "starters" / "rmsnorm.py").write_text(STARTER)
    (folder / "norms.py").write_text((HERE / "models" / "norms.py").read_text().replace("4, 512, 1024", "2, 128, 1024"))
    for name, text in {"better.py": HONEST, "zeros.py": ZEROS, "fresh.py": SLOW}.items():
        (folder / name).write_text(text)
    return folder, step(folder, "next", "norms.py", "--op", "rmsnorm", *FLAGS)


def test_next_begins_a_run_and_goes_on_with_it(project, refused):
    folder, said = project
    assert (said["op"], said["backend"], said["experiments"]) == ("rmsnorm", "cpp", [])
    assert said["signature"] == "kernel_fn(x, weight, eps=1e-06)"
    assert {"eager", "native"} <= set(said["baselines_us"])
    assert "## 2. The contract of kernel.py" in said["playbook"]
    assert "2 x (x [2, 128, 1024] fp32" in said["prompt"]
    draft = find_run(folder).draft_path("rmsnorm")
    assert said["kernel_py"] == str(draft)
    assert draft.read_text() == STARTER
    before = events(folder)
    again = step(folder, "next", "norms.py", *FLAGS, "--brief")
    assert (again["run"], again["playbook"]) == (said["run"], None)
    assert len(list_runs(folder)) == 1
    assert events(folder) == before
    assert "autokernel finish" in refused("next", "other.py")
    assert load_state(find_run(folder)).settings.agent == "outside"


def test_what_is_no_experiment_is_refused_before_anything_is_judged(project, refused):
    folder, _ = project
    bad = {
        "empty.py": ("", "is empty"),
        "broken.py": ("x = 1\ndef kernel_fn(x:\n", "line 2"),
        "without.py": ("KERNEL_TYPE = 'rmsnorm'\nBACKEND = 'cpp'\n", "defines no kernel_fn"),
        "foreign.py": (HONEST.replace('"rmsnorm"', '"softmax"', 1), "'softmax' is no op of this run"),
        "same.py": (f"# a comment\n{STARTER}", "this is the current kernel.py"),
    }
    for name, (text, message) in bad.items():
        (folder / name).write_text(text)
        assert message in refused("submit", name, "-m", "an idea")
    assert "missing.py" in refused("submit", "missing.py", "-m", "an idea")
    assert "no hypothesis" in refused("submit", "better.py")
    assert decisions(folder) == []


def test_submit_that_was_killed_is_finished_by_next_and_kept(project, refused):
    folder, _ = project
    end_at(start(folder, "submit", "better.py", "-m", "no waiting"), folder, ("proposed", 1), signal.SIGKILL)
    assert decisions(folder) == []
    draft = find_run(folder).draft_path("rmsnorm")
    said = step(folder, "next", "--brief")
    assert (said["settled"]["experiment"], said["settled"]["decision"]) == (1, "KEEP")
    assert decisions(folder) == [(1, "PASS", "KEEP", "outside")]
    assert draft.read_text() == HONEST
    assert "this is the current kernel.py" in refused("submit", "better.py", "-m", "no waiting")


def test_submit_of_a_wrong_working_copy_is_reverted_and_not_taken_twice(project, refused):
    folder, _ = project
    run = find_run(folder)
    run.draft_path("rmsnorm").write_text(ZEROS)
    assert step(folder, "next", "--brief")["edited"]
    said = step(folder, "submit", "-m", "no arithmetic", "--agent", "tester")
    assert (said["experiment"], said["verdict"], said["stage"], said["decision"]) == (2, "FAIL", "smoke", "REVERT")
    assert decisions(folder)[1] == (2, "FAIL", "REVERT", "tester")
    assert run.draft_path("rmsnorm").read_text() == HONEST
    assert "experiment 2 tried exactly this" in refused("submit", "zeros.py", "-m", "no arithmetic")
    assert git(run.worktree, "show", "HEAD:kernel.py") == HONEST.strip()
    assert git(run.worktree, "show", f"refs/autokernel/rejected/{run.name}/2:kernel.py") == ZEROS.strip()


def test_one_step_at_a_time(project, refused):
    folder, said = project
    with lock(folder, said["run"]):
        message = refused("next")
    assert said["run"] in message
    assert "pid" in message


def test_mcp_serves_the_same_run_and_nothing_else_on_stdout(project, refused):
    pytest.importorskip("mcp")
    folder, said = project
    asyncio.run(over_mcp(folder, said["run"], refused))
    lines = (folder / "stdout.txt").read_text().splitlines()
    assert len(lines) >= 6
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in lines)
    assert decisions(folder)[2] == (3, "CRASH", "REVERT", "robot")
    assert "rmsnorm is closed: 2 reverts in a row" in refused("submit", "fresh.py", "-m", "too late")
    assert step(folder, "next", "--brief")["op"] == "matmul"


def test_limit_of_the_run_leaves_nothing_to_do_until_it_is_raised(project, refused):
    folder, _ = project
    said = step(folder, "next", "--experiments", str(len(decisions(folder))))
    assert said["op"] is None
    assert said["reason"].endswith("experiments done, as asked")
    assert "experiments done, as asked" in refused("submit", "fresh.py", "--op", "rmsnorm", "-m", "too late")
    assert step(folder, "next", "--experiments", "50", "--brief")["experiments_left"] == 50 - len(decisions(folder))


async def over_mcp(folder, run, refused):
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    command = f"exec {sys.executable} -m autokernel mcp > >(tee stdout.txt)"
    server = StdioServerParameters(command="bash", args=["-c", command], cwd=folder)
    async with stdio_client(server) as streams, ClientSession(*streams) as client:
        await client.initialize()
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"next_experiment", "submit_kernel", "report", "finish_run"}
        assert set(tools["submit_kernel"].input_schema["required"]) == {"kernel_py", "hypothesis"}

        async def call(name, **arguments):
            result = await client.call_tool(name, arguments)
            return result.is_error, result.content[0].text

        failed, text = await call("next_experiment", brief=True)
        assert not failed, text
        assert f"# Run {run}: experiment 3, on rmsnorm" in text
        failed, text = await call("submit_kernel", kernel_py=ZEROS, hypothesis="again")
        assert failed
        assert "experiment 2 tried exactly this" in text
        assert run in refused("next")  # the server holds the run
        failed, text = await call("submit_kernel", kernel_py=RAISES, hypothesis="give up", agent="robot")
        assert not failed, text
        assert "not today" in text
        assert "rmsnorm is done for now: 2 reverts in a row" in text
        failed, text = await call("next_experiment", brief=True)
        assert not failed, text
        assert "rmsnorm is closed: 2 reverts in a row" in text
        assert f"# Run {run}: experiment 4, on matmul" in text
        failed, text = await call("report")
        assert "no waiting" in text


def test_finish_measures_the_model_and_ends_the_run(project, refused, monkeypatch, capfd):
    folder, said = project
    measure_the_model_for(monkeypatch, 4.0)
    monkeypatch.chdir(folder)
    finish(as_json=True)
    report = json.loads(capfd.readouterr().out)
    assert report["run"] == said["run"]
    state = load_state(find_run(folder))
    assert state.ended == "finished from outside"
    assert state.integration is not None
    assert find_run(folder).optimized_dir("rmsnorm").is_dir()
    assert "no driven run is open" in refused("next")
