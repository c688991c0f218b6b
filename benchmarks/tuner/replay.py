"""Replay searches on recorded tables and compare what they cost.

    python benchmarks/tuner/replay.py --out DIR                                  # every arm whose package is installed
    python benchmarks/tuner/replay.py --out DIR --arms lfbo,pattern,random --seeds 100
    python benchmarks/tuner/replay.py --out DIR --half dev --arms ...            # to choose settings; then --half test

Runs are kept in DIR/runs.jsonl and not run twice: another call with more seeds or arms goes on from there. Written are
DIR/replay.md, DIR/replay.json and, where matplotlib is installed, the plots.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from arms import ARMS
from pictures import draw
from scoring import Score, half_of, score
from simulated import Session
from summary import markdown, summarize
from tables import TABLES, Table, read_table


def replay(tables: Sequence[Table], arms: Sequence[str], seeds: int, log: Path) -> list[Score]:
    """Scores of all runs, those in `log` and new ones, which are added to it."""
    scores = read_scores(log)
    done = {(one.table, one.arm, one.seed) for one in scores}
    for arm in arms:
        for table in tables:
            begin = time.monotonic()
            fresh = [seed for seed in range(seeds) if (table.name, arm, seed) not in done]
            new = [_run(table, arm, seed) for seed in fresh]
            with log.open("a") as file:
                file.writelines(json.dumps(asdict(one)) + "\n" for one in new)
            scores += new
            if new:
                print(f"{arm} on {table.name}: {len(new)} runs, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return scores


def _run(table: Table, arm: str, seed: int) -> Score:
    session = Session(table=table, seed=seed)
    begin = time.perf_counter()
    ARMS[arm].run(session)
    return score(session, arm, time.perf_counter() - begin)


def read_scores(log: Path) -> list[Score]:
    """The runs in a log; none when there is no such file."""
    if not log.exists():
        return []
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [Score(**{**row, "regret": tuple(row["regret"])}) for row in rows]


def installed(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The arms that can be run, and why the others cannot."""
    found, missing = [], {}
    for name in names:
        package = ARMS[name].package
        if package and importlib.util.find_spec(package) is None:
            missing[name] = f"{package} is not installed"
        else:
            found.append(name)
    return found, missing


def main() -> None:
    """Read the command line, replay, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of recorded tables")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", help=f"separated by semicolons: {'; '.join(ARMS)}")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--report", action="store_true", help="run nothing: report on the runs that are kept")
    parser.add_argument("--half", choices=("dev", "test", "all"), default="all")
    parser.add_argument("--device", default="cuda", help="tables of this device alone: cuda or cpu")
    args = parser.parse_args()
    tables = [read_table(path) for path in sorted(args.tables.glob("*.json.gz"))]
    tables = [table for table in tables if (table.device == "cpu") == (args.device == "cpu")]
    tables = [table for table in tables if args.half in ("all", half_of(table))]
    if not tables:
        sys.exit(f"error: no tables of a {args.device} device in {args.tables}; record.py makes them")
    names = [name.strip() for name in args.arms.split(";")] if args.arms else list(ARMS)
    if unknown := [name for name in names if name not in ARMS]:
        sys.exit(f"error: no arm is called {', '.join(unknown)}; there are {'; '.join(ARMS)}")
    arms, missing = installed(names)
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "runs.jsonl"
    scores = replay([] if args.report else tables, arms, args.seeds, log)
    wanted = {table.name for table in tables}
    scores = [one for one in scores if one.table in wanted and one.arm in arms and one.seed < args.seeds]
    found = summarize(tables, scores, arms, missing)
    (args.out / "replay.json").write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(found)
    (args.out / "replay.md").write_text(text)
    draw(args.out, tables, scores, arms)
    print(text)


if __name__ == "__main__":
    main()
