"""How long the judge needs for a kernel text that it has never seen, by op and backend.

    python benchmarks/judge_speed.py --backends triton,cuda --out results/
    python benchmarks/judge_speed.py --ops rmsnorm,matmul --user-case --repeats 3

A text is the starter with another number in a comment, so that nothing is compiled for it. Columns, in seconds:

- stages: all five stages, without an incumbent. Each stage's own follow, and `ahead`, which is the rest: starting the
  child and, on a GPU, compiling on all cores what the stages will need.
- full: the same with an incumbent, so that the candidate is screened and timed as well.
- screened: a candidate that runs the right kernel four times, which is plainly slower.
- original: what the original autokernel's harness took per candidate on an H200, for comparison.

The start of the judge's server, once per run, is not counted; nor is what the judge does while the agent thinks, for
which there is a pause before each text. A verdict other than expected is shown in its cell, and
makes the exit status 1. What is done so far is written after each op: judge_speed.json and judge_speed.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from judging import Judges, environment, numbered, starter

from autokernel.backends import require_backend
from autokernel.errors import AutokernelError, DeviceError
from autokernel.judge.engine import Judge
from autokernel.judge.stages import STAGES
from autokernel.loading import get_spec, specs, starter_path
from autokernel.records import Outcome
from autokernel.settings import BACKENDS, SANDBOX_MODES

ORIGINAL_S = {
    "rmsnorm": 10.7,
    "softmax": 28.6,
    "matmul": 9.5,
    "layernorm": 10.7,
    "cross_entropy": 19.2,
    "rotary_embedding": 8.0,
    "reduce": 7.0,
    "flash_attention": 16.0,
    "fused_mlp": 8.4,
}
"""Seconds per candidate of the original harness, measured on an H200."""

USER_SIZES = {
    "matmul": (512, 512, 512),
    "softmax": (4, 512, 1000),
    "layernorm": (4, 256, 1024),
    "rmsnorm": (4, 512, 1024),
    "flash_attention": (1, 8, 256, 64),
    "masked_attention": (1, 8, 256, 64),
    "fused_mlp": (512, 512, 1376),
    "cross_entropy": (512, 4000),
    "rotary_embedding": (2, 8, 512, 64),
    "reduce": (2048, 1000),
}
"""Calls as a small model makes them."""

FOUR_TIMES = """

_once = kernel_fn


def kernel_fn(*arguments, **named):
    for _ in range(3):
        _once(*arguments, **named)
    return _once(*arguments, **named)
"""
EXPECTED = {"stages": "PASS", "full": "PASS", "screened": "SCREENED"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of one op on one backend, medians over the repeats. `verdicts` has all that came, `reasons` why."""

    op: str
    backend: str
    case: str
    stages_s: float
    full_s: float
    screened_s: float
    stage_s: dict[str, float]
    ahead_s: float
    original_s: float | None
    verdicts: dict[str, list[str]]
    reasons: dict[str, list[str]]

    @property
    def as_expected(self) -> bool:
        """Whether every text got the verdict that it deserves."""
        return all(set(self.verdicts[kind]) == {verdict} for kind, verdict in EXPECTED.items())


def measure(judge: Judge, backend: str, repeats: int, think_s: float) -> Row:
    """Judge fresh texts of the judge's op, `think_s` seconds after one another."""

    def judged(kernel_py: str, *incumbent: str) -> Outcome:
        time.sleep(think_s)
        return judge.evaluate(kernel_py, *incumbent)

    text = starter(judge.spec.op, backend)
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in EXPECTED}
    for _ in range(repeats):
        incumbent = numbered(text)
        outcomes["stages"].append(judged(incumbent))
        outcomes["full"].append(judged(numbered(text), incumbent))
        outcomes["screened"].append(judged(numbered(text + FOUR_TIMES), incumbent))
    seconds = {kind: statistics.median(outcome.seconds for outcome in found) for kind, found in outcomes.items()}
    checked = outcomes["stages"]
    case = judge.timed[0].case
    return Row(
        op=judge.spec.op,
        backend=backend,
        case=f"{case.name} {case.label}",
        stages_s=round(seconds["stages"], 3),
        full_s=round(seconds["full"], 3),
        screened_s=round(seconds["screened"], 3),
        stage_s={name: stage_s(checked, name) for name, _ in STAGES},
        ahead_s=round(statistics.median(o.seconds - sum(s.seconds for s in o.stages) for o in checked), 3),
        original_s=ORIGINAL_S.get(judge.spec.op),
        verdicts={kind: [str(outcome.verdict) for outcome in found] for kind, found in outcomes.items()},
        reasons={kind: [outcome.reason for outcome in found if outcome.reason] for kind, found in outcomes.items()},
    )


