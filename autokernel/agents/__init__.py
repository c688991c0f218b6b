"""Agents: state in, proposal out. The registry maps a name to the module that builds it, imported when chosen."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autokernel.agentchoice import choose_agent
from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.records import Proposal
from autokernel.settings import Settings


class Agent(Protocol):
    """Proposes the next kernel.py for one op."""

    name: str

    def propose(self, history: KernelHistory) -> Proposal | None:
        """The next thing to try, or None when this agent has nothing left for this op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent may be told at start: a seed, and the argument after the colon of `--agent name:argument`."""

    seed: int
    argument: str = ""
    workdir: Path = Path()


AGENTS: Mapping[str, str] = {
    "search": "autokernel.agents.search",
    "replay": "autokernel.agents.replay",
}
"""Name -> module with `build(options: AgentOptions) -> Agent`."""


def build_agent(choice: str, options: AgentOptions) -> Agent:
    """The agent called `choice` (without its argument). Raises: ConfigError with the known names."""
    if choice not in AGENTS:
        raise ConfigError(f"unknown agent {choice!r}", hint=f"known agents: auto, {', '.join(AGENTS)}")
    agent: Agent = importlib.import_module(AGENTS[choice]).build(options)
    return agent


def agent_of(settings: Settings, environ: Mapping[str, str]) -> tuple[Agent, str]:
    """The agent of a run, and a line for the user where it had to be guessed (else ""). Raises: ConfigError."""
    choice, _, argument = settings.agent.partition(":")
    name, why = choose_agent(choice, AGENTS, environ)
    return build_agent(name, AgentOptions(seed=settings.seed, argument=argument, workdir=settings.workdir)), why
