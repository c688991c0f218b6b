"""The comparison as one JSON object, and that as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from arms import ARMS, OURS
from scoring import NEAR, NEARER, REGRETS, Score, by_table, good_cells, half_of, random_check, ratio_of
from simulated import BUDGET, Session
from tables import Table

COSTS = {
    "evaluations_5": "evaluations to 5 %",
    "evaluations_1": "evaluations to 1 %",
    "seconds_5": "seconds to 5 %",
    "seconds_1": "seconds to 1 %",
}


def summarize(
    tables: Sequence[Table], scores: Sequence[Score], arms: Sequence[str], missing: Mapping[str, str]
) -> dict[str, Any]:
    """Everything that is reported; `halves` has the pooled arms of each half for which there are tables."""
    halves = {"all": [table.name for table in tables]}
    for half in ("dev", "test"):
        if names := [table.name for table in tables if half_of(table) == half]:
            halves[half] = names
    return {
        "budget": BUDGET,
        "tables": [_table(table) for table in tables],
        "not_run": dict(missing),
        "random": [random_check(scores, table) for table in tables] if "random" in arms else [],
        "halves": {half: _pooled(scores, arms, names) for half, names in halves.items()},
        "by_table": {table.name: _means(scores, arms, table.name) for table in tables},
    }


def _table(table: Table) -> dict[str, Any]:
    session = Session(table=table, seed=0)
    default = table.space.locate(table.default)
    ranked = sorted(session.truth.values())
    own = session.truth.get(default) if default is not None else None
    statuses = [cell.status for cell in table.cells]
    return {
        "name": table.name,
        "half": half_of(table),
        "device": table.device,
        "dtype": table.dtype,
        "shapes": table.shapes,
        "cells": len(table.cells),
        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
        "spilling": sum(bool(cell.stack_bytes) for cell in table.cells),
        "binaries": len({cell.digest for cell in table.cells if cell.digest}),
        "best_us": ranked[0],
        "median_us": statistics.median(ranked),
        "default_over_best": own / ranked[0] if own is not None else None,
        "within_5": good_cells(table, NEAR),
        "within_1": good_cells(table, NEARER),
        "noise": statistics.median(max(cell.us) / min(cell.us) - 1 for cell in table.cells if cell.us),
        "compile_s": statistics.mean(cell.compile_s for cell in table.cells),
        "timing_s": statistics.mean(cell.timing_s for cell in table.cells),
    }


def _pooled(scores: Sequence[Score], arms: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    found = {}
    here = [one for one in scores if one.table in names]
    for arm in arms:
        mine = [one for one in here if one.arm == arm]
        if not mine:
            continue
        entry: dict[str, Any] = {"seeds": len({one.seed for one in mine}), "tables": len({one.table for one in mine})}
        for cost in COSTS:
            values = by_table(here, arm, cost)
            entry[cost] = statistics.geometric_mean(statistics.mean(row) for row in values.values())
            if OURS in arms and arm != OURS:
                entry[f"{cost}_ratio"] = asdict(ratio_of(values, by_table(here, OURS, cost)))
        entry |= {f"regret_{at}": _typical([one.regret[at - 1] for one in mine]) for at in REGRETS}
        entry["reached_5"] = statistics.mean(one.reached_5 for one in mine)
        entry["reached_1"] = statistics.mean(one.reached_1 for one in mine)
        entry["failures"] = statistics.mean(one.failures / max(1, min(one.evaluations, 64)) for one in mine)
        entry["thinking_s"] = statistics.mean(one.thinking_s for one in mine)
        found[arm] = entry
    return found


def _typical(regrets: Sequence[float]) -> float:
    """The mean where all are finite, else the median."""
    return statistics.mean(regrets) if max(regrets) < float("inf") else statistics.median(regrets)


def _means(scores: Sequence[Score], arms: Sequence[str], table: str) -> dict[str, dict[str, float]]:
    found = {}
    for arm in arms:
        mine = [one for one in scores if one.arm == arm and one.table == table]
        if mine:
            found[arm] = {cost: statistics.mean(getattr(one, cost) for one in mine) for cost in COSTS}
    return found


def markdown(found: Mapping[str, Any]) -> str:
    """The whole report."""
    lines = ["## Tables", "", *_tables(found["tables"]), ""]
    if found["random"]:
        lines += ["## Random search against its exact expectation", "", *_random(found["random"]), ""]
    for half, arms in found["halves"].items():
        lines += [f"## Arms, {half} tables", "", *_arms(arms), ""]
    for cost in ("evaluations_5", "seconds_5"):
        lines += [f"## Mean {COSTS[cost]} by table", "", *_by_table(found["by_table"], cost), ""]
    lines += [f"- {arm}: not run, {why}" for arm, why in found["not_run"].items()]
    return "\n".join(lines).rstrip() + "\n"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns but the first are numbers."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _tables(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["table", "half", "cells", "fail", "spill", "binaries", "best us", "median us", "default / best", "in 5 %",
            "in 1 %", "noise", "compile s", "timing s"]  # fmt: skip
    rows = []
    for one in tables:
        failed = one["cells"] - one["statuses"].get("OK", 0)
        default = f"{one['default_over_best']:.2f}" if one["default_over_best"] else "fails"
        rows.append(
            [one["name"], one["half"], *(str(n) for n in (one["cells"], failed, one["spilling"], one["binaries"])),
             f"{one['best_us']:.1f}", f"{one['median_us']:.1f}", default, str(one["within_5"]), str(one["within_1"]),
             f"{one['noise']:.1%}", f"{one['compile_s']:.2f}", f"{one['timing_s']:.3f}"]
        )  # fmt: skip
    return grid(head, rows)


def _random(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["table", "(N + 1) / (g + 1)", "expected within the budget", "mean of the runs", "standard errors apart"]
    return grid(
        head,
        [
            [one["table"], *(f"{one[key]:.2f}" for key in ("unrestricted", "expected", "mean", "errors_apart"))]
            for one in checks
        ],
    )


def _arms(arms: Mapping[str, Any]) -> list[str]:
    head = ["arm", "seeds", *(f"{name} (x ours)" for name in COSTS.values()),
            *(f"regret at {at}" for at in REGRETS), "in 5 %", "in 1 %", "failures", "own s"]  # fmt: skip
    order = sorted(arms, key=lambda arm: (ARMS[arm].ablation, arms[arm]["evaluations_5"]))
    rows = []
    for arm in order:
        one = arms[arm]
        cells = [arm, str(one["seeds"])]
        for cost in COSTS:
            ratio = one.get(f"{cost}_ratio")
            beside = f" ({ratio['estimate']:.2f}: {ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else ""
            cells.append(f"{one[cost]:.1f}{beside}")
        cells += [f"{one[f'regret_{at}']:.1%}" for at in REGRETS]
        cells += [f"{one[key]:.0%}" for key in ("reached_5", "reached_1", "failures")]
        rows.append([*cells, f"{one['thinking_s']:.1f}"])
    return grid(head, rows)


def _by_table(tables: Mapping[str, Mapping[str, Mapping[str, float]]], cost: str) -> list[str]:
    arms = list(dict.fromkeys(arm for entry in tables.values() for arm in entry))
    rows = [[arm, *(f"{entry[arm][cost]:.1f}" if arm in entry else "-" for entry in tables.values())] for arm in arms]
    return grid(["arm", *tables], rows)
