"""A history to propose for, agents on a loopback server, and a host that remembers what it was told."""

from dataclasses import replace

import pytest

from autokernel.agents import AgentOptions, Timeouts, build_agent
from autokernel.agents.spending import Ledger
from autokernel.history import KernelHistory
from autokernel.records import Baseline, Decision, Experiment, Outcome, PlannedOp, Proposal, Verdict
from tests.agents.server import serving

KERNEL = '''"""Starter."""

KERNEL_TYPE = "rmsnorm"
BACKEND = "cpp"
TUNABLES = {"UNROLL": [1, 2, 4]}
CONFIG = {"UNROLL": 1}


def kernel_fn(x, weight, eps=1e-6):
    return x
'''
BETTER = KERNEL.replace('"UNROLL": 1}', '"UNROLL": 2}')
SECRET = "sk-very-secret-0123456789"
KEYS = {"ANTHROPIC_API_KEY": SECRET, "OPENAI_API_KEY": SECRET}
SUFFIX = {"anthropic": "", "openai": "/v1"}


def a_history(*proposals, incumbent=KERNEL):
    planned = PlannedOp(op="rmsnorm", cases=(), time_us=1.0, share=0.5, headroom=None, potential=2.0)
    history = KernelHistory(
        planned=planned,
        backend="cpp",
        device="cpu",
        baseline=Baseline(latencies_us={"eager": 10.0}),
        incumbent=incumbent,
        incumbent_us=12.0,
    )
    for number, (proposal, decision) in enumerate(proposals, start=1):
        history = history.add(experiment(number, proposal, decision))
    return history


def experiment(number, proposal, decision=Decision.REVERT):
    outcome = Outcome(
        verdict=Verdict.PASS, stage="", reason="", stages=(), timing=None, peak_memory_mb=None, seconds=1.0
    )
    return Experiment(
        number=number,
        op="rmsnorm",
        proposal=proposal,
        outcome=outcome,
        decision=Decision(decision),
        reason="not surely faster",
        latency_us=None,
        incumbent_us=None,
        commit=None,
        agent_s=0.1,
        seconds=1.0,
    )


def proposal(text=BETTER, **changes):
    return replace(Proposal(hypothesis="unroll", kernel_py=text), **changes)


class Listener:
    """A host that remembers."""

    def __init__(self, time_left_s=3600.0):
        self.notes, self.stages, self.calls, self.waits = [], [], [], []
        self._time_left_s = time_left_s

    def note(self, message):
        self.notes.append(message)

    def stage(self, name):
        self.stages.append(name)

    def called(self, call):
        self.calls.append(call)

    def waited(self, seconds):
        self.waits.append(seconds)

    def time_left_s(self):
        return self._time_left_s

    @property
    def outcomes(self):
        return [call.outcome for call in self.calls]

    @property
    def everything(self):
        return "\n".join([*self.notes, *self.stages, *map(repr, self.calls)])


@pytest.fixture(params=["anthropic", "openai"])
def provider(request):
    return request.param


@pytest.fixture(autouse=True)
def _no_keys_of_the_user(monkeypatch, tmp_path):
    for name in (
        "ANTHROPIC_API_KEY",
        "OPENAI_API_KEY",
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_BASE_URL",
        "OPENAI_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


class Scene:
    """One agent on a server with a script; its own pauses are a thousandth of the usual ones."""

    def __init__(self, provider, server, **options):
        self.server, self.host = server, options.pop("host", None) or Listener()
        self.ledger = options.pop("ledger", None) or Ledger()
        defaults = {
            "seed": 0,
            "keys": KEYS,
            "base_url": f"http://127.0.0.1:{server.server_port}{SUFFIX[provider]}",
            "timeouts": Timeouts(connect_s=1.0, idle_s=0.4, total_s=2.0),
        }
        self.agent = build_agent(
            provider, AgentOptions(**{**defaults, "host": self.host, "ledger": self.ledger, **options})
        )
        self.agent.waiter.scale = 1e-3

    def propose(self, history=None):
        return self.agent.propose(history or a_history())


@pytest.fixture
def scene(provider):
    """`scene(answers, **options)`: a Scene, closed at the end of the test."""
    opened = []

    def make(script, **options):
        context = serving(script)
        server = context.__enter__()
        opened.append(context)
        return Scene(provider, server, **options)

    yield make
    for context in opened:
        context.__exit__(None, None, None)
