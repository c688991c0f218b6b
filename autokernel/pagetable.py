"""Tables of the HTML report, whose headers are buttons that sort them, and the one of all experiments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autokernel.experimentlog import Entry
from autokernel.markup import Markup, joined, tag
from autokernel.records import Decision, Verdict

COMMIT_CHARS = 10

Row = TypeVar("Row")


def _plain(_: object) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """`text` is what a cell shows ("" for unknown); `key`, where given, is the number that it is sorted by.

    `class_` is the cell's class in the style sheet.
    """

    title: str
    text: Callable[[Row], str]
    key: Callable[[Row], float | None] | None = None
    class_: Callable[[Row], str | None] = _plain


def sortable(
    columns: Sequence[Column[Row]], rows: Sequence[Row], *, caption: str, label: str, id_: Callable[[Row], str | None]
) -> Markup:
    """The table, in a frame that scrolls by itself. Columns of which nothing is known are left out."""
    shown = [column for column in columns if any(column.text(row) for row in rows)]
    heads = [
        tag(
            "th",
            tag("button", column.title, type="button"),
            scope="col",
            aria_sort="ascending" if column.title == "#" else "none",
            data_kind="number" if column.key else None,
            class_="number" if column.key else None,
        )
        for column in shown
    ]
    table = tag(
        "table",
        tag("thead", tag("tr", *heads)),
        tag("tbody", *(tag("tr", *(_cell(row, column) for column in shown), id=id_(row)) for row in rows)),
        class_="sortable",
        aria_label=caption,
    )
    # No caption element: it would be as wide as the table, and be cut off on a phone.
    above = tag("p", f"{caption} A header sorts by its column.", class_="quiet note")
    return joined(above, tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label))


def _cell(row: Row, column: Column[Row]) -> Markup:
    if column.key is None:
        return tag("td", column.text(row), class_=column.class_(row))
    value, colour = column.key(row), column.class_(row)
    class_ = f"number {colour}" if colour else "number"
    return tag("td", column.text(row), class_=class_, data_key="" if value is None else value)


def number(form: str, value: float | None) -> str:
    """The number in this format; "" when it is unknown."""
    return "" if value is None else format(value, form)


def _latency_us(entry: Entry) -> float | None:
    return entry.experiment.latency_us


def _speedup(entry: Entry) -> float | None:
    return entry.speedup.estimate if entry.speedup else None


def _clocks(entry: Entry) -> str:
    timing = entry.experiment.outcome.timing
    return str(timing.clocks) if timing and timing.clocks else ""


def _verdict(entry: Entry) -> str:
    verdict = entry.experiment.outcome.verdict
    return f"\N{WARNING SIGN} {verdict}" if entry.suspicious else verdict


def _verdict_class(entry: Entry) -> str | None:
    """Slower is no fault: only what is wrong or suspicious has a colour."""
    verdict = entry.experiment.outcome.verdict
    return "warn" if entry.suspicious else None if verdict in (Verdict.PASS, Verdict.SCREENED) else "bad"


def _decision_class(entry: Entry) -> str:
    return "good" if entry.experiment.decision is Decision.KEEP else "quiet"


def _words(_: Entry) -> str:
    return "words"


COLUMNS: tuple[Column[Entry], ...] = (
    Column(title="#", text=lambda e: str(e.experiment.number), key=lambda e: e.experiment.number),
    Column(title="Op", text=lambda e: e.experiment.op),
    Column(title="Verdict", text=_verdict, class_=_verdict_class),
    Column(title="Decision", text=lambda e: e.experiment.decision, class_=_decision_class),
    Column(title="Latency, us", text=lambda e: number(",.1f", _latency_us(e)), key=_latency_us),
    Column(title="Speedup", text=lambda e: str(e.speedup or ""), key=_speedup),
    Column(title="Hypothesis", text=lambda e: e.hypothesis, class_=_words),
    Column(title="Reason", text=lambda e: e.reason, class_=_words),
    Column(title="Agent", text=lambda e: e.experiment.proposal.agent or ""),
    Column(
        title="Tokens",
        text=lambda e: number(",d", e.experiment.proposal.tokens),
        key=lambda e: e.experiment.proposal.tokens,
    ),
    Column(
        title="USD",
        text=lambda e: number(".4f", e.experiment.proposal.cost_usd),
        key=lambda e: e.experiment.proposal.cost_usd,
    ),
    Column(title="Seconds", text=lambda e: number(",.1f", e.experiment.seconds), key=lambda e: e.experiment.seconds),
    Column(title="Clock", text=_clocks),
    Column(title="Commit", text=lambda e: (e.experiment.commit or "")[:COMMIT_CHARS]),
)


def experiments_table(found: Sequence[Entry]) -> Markup:
    """Every experiment, in the order in which they were made."""
    return sortable(
        COLUMNS,
        found,
        caption="Every experiment, kept or not; the speedup is over the incumbent of then.",
        label="Table of all experiments",
        id_=lambda entry: f"experiment-{entry.experiment.number}",
    )
