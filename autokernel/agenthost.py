"""The run as its agent sees it: what it may say, where its calls are journaled, what it may spend, how it is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace

from autokernel.agentchoice import choose_agent
from autokernel.agents import AGENTS, Agent, AgentOptions, build_agent, plain_context
from autokernel.agents.host import Call
from autokernel.agents.spending import Ledger
from autokernel.facts import Facts
from autokernel.history import KernelHistory
from autokernel.journal import Journal
from autokernel.prompt import PromptContext, ideas_of
from autokernel.settings import Settings
from autokernel.state import RunState
from autokernel.view import View


class AgentHost:
    """Implements `autokernel.agents.host.Host` for one open run; `state` is that of a resumed one."""

    def __init__(
        self,
        settings: Settings,
        view: View,
        journal: Journal,
        time_left_s: Callable[[], float],
        state: RunState | None,
        histories: Callable[[], Iterable[KernelHistory]] = tuple,
        facts: Facts | None = None,
    ) -> None:
        """`histories` are those of all ops so far, for what one op's work tells another's."""
        self.waited_s, self._histories, self._facts = 0.0, histories, facts or Facts()
        self._settings, self._view, self._journal, self._time_left_s = settings, view, journal, time_left_s
        self._ledger = Ledger(
            max_tokens=settings.max_tokens,
            max_cost_usd=settings.max_cost_usd,
            tokens=state.tokens if state else 0,
            cost_usd=state.cost_usd if state else 0.0,
        )

    def build(self, keys: Mapping[str, str]) -> Agent:
        """The agent that the settings name. Raises: ConfigError when it cannot work."""
        settings = self._settings
        choice, _, argument = settings.agent.partition(":")
        name, why = choose_agent(choice, AGENTS, {**os.environ, **keys}, settings.base_url)
        if why:
            self._view.note(why)
        return build_agent(
            name,
            AgentOptions(
                seed=settings.seed,
                argument=argument,
                workdir=settings.workdir,
                model=settings.llm_model,
                base_url=settings.base_url,
                temperature=settings.temperature,
                effort=settings.effort,
                keys=keys,
                ledger=self._ledger,
                host=self,
                context=self.context,
            ),
        )

    def context(self, history: KernelHistory) -> PromptContext:
        """What a prompt may tell beside the op's own history."""
        known = self._facts.of(plain_context(history), history)
        return replace(known, ideas=ideas_of(self._histories(), but=history.op))

    def note(self, message: str) -> None:
        """One line that the user should see."""
        self._view.note(message)

    def stage(self, name: str) -> None:
        """What the agent is doing now."""
        self._view.stage(name)

    def called(self, call: Call) -> None:
        """Journal a call."""
        self._journal.append("called", **asdict(call))

    def waited(self, seconds: float) -> None:
        """Count time that is no work on a kernel."""
        self.waited_s += seconds

    def time_left_s(self) -> float:
        """Seconds until the loop has to end."""
        return self._time_left_s()
