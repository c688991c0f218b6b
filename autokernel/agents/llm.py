"""The agent that asks a model: prompt -> reply -> proposal, with bounded repairs; which provider it is does not matter.

A reply that is no proposal costs tokens, but no experiment: the model is told what is wrong and asked again, a few
times. Every call is journaled at once, so caps hold across crashes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autokernel.agents import AgentOptions
from autokernel.agents.host import Call
from autokernel.agents.reply import Fault, Idea, Rejected, read_reply
from autokernel.agents.spending import Price, Usage, estimate_tokens, price_of
from autokernel.agents.talk import Client, Failure, Reply
from autokernel.agents.waiting import Waiter
from autokernel.errors import AgentError, ConfigError
from autokernel.history import KernelHistory
from autokernel.keys import redact
from autokernel.prompt import Prompt, build_prompt
from autokernel.records import Proposal

PROMPT_TOKENS = 48_000
LEAST_PROMPT_TOKENS = 1_500
"""A prompt that does not fit is halved until this; then the kernel alone is too long for the model."""

REPAIRS: Mapping[Fault, int] = {Fault.SYNTAX: 1, Fault.REFUSED: 0, Fault.EMPTY: 0}
"""How often a fault is shown to the model before it is asked afresh."""

USUAL_REPAIRS = 2
ROUNDS = 2
"""Conversations per proposal: the first, and one more from the start when its repairs are used up."""

SHOWN_LIMIT = 24_000
"""Characters of a broken file that the model is shown again."""


@dataclass(slots=True)
class _Spent:
    """Of the calls for one proposal; totals are None when no call could be counted. The last prompt and its reply."""

    tokens: int | None = None
    cost_usd: float | None = None
    request: str = ""
    reply: str = ""

    def add(self, tokens: int | None, cost_usd: float | None) -> None:
        if tokens is not None:
            self.tokens = (self.tokens or 0) + tokens
        if cost_usd is not None:
            self.cost_usd = (self.cost_usd or 0.0) + cost_usd


@dataclass(slots=True, kw_only=True)
class LlmAgent:
    """Asks `client`. What it proposes follows from the history and the model; it keeps no conversation."""

    client: Client
    options: AgentOptions
    waiter: Waiter
    price: Price | None
    secrets: tuple[str, ...] = field(default=(), repr=False)
    budget_tokens: int = PROMPT_TOKENS

    @property
    def name(self) -> str:
        """Name of the provider."""
        return self.client.name

    def propose(self, history: KernelHistory) -> Proposal | None:
        """The model's next idea; None when all its replies to this op are unusable.

        Raises: LimitReached, ConfigError, AgentError.
        """
        spent = _Spent()
        faults: list[str] = []
        while len(faults) < ROUNDS:
            answer = self._converse(history, spent)
            if isinstance(answer, Rejected):
                faults.append(f"{answer.fault}: {answer.reason}")
            else:
                return Proposal(
                    hypothesis=redact(answer.hypothesis, self.secrets),
                    kernel_py=redact(answer.kernel_py, self.secrets),
                    tokens=spent.tokens,
                    cost_usd=spent.cost_usd,
                    request=redact(spent.request, self.secrets),
                    reply=redact(spent.reply, self.secrets),
                )
        self.options.host.note(f"{history.op}: {self.name} brought no proposal ({faults[-1]})")
        return None

    def _converse(self, history: KernelHistory, spent: _Spent) -> Idea | Rejected:
        """The first idea of one conversation, or the fault that used up its repairs."""
        seen: dict[Fault, int] = {}
        rejected: Rejected | None = None
        while True:
            reply = self._ask(history, rejected, spent)
            answer = read_reply(reply, history)
            if isinstance(answer, Idea):
                self._account(history.op, "ok", "", reply.usage, spent)
                return answer
            answer = replace(answer, reason=redact(answer.reason, self.secrets))
            self._account(history.op, answer.fault.value, answer.reason, reply.usage, spent)
            seen[answer.fault] = seen.get(answer.fault, 0) + 1
            repairs = min(USUAL_REPAIRS, REPAIRS.get(answer.fault, USUAL_REPAIRS))
            if seen[answer.fault] > repairs or sum(seen.values()) > USUAL_REPAIRS:
                return answer
            rejected = answer
            self.options.host.stage(f"{history.op}: {self.name} is asked again ({answer.fault})")

    def _ask(self, history: KernelHistory, rejected: Rejected | None, spent: _Spent) -> Reply:
        """One reply, with a shorter prompt where the whole one does not fit."""
        while True:
            prompt = self._prompt(history, rejected)
            try:
                return self.waiter.ask(functools.partial(self._call, history.op, prompt, spent))
            except Failure as failure:  # too long: all others are dealt with in the waiter
                if self.budget_tokens <= LEAST_PROMPT_TOKENS:
                    raise AgentError(str(failure), hint="choose a --model with a larger context") from None
                size = min(self.budget_tokens, estimate_tokens(prompt.system, prompt.user))
                self.budget_tokens = max(LEAST_PROMPT_TOKENS, size // 2)
                self.options.host.note(f"{failure}; going on with prompts of {self.budget_tokens:,} tokens")

    def _call(self, op: str, prompt: Prompt, spent: _Spent) -> Reply:
        """One call, if the caps allow it. Its failures are journaled here, its replies when they have been read."""
        room = self.options.ledger.allowance(estimate_tokens(prompt.system, prompt.user), self.price)
        try:
            reply = self.client.ask(prompt, room)
        except Failure as failure:
            usage = failure.usage if failure.usage.total else None
            self._account(op, failure.kind.value, str(failure), usage, spent)
            raise
        spent.request = f"{prompt.system}\n\n{prompt.user}"
        spent.reply = "\n\n".join(part for part in (reply.text, reply.tool_input) if part)
        return reply

    def _prompt(self, history: KernelHistory, rejected: Rejected | None) -> Prompt:
        try:
            prompt = build_prompt(history, self.options.context(history), budget_tokens=self.budget_tokens)
        except ConfigError as error:
            raise AgentError(str(error), hint="choose a --model with a larger context") from None
        if rejected is None:
            return prompt
        said = f"\n\nYour last reply could not be used ({rejected.fault}): {rejected.reason}\n"
        if rejected.text and len(rejected.text) <= SHOWN_LIMIT and rejected.fault is Fault.SYNTAX:
            said += f"It was:\n\n{rejected.text}\n\n"
        return replace(prompt, user=f"{prompt.user}{said}Reply again, with a proposal that can be judged.")

    def _account(self, op: str, outcome: str, reason: str, usage: Usage | None, spent: _Spent) -> None:
        tokens = cost = None
        if usage is not None:
            tokens, cost = usage.total, self.options.ledger.charge(usage, self.price)
        spent.add(tokens, cost)
        self.options.host.called(
            Call(
                op=op,
                agent=self.name,
                model=self.client.model,
                outcome=outcome,
                reason=reason,
                tokens=tokens,
                cost_usd=cost,
            )
        )


def llm_agent(client: Client, options: AgentOptions, *, free: bool = False) -> LlmAgent:
    """The agent for a client; says once when the price of its model is unknown.

    Raises: ConfigError when a cap could not be kept.
    """
    price = None if free else price_of(client.model)
    if not free and (note := options.ledger.check_enforceable(client.model, price)):
        options.host.note(note)
    secrets = tuple(options.keys.values())
    return LlmAgent(client=client, options=options, waiter=Waiter(host=options.host), price=price, secrets=secrets)
