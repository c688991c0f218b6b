"""A scripted model optimizes rmsnorm through the real loop and the openai wire, with bad replies in between."""

import json
import os
from dataclasses import replace

import pytest

from autokernel import results
from autokernel.agenthost import AgentHost
from autokernel.journal import Journal
from autokernel.live import PlainView
from autokernel.loading import load_file, toplevel
from autokernel.rundir import find_run
from autokernel.settings import Settings
from autokernel.state import load_state
from tests.agents.conftest import SECRET
from tests.agents.server import Say, serving
from tests.loop.conftest import HONEST, SLOW, workdir  # noqa: F401  a fixture

pytestmark = pytest.mark.alone

ZEROS = HONEST.replace("return right(x, weight, eps)", "return torch.zeros_like(x)")
FAST = HONEST  # one thread, so that a busy machine does not blur it

SLOW_STARTER, SLOWER = (SLOW.replace("i < 3000", f"i < {rounds}") for rounds in (12000, 48000))

SCRIPT = [
    Say(text="Before I change anything, let me think about the memory traffic."),
    Say(tool='{"hypothesis": "an object that does not end'),
    Say(tool={"hypothesis": "zeros are quick", "kernel_py": ZEROS}),
    Say(status=529, error={"error": {"type": "server_error", "message": "overloaded"}}, headers={"retry-after": "0.1"}),
    Say(tool={"hypothesis": "broken", "kernel_py": "def kernel_fn(:\n"}),
    Say(text="Hypothesis: an edit\n\n<<<<<<< SEARCH\nnot in this file\n=======\nx = 1\n>>>>>>> REPLACE\n"),
    Say(text=f"Hypothesis: wait longer\n\n```python\n{SLOWER}```"),
    Say(tool='{"hypothesis": "cut off", "kernel_py": "imp', finish="length"),
    Say(tool={"hypothesis": "the same in other words", "kernel_py": SLOW_STARTER + "# again\n"}),
    Say(text="Hypothesis: do not wait at all\r\n\r\n~~~python\r\n" + FAST.replace("\n", "\r\n") + "~~~\r\n"),
]


def settings(workdir, port, **changes):  # noqa: F811
    return Settings(
        model=str(workdir / "norms.py"),
        workdir=workdir,
        budget_s=120,
        ops=("rmsnorm",),
        agent="openai",
        base_url=f"http://127.0.0.1:{port}/v1",
        llm_model="gpt-6.2-sol",
        max_cost_usd=5.0,
        max_experiments=3,
        compile_baseline=False,
        starters=workdir / "starters",
        **changes,
    )


@pytest.mark.slow
def test_a_scripted_model_optimizes_rmsnorm(workdir, monkeypatch):  # noqa: F811
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    (workdir / "starters" / "rmsnorm.py").write_text(SLOW_STARTER)
    model = workdir / "norms.py"
    model.write_text(model.read_text().replace("4, 512, 1024", "2, 256, 1024"))
    loop = load_file(toplevel("orchestrate.py"), "autokernel_orchestrate")
    with serving(list(SCRIPT)) as server:
        asked = settings(workdir, server.server_port)
        summary = loop.run(asked, PlainView())
    rows = results.read_rows(workdir / "results.tsv")
    assert [(row.correctness, row.decision) for row in rows] == [
        ("FAIL", "REVERT"),
        ("SCREENED", "REVERT"),
        ("PASS", "KEEP"),
    ]
    assert [row.agent for row in rows] == ["openai"] * 3
    assert summary.histories[0].incumbent == FAST
    assert "do not wait" in summary.histories[0].experiments[-1].proposal.hypothesis

    run = find_run(workdir)
    events = Journal(run.journal_path).events()
    calls = [event.fields for event in events if event.kind == "called"]
    assert [call["outcome"] for call in calls] == [
        *("prose only", "unreadable tool call", "ok"),
        *("overloaded", "syntax error", "edit does not apply", "ok"),
        *("truncated", "unchanged", "ok"),
    ]
    state = load_state(run)
    assert state.tokens == sum(call["tokens"] or 0 for call in calls) == 9 * 1650
    assert state.cost_usd == pytest.approx(sum(call["cost_usd"] or 0 for call in calls))
    assert state.settings == replace(asked, backend="cpp")
    for number, row in enumerate(rows, 1):
        assert "def rmsnorm(x: Tensor" in run.request_path("rmsnorm", number).read_text()
        assert row.description in run.reply_path("rmsnorm", number).read_text()

    for path in workdir.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    sent = json.dumps(server.requests)
    assert SECRET not in sent
    assert "def rmsnorm(x: Tensor" in sent
    assert " GB/s and " in sent
    assert "nothing but comments, docstrings and white space differs" in sent
    assert os.environ["OPENAI_API_KEY"] == SECRET


def test_what_was_spent_counts_after_resume(tmp_path):
    state = load_state_with(tmp_path, tokens=[1000, None, 500], cost=[0.5, None, 0.25])
    host = AgentHost(state.settings, PlainView(), Journal(tmp_path / "new.jsonl"), lambda: 1.0, state)
    assert (host._ledger.tokens, host._ledger.cost_usd) == (1500, 0.75)


def load_state_with(tmp_path, tokens, cost):
    from autokernel.rundir import RunDir
    from autokernel.state import replay

    journal = Journal(tmp_path / "journal.jsonl")
    journal.append("run-started", settings=Settings(model="m.py", workdir=tmp_path).to_json(), version="0", sandbox="")
    for count, usd in zip(tokens, cost, strict=True):
        fields = {"op": "rmsnorm", "agent": "openai", "model": "m", "outcome": "ok", "reason": ""}
        journal.append("called", **fields, tokens=count, cost_usd=usd)
    return replay(journal.events(), RunDir(path=tmp_path, name="run"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_cost_usd", 0.0),
        ("max_tokens", 0),
        ("temperature", 3.0),
        ("effort", "huge"),
        ("base_url", "localhost:8000"),
        ("base_url", "https://user:password@host/v1"),
    ],
)
def test_options_are_checked_at_start(tmp_path, field, value):
    from autokernel.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        Settings(model="m.py", workdir=tmp_path, **{field: value})
    assert caught.value.hint
    assert "password@" not in str(caught.value)
