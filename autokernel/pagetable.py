"""The table of all experiments in the HTML report; its headers are buttons that sort it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autokernel.experimentlog import Entry
from autokernel.markup import Markup, tag
from autokernel.records import Decision

COMMIT_CHARS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """`text` is what a cell shows ("" for unknown); `key`, where given, is the number that it is sorted by."""

    title: str
    text: Callable[[Entry], str]
    key: Callable[[Entry], float | None] | None = None
    class_: str | None = None


def _latency_us(entry: Entry) -> float | None:
    return entry.experiment.latency_us


def _speedup(entry: Entry) -> float | None:
    return entry.speedup.estimate if entry.speedup else None


def _clocks(entry: Entry) -> str:
    timing = entry.experiment.outcome.timing
    return str(timing.clocks) if timing and timing.clocks else ""


def _number(text: str, value: float | None) -> str:
    return "" if value is None else format(value, text)


def _verdict(entry: Entry) -> str:
    verdict = entry.experiment.outcome.verdict
    return f"\N{WARNING SIGN} {verdict}" if entry.suspicious else verdict


COLUMNS = (
    Column(title="#", text=lambda e: str(e.experiment.number), key=lambda e: e.experiment.number),
    Column(title="Op", text=lambda e: e.experiment.op),
    Column(title="Verdict", text=_verdict),
    Column(title="Decision", text=lambda e: e.experiment.decision),
    Column(title="Latency, us", text=lambda e: _number(".1f", _latency_us(e)), key=_latency_us),
    Column(title="Speedup", text=lambda e: str(e.speedup or ""), key=_speedup),
    Column(title="Hypothesis", text=lambda e: e.hypothesis, class_="words"),
    Column(title="Reason", text=lambda e: e.reason, class_="words"),
    Column(title="Agent", text=lambda e: e.experiment.proposal.agent or ""),
    Column(
        title="Tokens",
        text=lambda e: _number("d", e.experiment.proposal.tokens),
        key=lambda e: e.experiment.proposal.tokens,
    ),
    Column(
        title="USD",
        text=lambda e: _number(".4f", e.experiment.proposal.cost_usd),
        key=lambda e: e.experiment.proposal.cost_usd,
    ),
    Column(title="Seconds", text=lambda e: _number(".1f", e.experiment.seconds), key=lambda e: e.experiment.seconds),
    Column(title="Clock", text=_clocks),
    Column(title="Commit", text=lambda e: (e.experiment.commit or "")[:COMMIT_CHARS]),
)


def experiments_table(found: Sequence[Entry]) -> Markup:
    """All experiments in their order, without the columns of which nothing is known."""
    columns = [column for column in COLUMNS if any(column.text(entry) for entry in found)]
    heads = [
        tag(
            "th",
            tag("button", column.title, type="button"),
            scope="col",
            aria_sort="ascending" if column.title == "#" else "none",
            data_kind="number" if column.key else None,
        )
        for column in columns
    ]
    caption = "Every experiment, kept or not. A header sorts by its column."
    table = tag(
        "table",
        tag("caption", caption, class_="quiet"),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *(_row(entry, columns) for entry in found)),
        class_="sortable",
    )
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Table of all experiments")


def _row(entry: Entry, columns: Sequence[Column]) -> Markup:
    return tag("tr", *(_cell(entry, column) for column in columns), id=f"experiment-{entry.experiment.number}")


def _cell(entry: Entry, column: Column) -> Markup:
    colour = column.class_
    if column.title == "Decision":
        colour = "good" if entry.experiment.decision is Decision.KEEP else "bad"
    elif column.title == "Verdict" and entry.suspicious:
        colour = "warn"
    if column.key is None:
        return tag("td", column.text(entry), class_=colour)
    value = column.key(entry)
    return tag("td", column.text(entry), class_="number", data_key="" if value is None else value)
