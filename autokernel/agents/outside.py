"""The agent that is somebody else: a coding agent or a person who hands kernels in by `autokernel submit` or over MCP.

Asked for an idea it gives what was handed in, once; asked again it has to wait, which ends the turn of the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from autokernel.agents import Agent, AgentOptions
from autokernel.agents.host import LimitReached
from autokernel.agents.reply import fault_of
from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.records import Proposal

NAME = "outside"
WAITING = "nothing more was handed in from outside"


@dataclass(slots=True, kw_only=True)
class OutsideAgent:
    """`handed_in` waits to be judged; `asked` is the history that it was last asked about."""

    options: AgentOptions
    name: str = NAME
    handed_in: Proposal | None = None
    asked: KernelHistory | None = None

    def propose(self, history: KernelHistory) -> Proposal | None:
        """What was handed in.

        Raises: LimitReached when that was given already; ConfigError for a file that is no experiment, such as one
        that was judged before.
        """
        self.asked = history
        proposal, self.handed_in = self.handed_in, None
        if proposal is None:
            raise LimitReached(WAITING)
        if fault := fault_of(proposal.kernel_py, history):
            raise ConfigError(f"{history.op}: {fault.reason}", hint="nothing was judged; change the file and submit it")
        return proposal


def build(options: AgentOptions) -> Agent:
    """The agent of a driven run. Raises: ConfigError when an argument is given, as it takes none."""
    if options.argument:
        raise ConfigError(f"the outside agent takes no argument, got {options.argument!r}", hint="autokernel next")
    return OutsideAgent(options=options)
