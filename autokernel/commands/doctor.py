"""`autokernel doctor`: a table of what is here and what is missing, with the command that mends it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from autokernel.doctor import Check

CANNOT_RUN = 3


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure bandwidth and GEMM rates, beside what is published.")
    ] = False,
) -> None:
    """Check compiler, git, torch, GPU, keys and sandbox. Exits 0 if the main job can run, else 3."""
    from autokernel.doctor import can_run, examine

    if calibrate:
        _calibrate(as_json)
        return
    checks = examine(Path.cwd(), os.environ)
    able = can_run(checks)
    if as_json:
        print(json.dumps({"can_run": able, "checks": [asdict(check) for check in checks]}))
    else:
        _show(checks, able)
    raise typer.Exit(0 if able else CANNOT_RUN)


def _calibrate(as_json: bool) -> None:
    """Measure the ceilings that a run's roofline uses; every run does so at its start."""
    from autokernel.backends import present_device
    from autokernel.ceilings import measure_ceilings, published

    device = present_device()
    measured, known = measure_ceilings(device), published(device)
    if as_json:
        print(json.dumps({"measured": measured.to_json(), "published": asdict(known) if known else None}))
        return
    how = "" if known is None else "estimated" if known.estimated else "published"
    print(f"{measured.device}" + (f" ({known.name}, {how} limits: {known.source})" if known else ""))
    rows = [("copy", measured.copy_gbps, "GB/s", known.bandwidth_gbps if known else None)]
    peaks = known.peak_tflops if known else {}
    rows += [(f"GEMM {dtype}", rate, "TFLOP/s", peaks.get(dtype)) for dtype, rate in measured.gemm_tflops.items()]
    for name, rate, unit, peak in rows:
        share = f"  {rate / peak:5.0%} of {how} {peak:.0f}" if peak else ""
        print(f"  {name:<10} {rate:8.1f} {unit}{share}")
    print(f"  {'launch':<10} {measured.launch_us:8.1f} us" if measured.launch_us else "")


def _show(checks: list[Check], able: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colors = {"ok": "green", "warn": "yellow", "missing": "dim"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for width in (max(len(check.name) for check in checks), max(len(status) for status in colors), None):
        table.add_column(min_width=width, overflow="fold")
    for check in checks:
        broken = check.needed and check.status == "missing"
        style = "bold red" if broken else colors[check.status]
        table.add_row(check.name, Text(check.status, style=style), Text(check.detail))
        if check.fix:
            table.add_row("", "", Text(f"-> {check.fix}", style="bold" if broken else "cyan"))
    Console().print(table)
    verdict = "the main job can run here" if able else "the main job cannot run: mend what is missing first"
    print(f"\n{verdict}")
