"""The report of a run as one HTML file: nothing is loaded from anywhere, and everything that was written is escaped.

It is built from `autokernel.report` and the run's own state, as the text and the Markdown report are. Its content
security policy lets no script run but the one that sorts the table, whatever a hypothesis contains.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from autokernel import kernelplots
from autokernel.experimentlog import Entry, entries
from autokernel.history import KernelHistory
from autokernel.markup import Markup, escaped, joined, tag
from autokernel.modelnumbers import against_compile, against_eager, standing
from autokernel.pagetable import experiments_table
from autokernel.records import Interval
from autokernel.report import KernelReport, Report, facts, judge_command, kernel_lines, sections
from autokernel.roofline import Ceilings
from autokernel.spent import spent_lines
from autokernel.state import RunState

WHOLE_MODEL = "Whole model"
_HERE = Path(__file__)

LEGEND = (
    "Filled circle: kept. Cross: rejected. Triangle: not timed (wrong, crashed, timed out). Hollow diamond: suspicious "
    "(TAMPER, DELEGATES). The line is the incumbent."
)
ROOFLINE_LEGEND = "Filled circle: best kernel. Filled square: starter. Hollow square: PyTorch's fastest way."


def render_page(report: Report, state: RunState) -> str:
    """The whole file. `report` is that of the same state."""
    found = entries(state)
    title = f"autokernel report: run {report.run}"
    content = tag(
        "main",
        tag("h1", title),
        _list(facts(report)),
        _whole_model(report),
        _kernels(report, state, found),
        _experiments(found),
        _section("Time, tokens and cost", _list(spent_lines(state, found))),
        *(_other(report, name) for name in ("Environment", "Reproduce")),
    )
    return f"<!doctype html>\n{tag('html', _head(title), tag('body', content, _script()), lang='en')}\n"


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


def _section(title: str, *children: str) -> Markup:
    return tag("section", tag("h2", title), *children)


def _list(lines: Sequence[str]) -> Markup:
    return tag("ul", *(tag("li", line) for line in lines))


def _whole_model(report: Report) -> Markup:
    lines = next(section.lines for section in sections(report) if section.title == WHOLE_MODEL)
    measured = report.integration and report.integration.get("speedup_over_compile")
    how = "measured alternately" if measured else "both measured against eager"
    cards = [
        _card(against_eager(report.integration), "against eager", "measured alternately"),
        _card(against_compile(report.integration), "against torch.compile", how),
    ]
    return _section(WHOLE_MODEL, tag("div", *(card for card in cards if card), class_="cards"), _list(lines))


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


def _kernels(report: Report, state: RunState, found: Sequence[Entry]) -> Markup:
    ceilings = Ceilings.from_json(state.plan["ceilings"]) if state.plan else None
    articles = [
        _kernel(
            report,
            kernel,
            state.histories[kernel.op],
            [entry for entry in found if entry.experiment.op == kernel.op],
            ceilings,
        )
        for kernel in report.kernels
    ]
    title = next(section.title for section in sections(report) if section.title.startswith("Kernels"))
    return _section(title, *(articles or [tag("p", "none was started")]))


def _kernel(
    report: Report, kernel: KernelReport, history: KernelHistory, found: Sequence[Entry], ceilings: Ceilings | None
) -> Markup:
    heading, *lines = (line.strip() for line in kernel_lines(kernel))
    plots = [_figure(kernelplots.shares(kernel, history), "")]
    if (roof := kernelplots.roofline(kernel, history, ceilings)) is not None:
        plots.append(_figure(roof, ROOFLINE_LEGEND))
    if found:
        plots.insert(0, _figure(kernelplots.progress(kernel, history, found), LEGEND))
    kept = [_kept(entry) for entry in found if entry.kept]
    return tag(
        "article",
        tag("h3", heading),
        _list([f"one forward's calls: {history.cases}, on {history.device}", *lines]),
        tag("div", *plots, class_="plots"),
        *(kept or [tag("p", "Nothing was kept: the starter is the best kernel.", class_="quiet")]),
        tag("p", "Judge it again: ", tag("code", judge_command(report, kernel.op)), class_="quiet"),
        id=f"kernel-{kernel.op}",
    )


def _figure(plot: Markup, caption: str) -> Markup:
    return tag("figure", plot, *([tag("figcaption", caption)] if caption else []))


def _kept(entry: Entry) -> Markup:
    number = entry.experiment.number
    lines = [tag("span", f"{line}\n", class_=_diff_class(line)) for line in entry.diff()]
    return tag(
        "details",
        tag("summary", kernelplots.summary_of(entry)),
        tag("p", entry.reason),
        tag(
            "pre",
            *(lines or [escaped("the same text")]),
            tabindex="0",
            role="region",
            aria_label=f"Diff of experiment {number}",
        ),
        tag("p", tag("code", f"autokernel show {number}"), class_="quiet"),
    )


def _diff_class(line: str) -> str | None:
    return {"+": "add", "-": "del", "@": "at"}.get(line[:1])


def _experiments(found: Sequence[Entry]) -> Markup:
    suspicious = [kernelplots.summary_of(entry) for entry in found if entry.suspicious]
    warning = [tag("p", "Look at these: they did not do the op's work themselves, or tried more than that.")]
    told = joined(*warning, _list(suspicious)) if suspicious else tag("p", "None was suspicious.", class_="quiet")
    if not found:
        return _section("Experiments", tag("p", "There was none."))
    return _section(f"Experiments ({len(found)})", told, experiments_table(found))


def _other(report: Report, title: str) -> Markup:
    section = next(section for section in sections(report) if section.title == title)
    if not section.commands:
        return _section(title, _list(section.lines))
    done = sum(kernel.experiments for kernel in report.kernels)
    whole = f"autokernel run --resume {report.run} --experiments {done}" if done else ""
    lines = [*([f"{whole}   # the whole model again"] if whole and report.integration else []), *section.lines]
    return _section(title, _pre("Commands that reproduce the numbers", "\n".join(lines)))


def _pre(label: str, *children: str) -> Markup:
    """Text that scrolls by itself, with the keyboard as well."""
    return tag("pre", *children, tabindex="0", role="region", aria_label=label)
