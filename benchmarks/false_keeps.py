"""How often the judge keeps a kernel that is no faster, and how far a night of such keeps drifts.

    python benchmarks/false_keeps.py --op rmsnorm --backend triton --no-stages --minutes 9 --out false_keeps.jsonl
    python benchmarks/false_keeps.py --op matmul --backend cpp --shape 512x512x512 --experiments 300

Every candidate is the incumbent with another number in a comment, so that the truth is a speedup of exactly 1. It goes
through `Judge.evaluate` and the loop's own keep rule, and what is kept becomes the incumbent, as in a night. What has
been compiled for the incumbent is shared with the candidate. --no-stages runs smoke alone before the timing: the same
kernel passes the other stages every time, and the timing is done in new processes.

Prints a table and exits 1 when there is more than one false keep in 300 experiments, or when the speedups claimed by
all false keeps multiply to more than half a percent.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from judging import Judges, environment, numbered, starter

from autokernel.errors import AutokernelError
from autokernel.history import KernelHistory
from autokernel.judge.engine import Judge
from autokernel.loading import load_file, specs, toplevel
from autokernel.records import Baseline, Decision, Outcome, PlannedOp, Proposal
from autokernel.settings import BACKENDS, SANDBOX_MODES, device_of
from autokernel.sizes import SIZES, parse_sizes

MOST_PER_EXPERIMENT = 1 / 300
MOST_DRIFT = 0.005
SHOWN_EVERY = 25


@dataclass(kw_only=True)
class Tally:
    """The outcomes so far, and those of them that were kept."""

    outcomes: list[Outcome] = field(default_factory=list)
    kept: list[Outcome] = field(default_factory=list)

    @property
    def drift(self) -> float:
        """How much faster than at first the last incumbent is claimed to be."""
        return math.prod(outcome.timing.speedup.estimate for outcome in self.kept if outcome.timing) - 1

    @property
    def passed(self) -> bool:
        """Whether the judge is as good as it should be."""
        few = len(self.kept) <= max(1.0, len(self.outcomes) * MOST_PER_EXPERIMENT)
        return bool(self.outcomes) and few and self.drift <= MOST_DRIFT

    def summary(self) -> dict[str, Any]:
        """All that is reported, for JSON."""
        speedups = [outcome.timing.speedup for outcome in self.outcomes if outcome.timing]
        estimates = sorted(speedup.estimate for speedup in speedups)
        excluding = sum(not speedup.low <= 1 <= speedup.high for speedup in speedups)
        seconds = [outcome.seconds for outcome in self.outcomes]
        return {
            "experiments": len(self.outcomes),
            "false_keeps": len(self.kept),
            "drift": round(self.drift, 5),
            "median": quantile(estimates, 0.5),
            "low_5": quantile(estimates, 0.05),
            "high_95": quantile(estimates, 0.95),
            "excluding_1": round(excluding / len(speedups), 4) if speedups else None,
            "seconds": round(statistics.mean(seconds), 3) if seconds else None,
            "verdicts": dict(Counter(str(outcome.verdict) for outcome in self.outcomes)),
            "passed": self.passed,
            "intervals": [[round(x, 5) for x in (s.low, s.estimate, s.high)] for s in speedups],
            "latency_us": round(statistics.median(o.timing.candidate_us for o in self.outcomes if o.timing), 3)
            if speedups
            else None,
        }


def quantile(ordered: list[float], share: float) -> float | None:
    """The value below which `share` of them lie, between neighbours in proportion; None of none."""
    if not ordered:
        return None
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (at - low) * (ordered[high] - ordered[low]), 5)


def experiments(judges: Judges, judge: Judge, backend: str, *, all_stages: bool) -> Iterator[tuple[Outcome, Decision]]:
    """Outcome and decision of one null experiment after another, without end."""
    decide = load_file(toplevel("orchestrate.py"), "autokernel_orchestrate").decide
    op = judge.spec.op
    history = begin(judge, numbered(starter(op, backend)), backend)
    first = judge.evaluate(history.incumbent, all_stages=all_stages)  # compiles it, and is no experiment
    if first.verdict != "PASS":
        raise AutokernelError(f"the starter of {op} does not pass: {first.verdict} in {first.stage}: {first.reason}")
    text = starter(op, backend)
    while True:
        proposal = Proposal(hypothesis="none", kernel_py=numbered(text))
        judges.share_builds(op, proposal.kernel_py, history.incumbent)
        outcome = judge.evaluate(proposal.kernel_py, history.incumbent, all_stages=all_stages)
        decision, _ = decide(history, proposal, outcome)
        yield outcome, decision
        if decision is Decision.KEEP:
            history = replace(history, incumbent=proposal.kernel_py)
        else:
            judges.discard(op, proposal.kernel_py)


def begin(judge: Judge, incumbent: str, backend: str) -> KernelHistory:
    """What the keep rule is told of the op: nothing of it but the incumbent's text matters here."""
    planned = PlannedOp(
        op=judge.spec.op, cases=tuple(judge.timed), time_us=1.0, share=1.0, headroom=None, potential=1.0
    )
    return KernelHistory(
        planned=planned,
        backend=backend,
        device=device_of(backend),
        baseline=Baseline(latencies_us={"eager": 1.0}),
        incumbent=incumbent,
        incumbent_us=1.0,
    )


