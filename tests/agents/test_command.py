"""Any program as agent, and several agents by turns."""

import os
import sys
import time

import pytest

from autokernel.agents import AgentOptions, Timeouts, build_agent
from autokernel.agents.ensemble import turns
from autokernel.agents.host import LimitReached
from autokernel.errors import AgentError, ConfigError
from autokernel.records import Decision
from tests.agents.conftest import BETTER, KEYS, SECRET, Listener, a_history, proposal


def agent(script, tmp_path, timeout_s=20.0, **changes):
    path = tmp_path / "agent.py"
    path.write_text(script)
    options = AgentOptions(
        seed=0,
        argument=f"{sys.executable} {path}",
        workdir=tmp_path,
        keys=KEYS,
        host=Listener(),
        timeouts=Timeouts(total_s=timeout_s),
        **changes,
    )
    found = build_agent("command", options)
    found.waiter.scale = 1e-3
    return found


def test_prompt_on_stdin_and_reply_on_stdout(tmp_path):
    script = (
        "import sys\nassert 'rmsnorm' in sys.stdin.read()\n"
        f"print('Hypothesis: by hand\\n```python')\nprint({BETTER!r} + '```')"
    )
    found = agent(script, tmp_path).propose(a_history())
    assert (found.hypothesis, found.kernel_py) == ("by hand", BETTER)
    assert (found.tokens, found.cost_usd) == (None, None)


def test_the_program_gets_no_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    script = "import os\nopen('env', 'w').write(repr(dict(os.environ)))"
    assert agent(script, tmp_path).propose(a_history()) is None  # an empty reply each time
    assert SECRET not in (tmp_path / "env").read_text()


def test_a_program_that_fails_stops_after_three_tries_and_its_words_are_redacted(tmp_path):
    one = agent(f"import sys\nsys.exit('no login for {SECRET}')", tmp_path)
    with pytest.raises(AgentError, match="no login") as caught:
        one.propose(a_history())
    assert SECRET not in f"{caught.value}{one.options.host.everything}"
    assert one.options.host.outcomes == ["broken"] * 3


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path):
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open('pids', 'a').write(f'{child.pid}\\n')\ntime.sleep(60)"
    )
    with pytest.raises(AgentError, match="killed"):
        agent(script, tmp_path, timeout_s=1.0).propose(a_history())
    time.sleep(0.2)
    for pid in (tmp_path / "pids").read_text().split():
        state = "Z"
        if os.path.exists(f"/proc/{pid}/stat"):  # noqa: PTH110
            state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]  # noqa: PTH123, SIM115
        assert state == "Z"


@pytest.mark.parametrize("argument", ["", "no-such-program-here", "'unclosed"])
def test_an_unusable_command_is_refused_at_start(argument):
    with pytest.raises(ConfigError) as caught:
        build_agent("command", AgentOptions(seed=0, argument=argument))
    assert "stdin" in caught.value.hint


# -- ensemble


def test_turns_alternate_until_one_is_kept():
    names = ("a", "b")
    assert turns(names, a_history()) == ["a", "b"]
    first = (proposal(agent="a"), Decision.REVERT)
    assert turns(names, a_history(first)) == ["b", "a"]
    second = (proposal(agent="b"), Decision.KEEP)
    assert turns(names, a_history(first, second)) == ["b", "a"]
    reverted = [(proposal(agent="b"), Decision.REVERT)] * 3
    assert turns(names, a_history(first, second, *reverted)) == ["a", "b"]


class Member:
    name = "member"

    def __init__(self, answer):
        self.answer = answer

    def propose(self, history):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def ensemble(**members):
    found = build_agent("ensemble", AgentOptions(seed=0, argument=f"search,command:{sys.executable}", host=Listener()))
    found.members = {name: Member(answer) for name, answer in members.items()}
    return found


def test_a_member_without_ideas_passes_its_turn_on():
    assert ensemble(a=None, b=proposal()).propose(a_history()).agent == "b"
    assert ensemble(a=AgentError("cannot read it"), b=proposal()).propose(a_history()).agent == "b"
    assert ensemble(a=None, b=None).propose(a_history()) is None


def test_a_member_that_may_not_go_on_is_left_out_and_the_last_one_ends_the_run():
    both = ensemble(a=LimitReached("no money"), b=proposal())
    assert both.propose(a_history()).agent == "b"
    assert both.out
    both.members["b"].answer = LimitReached("no money either")
    with pytest.raises(LimitReached, match="either"):
        both.propose(a_history())


@pytest.mark.parametrize("argument", ["", "search", "search,search", "search,ensemble:a", "search,nobody"])
def test_unusable_ensembles_are_refused(argument):
    with pytest.raises(ConfigError):
        build_agent("ensemble", AgentOptions(seed=0, argument=argument))