def stage_s(outcomes: Sequence[Outcome], name: str) -> float:
    """Median seconds of one stage; 0 where none came as far."""
    found = [stage.seconds for outcome in outcomes for stage in outcome.stages if stage.stage == name]
    return round(statistics.median(found), 3) if found else 0.0


def markdown(rows: Sequence[Row]) -> str:
    """One line per op and backend."""
    names = ["op", "backend", "case", *EXPECTED, *(name for name, _ in STAGES), "ahead", "original, H200"]
    lines = ["| " + " | ".join(names) + " |", "| --- | --- | --- |" + " ---: |" * (len(names) - 3)]
    for row in rows:
        totals = {"stages": row.stages_s, "full": row.full_s, "screened": row.screened_s}
        cells = [row.op, row.backend, row.case]
        cells += [f"{total:.1f}{unexpected(row, kind)}" for kind, total in totals.items()]
        cells += [f"{seconds:.1f}" for seconds in (*row.stage_s.values(), row.ahead_s)]
        cells.append("-" if row.original_s is None else f"{row.original_s:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def unexpected(row: Row, kind: str) -> str:
    """The verdicts that should not be, in brackets."""
    others = [verdict for verdict in row.verdicts[kind] if verdict != EXPECTED[kind]]
    return f" ({', '.join(sorted(set(others)))})" if others else ""


def possible_backends() -> list[str]:
    """Those that this machine can run."""
    found = []
    for backend in BACKENDS:
        try:
            require_backend(backend)
        except DeviceError:
            continue
        found.append(backend)
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", help="only these, separated by commas (default: all)")
    parser.add_argument("--backends", help="triton, cuda and cpp, separated by commas (default: what can run here)")
    parser.add_argument(
        "--user-case", action="store_true", help="time a call of a small model, not the spec's heaviest case"
    )
    parser.add_argument("--dtype", help="of the timed call (default: fp32, as the spec's cases)")
    parser.add_argument("--repeats", type=int, default=1, help="texts of each kind; medians (default: %(default)s)")
    parser.add_argument("--think", type=float, default=3.0, help="seconds before each text (default: %(default)g)")
    parser.add_argument("--sandbox", default="auto", choices=SANDBOX_MODES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}: give 1 or more")
    return args


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every op on every backend; the files are written after each."""
    ops = args.ops.split(",") if args.ops else list(specs())
    for op in ops:
        get_spec(op)  # a wrong name ends here, not after an hour
    rows: list[Row] = []
    environments = {}
    for backend in args.backends.split(",") if args.backends else possible_backends():
        with Judges(backend, args.sandbox) as judges:
            environments[backend] = environment(backend)
            wanted = [op for op in ops if starter_path(op, backend)]
            for op in wanted:
                judge = judges.of(op, USER_SIZES[op] if args.user_case else None, args.dtype)
                if op == wanted[0]:  # the server starts with the first child, PyTorch's GPU code with the first call
                    judge.evaluate(starter(op, backend), all_stages=False)
                rows.append(measure(judge, backend, args.repeats, args.think))
                print(markdown(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
                write(args.out, rows, environments)
    return rows


def write(folder: Path, rows: Sequence[Row], environments: dict[str, dict[str, str | int | None]]) -> None:
    """The table and the numbers behind it."""
    found = {"environments": environments, "rows": [asdict(row) for row in rows]}
    (folder / "judge_speed.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "judge_speed.md").write_text(markdown(rows) + "\n")


def main() -> None:
    """Measure and print the table; exit 1 when a verdict was not the expected one."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        rows = run(args)
    except AutokernelError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(markdown(rows))
    sys.exit(0 if rows and all(row.as_expected for row in rows) else 1)


if __name__ == "__main__":
    main()
