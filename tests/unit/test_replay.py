"""Replay: which files are played for an op, in which order, with which words, and what a wrong folder says."""

from __future__ import annotations

from pathlib import Path

import pytest

from autokernel.agents import AgentOptions, build_agent
from autokernel.agents.replay import ReplayAgent, build, files_of
from autokernel.errors import AgentError, ConfigError
from autokernel.history import KernelHistory
from autokernel.records import Baseline, Decision, Experiment, Outcome, PlannedOp, Proposal, Verdict


def kernel(op: str, docstring: str = "") -> str:
    head = f'"""{docstring}"""\n' if docstring else ""
    return f'{head}KERNEL_TYPE = "{op}"\nBACKEND = "cpp"\n\n\ndef kernel_fn(x):\n    return x\n'


def history_of(op: str) -> KernelHistory:
    planned = PlannedOp(op=op, cases=(), time_us=1.0, share=0.5, headroom=None, potential=1.5)
    baseline = Baseline(latencies_us={"eager": 10.0})
    return KernelHistory(
        planned=planned, backend="cpp", device="cpu", baseline=baseline, incumbent=kernel(op), incumbent_us=9.0
    )


def played(history: KernelHistory, proposal: Proposal) -> KernelHistory:
    outcome = Outcome(
        verdict=Verdict.CRASH, stage="smoke", reason="", stages=(), timing=None, peak_memory_mb=None, seconds=1.0
    )
    experiment = Experiment(
        number=len(history.experiments) + 1,
        op=history.op,
        proposal=proposal,
        outcome=outcome,
        decision=Decision.REVERT,
        reason="",
        latency_us=None,
        incumbent_us=None,
        commit=None,
        agent_s=0.0,
        seconds=1.0,
    )
    return history.add(experiment)


def play_all(folder: Path, op: str) -> list[Proposal]:
    agent = build(AgentOptions(seed=0, argument=str(folder)))
    history, proposals = history_of(op), []
    while (proposal := agent.propose(history)) is not None:
        proposals.append(proposal)
        history = played(history, proposal)
    return proposals


def test_files_of_the_ops_own_folder_are_played_in_sorted_order_and_then_none(tmp_path):
    (tmp_path / "softmax").mkdir()
    for name in ("b.py", "a.py", "c.py"):
        (tmp_path / "softmax" / name).write_text(kernel("softmax", name))
    (tmp_path / "rmsnorm").mkdir()
    (tmp_path / "rmsnorm" / "other.py").write_text(kernel("rmsnorm"))
    assert [p.hypothesis for p in play_all(tmp_path, "softmax")] == ["a.py", "b.py", "c.py"]


def test_files_of_the_flat_folder_belong_to_the_op_of_their_kernel_type(tmp_path):
    (tmp_path / "1.py").write_text(kernel("softmax", "first"))
    (tmp_path / "2.py").write_text(kernel("rmsnorm", "second"))
    (tmp_path / "softmax_named.py").write_text(kernel("rmsnorm", "third"))
    assert [p.hypothesis for p in play_all(tmp_path, "softmax")] == ["first"]
    assert [p.hypothesis for p in play_all(tmp_path, "rmsnorm")] == ["second", "third"]


def test_hypothesis_is_the_first_docstring_line_or_the_file_name(tmp_path):
    (tmp_path / "1.py").write_text(kernel("softmax", "\n  One pass over rows.\n\nMore words."))
    (tmp_path / "2.py").write_text(kernel("softmax"))
    assert [p.hypothesis for p in play_all(tmp_path, "softmax")] == ["One pass over rows.", "2.py"]


def test_files_that_are_no_python_are_played_as_they_are(tmp_path):
    broken = "def kernel_fn(:\n"
    (tmp_path / "softmax").mkdir()
    (tmp_path / "softmax" / "x.py").write_text(broken)
    (tmp_path / "softmax-2.py").write_text(broken)
    (tmp_path / "softmaximum.py").write_text(broken)
    (tmp_path / "softmax.py").write_bytes(b"\xff\xfe broken")
    proposals = play_all(tmp_path, "softmax")
    assert [p.hypothesis for p in proposals] == ["x.py", "softmax-2.py", "softmax.py"]
    assert [p.kernel_py for p in proposals[:2]] == [broken, broken]


def test_a_new_agent_goes_on_where_the_history_ends(tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.py").write_text(kernel("softmax", str(index)))
    agent = ReplayAgent(folder=tmp_path)
    history = history_of("softmax")
    history = played(history, agent.propose(history))
    assert ReplayAgent(folder=tmp_path).propose(history).hypothesis == "1"


def test_an_op_without_files_is_simply_exhausted(tmp_path):
    (tmp_path / "1.py").write_text(kernel("softmax"))
    assert play_all(tmp_path, "matmul") == []


def test_a_relative_folder_is_taken_from_the_working_directory(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "1.py").write_text(kernel("softmax"))
    agent = build_agent("replay", AgentOptions(seed=0, argument="kernels", workdir=tmp_path))
    assert agent.propose(history_of("softmax")).kernel_py == kernel("softmax")


@pytest.mark.parametrize(
    ("argument", "message"), [("", "needs a folder"), ("absent", "is not a folder"), ("empty", "holds no kernel files")]
)
def test_a_folder_that_cannot_be_played_is_refused_at_start(tmp_path, argument, message):
    (tmp_path / "empty" / "softmax").mkdir(parents=True)
    with pytest.raises(ConfigError, match=message) as caught:
        build(AgentOptions(seed=0, argument=argument, workdir=tmp_path))
    assert caught.value.hint


def test_a_folder_that_vanishes_during_the_run_is_an_agent_error(tmp_path):
    with pytest.raises(AgentError, match="is gone"):
        files_of(tmp_path / "gone", "softmax")
