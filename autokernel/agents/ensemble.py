"""`--agent ensemble:anthropic,search`: several agents by turns; those whose proposals are kept get more of them.

Whose turn it is follows from the history alone, as each proposal names its agent: a resumed run goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autokernel.agents import Agent, AgentOptions, build_agent
from autokernel.agents.host import Host, LimitReached
from autokernel.errors import AgentError, ConfigError
from autokernel.history import KernelHistory
from autokernel.records import Decision, Proposal

HINT = "use --agent ensemble:anthropic,search, with two agents or more"


@dataclass(slots=True, kw_only=True)
class EnsembleAgent:
    """Members by name; one that cannot go on is left out for the rest of the run."""

    members: Mapping[str, Agent]
    host: Host
    name: str = "ensemble"
    out: dict[str, Exception] = field(default_factory=dict)

    def propose(self, history: KernelHistory) -> Proposal | None:
        """The proposal of the member whose turn it is, or of the next one that has any.

        Raises: what the last member that could not go on raised, once none is left.
        """
        for name in turns(tuple(self.members), history):
            if name in self.out:
                continue
            try:
                proposal = self.members[name].propose(history)
            except (LimitReached, ConfigError) as error:
                self.out[name] = error
                self.host.note(f"{name} is out for the rest of the run: {error}")
            except AgentError as error:  # of this op and kernel: the others can still change it
                self.host.note(f"{name} has no proposal: {error}")
                if len(self.members) == len(self.out) + 1:
                    raise
            else:
                if proposal is not None:
                    return replace(proposal, agent=name)
        if len(self.out) == len(self.members):
            raise next(reversed(self.out.values()))
        return None


def turns(names: Sequence[str], history: KernelHistory) -> list[str]:
    """The members in the order in which they are asked: by (kept + 1) / (tried + 1), then the less tried first."""
    tried: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for experiment in history.experiments:
        name = experiment.proposal.agent or ""
        tried[name] += 1
        kept[name] += experiment.decision is Decision.KEEP
    return sorted(names, key=lambda name: (-(kept[name] + 1) / (tried[name] + 1), tried[name]))


def build(options: AgentOptions) -> Agent:
    """The agent for `--agent ensemble:a,b`; each member may have an argument of its own after a colon.

    Raises: ConfigError for fewer than two members, one that is named twice, or one that cannot be built.
    """
    choices = [part.strip() for part in options.argument.split(",") if part.strip()]
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise ConfigError(f"--agent ensemble:{options.argument} names {choices or 'nobody'}", hint=HINT)
    members: dict[str, Agent] = {}
    for choice in choices:
        name, _, argument = choice.partition(":")
        if name == "ensemble":
            raise ConfigError("an ensemble cannot be a member of an ensemble", hint=HINT)
        members[choice] = build_agent(name, replace(options, argument=argument))
    return EnsembleAgent(members=members, host=options.host)
