"""How fast the loop is: seconds per experiment by verdict, and what it costs outside the judge's processes.

    python benchmarks/loop_speed.py [RUN]        # after: autokernel run examples/llama.py --minutes 5

Reads the journal of a finished run in this directory (the newest by default) and prints a Markdown table. The overhead
of an experiment is the time from the event before its proposal to its last journal line, less what the judge took.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from autokernel.journal import Event, Journal
from autokernel.rundir import find_run

HELP_RUNS = 5


def experiments(events: list[Event]) -> Iterator[tuple[str, float, float]]:
    """(verdict, seconds in the judge, seconds outside) of each experiment that was recorded."""
    start, verdict, judged_s = 0.0, "", 0.0
    for before, event in itertools.pairwise(events):
        if event.kind == "proposed":
            start = stamp(before)
        elif event.kind == "judged":
            verdict, judged_s = event.fields["outcome"]["verdict"], event.fields["outcome"]["seconds"]
        elif event.kind == "recorded":
            yield verdict, judged_s, stamp(event) - start - judged_s


def stamp(event: Event) -> float:
    """Seconds since the epoch at which the event was written."""
    return datetime.fromisoformat(event.time_utc).timestamp()


def help_s() -> float:
    """Median seconds of `autokernel --help`."""
    seconds = []
    for _ in range(HELP_RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "autokernel", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Print the table."""
    run = find_run(Path.cwd(), sys.argv[1] if len(sys.argv) > 1 else None)
    found = list(experiments(Journal(run.journal_path).events()))
    if not found:
        sys.exit(f"error: run {run.name} has no experiments")
    print("| verdict | experiments | median s in the judge | slowest s |\n| --- | --- | --- | --- |")
    for verdict in sorted({verdict for verdict, _, _ in found}):
        seconds = [judged_s for other, judged_s, _ in found if other == verdict]
        print(f"| {verdict} | {len(seconds)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")
    outside, inside = sum(item[2] for item in found), sum(item[1] for item in found)
    print(f"\nOutside the judge's processes: {outside / (outside + inside):.1%} of the experiments' time.")
    print(f"`autokernel --help`: {help_s():.2f} s.")


if __name__ == "__main__":
    main()