def run(args: argparse.Namespace, tally: Tally) -> str:
    """Fill `tally`; the case that was timed."""
    start = time.perf_counter()
    with Judges(args.backend, args.sandbox) as judges:
        judge = judges.of(args.op, parse_sizes(args.shape) if args.shape else None, args.dtype)
        case = judge.timed[0].case
        label = f"{case.name} {case.label}"
        print(f"{args.op}, {args.backend}, {label}", file=sys.stderr, flush=True)
        for outcome, decision in experiments(judges, judge, args.backend, all_stages=args.stages):
            tally.outcomes.append(outcome)
            if decision is Decision.KEEP:
                tally.kept.append(outcome)
            if decision is Decision.KEEP or outcome.verdict != "PASS" or len(tally.outcomes) % SHOWN_EVERY == 0:
                speedup = outcome.timing.speedup if outcome.timing else "-"
                line = f"{len(tally.outcomes):4d} {outcome.verdict} {decision} {speedup} {outcome.reason}"
                print(line, file=sys.stderr, flush=True)
            minutes = (time.perf_counter() - start) / 60
            if len(tally.outcomes) >= args.experiments or (args.minutes is not None and minutes >= args.minutes):
                break
    return label


def table(summary: dict[str, Any]) -> str:
    """The summary as Markdown, for people."""
    spread = "-"
    if summary["median"] is not None:
        spread = f"{summary['median']:.4f} [{summary['low_5']:.4f}, {summary['high_95']:.4f}]"
    excluding = "-" if summary["excluding_1"] is None else f"{summary['excluding_1']:.1%}"
    rows = {
        "experiments": summary["experiments"],
        "verdicts": ", ".join(f"{count} {verdict}" for verdict, count in summary["verdicts"].items()) or "-",
        "false keeps": summary["false_keeps"],
        "drift": f"{summary['drift']:.2%}",
        "speedup: median [5 %, 95 %]": spread,
        "intervals that exclude 1": excluding,
        "seconds per experiment": "-" if summary["seconds"] is None else f"{summary['seconds']:.2f}",
    }
    heading = f"| {summary['op']} {summary['backend']} | {summary['case']} |\n| --- | --- |\n"
    return heading + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="rmsnorm", choices=list(specs()))
    parser.add_argument("--backend", default="cpp", choices=BACKENDS, help="cpp runs on the CPU, the others on a GPU")
    meanings = "; ".join(f"{op}: {meaning}" for op, meaning in SIZES.items() if " x " in meaning)
    parser.add_argument("--shape", help=f"like 4096x4096 (default: the spec's heaviest case). {meanings}")
    parser.add_argument("--dtype", help="of the timed call (default: fp32, as the spec's cases)")
    parser.add_argument("--experiments", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, help="stop after the experiment that ends later than this")
    parser.add_argument(
        "--stages", action=argparse.BooleanOptionalAction, default=True, help="all five stages, or smoke alone"
    )
    parser.add_argument("--sandbox", default="auto", choices=SANDBOX_MODES)
    parser.add_argument("--out", type=Path, help="file to which one line of JSON is appended")
    return parser.parse_args(argv)


def main() -> None:
    """Run, report, and exit 1 when the judge is not good enough."""
    args, tally, label = parse(), Tally(), "-"
    error = None
    try:
        label = run(args, tally)
    except AutokernelError as raised:  # what has been measured before is reported all the same
        error = raised
    summary = {"op": args.op, "backend": args.backend, "case": label, "stages": args.stages, **tally.summary()}
    if tally.outcomes:
        print(table(summary))
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({**environment(args.backend), **summary}) + "\n")
    if error is not None:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0 if tally.passed else 1)


if __name__ == "__main__":
    main()
