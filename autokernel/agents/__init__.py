"""Agents: state in, proposal out. The registry maps a name to the module that builds it, imported when chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from autokernel.agents.host import Host, QuietHost
from autokernel.agents.spending import Ledger
from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.prompt import PromptContext
from autokernel.records import Proposal
from autokernel.settings import Settings


class Agent(Protocol):
    """Proposes the next kernel.py for one op."""

    @property
    def name(self) -> str:
        """What it is called in the log."""

    def propose(self, history: KernelHistory) -> Proposal | None:
        """The next thing to try, or None when this agent has nothing left for this op.

        Raises: LimitReached when money, tokens or time of the run are used up; ConfigError or AgentError for what a
        person must mend.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds that an agent waits for one reply: to connect, between two parts of the reply, and for all of it."""

    connect_s: float = 20.0
    idle_s: float = 300.0  # reasoning models can be silent for minutes before the first token
    total_s: float = 1800.0


def plain_context(history: KernelHistory) -> PromptContext:
    """What a prompt may tell when nothing but the history is known."""
    return PromptContext(op=history.op, backend=history.backend, device=history.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent may be told at start: a seed, the argument after the colon of `--agent name:argument`, and, for
    those that ask a model, which one and how. `keys` maps environment variables to secrets and is never printed.
    """

    seed: int
    argument: str = ""
    workdir: Path = Path()
    model: str | None = None
    base_url: str | None = None
    temperature: float | None = None
    effort: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    ledger: Ledger = field(default_factory=Ledger)
    timeouts: Timeouts = Timeouts()
    host: Host = field(default_factory=QuietHost)
    context: Callable[[KernelHistory], PromptContext] = plain_context


AGENTS: Mapping[str, str] = {
    "search": "autokernel.agents.search",
    "replay": "autokernel.agents.replay",
    "anthropic": "autokernel.agents.anthropic",
    "openai": "autokernel.agents.openai",
    "command": "autokernel.agents.command",
    "ensemble": "autokernel.agents.ensemble",
    "outside": "autokernel.agents.outside",
}
"""Name -> module with `build(options: AgentOptions) -> Agent`."""


def build_agent(choice: str, options: AgentOptions) -> Agent:
    """The agent called `choice` (without its argument). Raises: ConfigError with the known names."""
    if choice not in AGENTS:
        raise ConfigError(f"unknown agent {choice!r}", hint=f"known agents: auto, {', '.join(AGENTS)}")
    agent: Agent = importlib.import_module(AGENTS[choice]).build(options)
    return agent


def check_choice(settings: Settings) -> None:
    """Find out early what is wrong with `--agent`: an unknown name, a folder that is not there. Raises: ConfigError."""
    choice, _, argument = settings.agent.partition(":")
    if choice == "replay" or (choice != "auto" and choice not in AGENTS):
        build_agent(choice, AgentOptions(seed=settings.seed, argument=argument, workdir=settings.workdir))
