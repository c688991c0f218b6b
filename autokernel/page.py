"""The report of a run as one HTML file: nothing is loaded from anywhere, and everything that was written is escaped.

It is built from `autokernel.report` and the run's own state, as the text and the Markdown report are. Its content
security policy lets no script run but the one that sorts the table, whatever a hypothesis contains.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autokernel.experimentlog import Entry, entries
from autokernel.markup import Markup, joined, tag
from autokernel.modelnumbers import against_compile, against_eager, standing
from autokernel.pagekernel import change, definitions, kernel_article, kernels_table
from autokernel.pagetable import experiments_table
from autokernel.records import Interval
from autokernel.report import Report, facts, sections, surroundings
from autokernel.roofline import Ceilings
from autokernel.spent import spent_lines
from autokernel.state import RunState

_HERE = Path(__file__)


def render_page(report: Report, state: RunState) -> str:
    """The whole file. `report` is that of the same state."""
    found = entries(state)
    title = f"autokernel report: run {report.run}"
    parts = {
        "Whole model": [_whole_model(report)],
        "Kernels": _kernels(report, state, found),
        "Experiments": _experiments(found),
        "Time, tokens and cost": [definitions(_named(spent_lines(state, found)))],
        "Environment": [definitions(surroundings(report))],
        "Reproduce": [_commands(report)],
    }
    content = tag(
        "main",
        tag("h1", title),
        definitions(_named(facts(report))),
        _contents(parts),
        *(tag("section", tag("h2", name), *children, id=_anchor(name)) for name, children in parts.items()),
    )
    return f"<!doctype html>\n{tag('html', _head(title), tag('body', content, _script()), lang='en')}\n"


def _anchor(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


def _contents(titles: Iterable[str]) -> Markup:
    links = [tag("a", title, href=f"#{_anchor(title)}") for title in titles]
    return tag("nav", *links, aria_label="Contents")


def _named(lines: Sequence[str]) -> dict[str, str]:
    """Lines like `name: text` by their names."""
    return {name.capitalize(): text for name, _, text in (line.partition(": ") for line in lines)}


def _head(title: str) -> Markup:
    style, script = _digest(_asset(".css")), _digest(_asset(".js"))
    policy = f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(_asset(".css"))),
    )


def _script() -> Markup:
    return tag("script", Markup(_asset(".js")))


def _asset(suffix: str) -> str:
    """page.css or page.js, which lie beside this module."""
    return _HERE.with_suffix(suffix).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _list(lines: Sequence[str]) -> Markup:
    return tag("ul", *(tag("li", line) for line in lines))


def _lines_of(report: Report, title: str) -> tuple[str, ...]:
    return next(section.lines for section in sections(report) if section.title == title)


def _whole_model(report: Report) -> Markup:
    integration, lines = report.integration, _lines_of(report, "Whole model")
    measured = integration and integration.get("speedup_over_compile")
    how = "measured in turns" if measured else "both measured against eager"
    compiled = _card(against_compile(integration), "against torch.compile", how)
    cards = [compiled or _unmeasured(integration)]
    if integration and (eager := against_eager(integration)):
        before, after = integration["eager_us"] / 1e3, integration["optimized_us"] / 1e3
        took = f"{before:.2f} \N{RIGHTWARDS ARROW} {after:.2f} ms per forward, measured in turns"
        cards.insert(0, _card(eager, "against eager", took))
        lines = lines[1:]  # the first says the same
    # That a kernel is used, its own article tells.
    used = [f"{op}: used" for op in integration["used"]] if integration else []
    lines = tuple(line for line in lines if not line.startswith(tuple(used)))
    shown = [card for card in cards if card]
    return joined(*([tag("div", *shown, class_="cards")] if shown else []), _list(lines))


def _unmeasured(integration: Mapping[str, Any] | None) -> Markup | None:
    """The card of torch.compile where only eager was measured."""
    if against_eager(integration) is None:
        return None
    return tag(
        "div",
        tag("b", "not measured", class_="quiet"),
        tag("span", "against torch.compile"),
        class_="card",
    )


def _card(speedup: Interval | None, against: str, how: str) -> Markup | None:
    if speedup is None:
        return None
    verdict = standing(speedup)
    colour = {"faster": "good", "SLOWER": "bad"}.get(verdict, "quiet")
    return tag(
        "div",
        tag("b", f"{speedup.estimate:.3f}x", class_=colour),
        tag("span", f"{against}: {verdict}"),
        tag("p", f"95 % interval {speedup.low:.3f} to {speedup.high:.3f}; {how}", class_="quiet"),
        class_="card",
    )


def _kernels(report: Report, state: RunState, found: Sequence[Entry]) -> list[Markup]:
    if not report.kernels:
        return [tag("p", "None was started.")]
    ceilings = Ceilings.from_json(state.plan["ceilings"]) if state.plan else None
    articles = [
        kernel_article(
            report,
            kernel,
            state.histories[kernel.op],
            [entry for entry in found if entry.experiment.op == kernel.op],
            ceilings,
        )
        for kernel in report.kernels
    ]
    return [kernels_table(report), *articles]


def _experiments(found: Sequence[Entry]) -> list[Markup]:
    if not found:
        return [tag("p", "There was none.")]
    suspicious = [change(entry) for entry in found if entry.suspicious]
    if not suspicious:
        return [tag("p", "None was suspicious.", class_="quiet"), experiments_table(found)]
    warning = tag("p", "Look at these: they did not do the op's work themselves, or tried more than that.")
    return [tag("div", warning, *suspicious, class_="card"), experiments_table(found)]


def _commands(report: Report) -> Markup:
    """Text that scrolls by itself, with the keyboard as well."""
    label, text = "Commands that reproduce the numbers", "\n".join(_lines_of(report, "Reproduce"))
    return tag("pre", text, tabindex="0", role="region", aria_label=label)
