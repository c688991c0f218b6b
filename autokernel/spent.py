"""What a run took: time, tokens and money, in all and for each kept experiment, as far as it is known; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from autokernel.experimentlog import Entry
from autokernel.state import RunState


def spent_lines(state: RunState, found: Sequence[Entry]) -> list[str]:
    """A line each for time, tokens and cost. Calls that brought no proposal count, too."""
    kept = sum(entry.kept for entry in found)
    minutes = sum(entry.experiment.seconds for entry in found) / 60
    tokens = state.tokens or sum(entry.experiment.proposal.tokens or 0 for entry in found)
    cost_usd = state.cost_usd or sum(entry.experiment.proposal.cost_usd or 0.0 for entry in found)
    return [
        _line("experiments", minutes, kept, ".1f", " min"),
        _line("tokens", tokens, kept, ".0f", ""),
        _line("cost", cost_usd, kept, ".4f", " USD"),
    ]


def _line(name: str, amount: float, kept: int, form: str, unit: str) -> str:
    if not amount:
        return f"{name}: none known"
    each = f"{amount / kept:{form}}{unit} per kept experiment" if kept else "and nothing was kept"
    return f"{name}: {amount:{form}}{unit}, {each}"
