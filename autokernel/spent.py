"""What a run took: time, tokens and money, in all and for each kept experiment, as far as it is known; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from autokernel.experimentlog import Entry
from autokernel.state import RunState


def spent_lines(state: RunState, found: Sequence[Entry]) -> list[str]:
    """A line each for time, tokens and cost. Calls that brought no proposal count, too."""
    kept = sum(entry.kept for entry in found)
    seconds = sum(entry.experiment.seconds for entry in found)
    tokens = state.tokens or sum(entry.experiment.proposal.tokens or 0 for entry in found)
    cost_usd = state.cost_usd or sum(entry.experiment.proposal.cost_usd or 0.0 for entry in found)
    lines = [f"experiments: {seconds / 60:.1f} min" + (f", {seconds / 60 / kept:.1f} min per kept one" if kept else "")]
    lines.append(f"tokens: {tokens}" + _each(f"{tokens / kept:.0f}" if kept else "") if tokens else "tokens: none known")
    if cost_usd:
        lines.append(f"cost: {cost_usd:.4f} USD" + _each(f"{cost_usd / kept:.4f} USD" if kept else ""))
    else:
        lines.append("cost: none known")
    return lines


def _each(amount: str) -> str:
    return f", {amount} per kept experiment" if amount else ", and nothing was kept"
