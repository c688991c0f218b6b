"""The agent that is somebody else: what was handed in is given once, and what is no experiment is refused."""

import pytest

from autokernel.agents import AgentOptions, build_agent
from autokernel.agents.host import LimitReached
from autokernel.agents.outside import WAITING
from autokernel.errors import ConfigError
from tests.agents.conftest import BETTER, KERNEL, a_history, proposal


@pytest.fixture
def agent():
    return build_agent("outside", AgentOptions(seed=0))


def test_gives_what_was_handed_in_once_and_then_waits(agent):
    agent.handed_in = proposal(agent="robot")
    history = a_history()
    assert agent.propose(history) == proposal(agent="robot")
    with pytest.raises(LimitReached, match=WAITING):
        agent.propose(history)
    assert agent.asked is history


@pytest.mark.parametrize(
    ("text", "done", "said"),
    [
        (KERNEL, [], "this is the current kernel.py"),
        (f"{KERNEL}# the same\n", [], "this is the current kernel.py"),
        (BETTER, [(proposal(), "REVERT")], "experiment 1 tried exactly this"),
        (BETTER.replace('"rmsnorm"', '"softmax"'), [], "not 'rmsnorm' and 'cpp'"),
        (BETTER.replace("):\n", ":\n"), [], "line 9"),
    ],
)
def test_refuses_what_is_no_experiment(agent, text, done, said):
    agent.handed_in = proposal(text)
    with pytest.raises(ConfigError, match=said) as refused:
        agent.propose(a_history(*done))
    assert refused.value.hint
    assert agent.handed_in is None


def test_takes_no_argument():
    with pytest.raises(ConfigError, match="takes no argument"):
        build_agent("outside", AgentOptions(seed=0, argument="x"))
