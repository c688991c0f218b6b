"""The starters beside every peer on one GPU, in one run, interleaved.

    python benchmarks/peers_gpu.py --out results/            # all ops, fp16 and bf16: peers.csv, peers.md, peers.png
    python benchmarks/peers_gpu.py --ops softmax,reduce --dtypes bf16 --no-compile
    python benchmarks/peers_gpu.py --table a.csv b.csv --out results/     # the tables of earlier runs together

Every round gives each contestant one block of calls in random order; before each call the L2 is overwritten. A time is
the median over rounds of a block's median. Rates count each input read once and each output written once. Ceilings are
measured in the same run: a large device-to-device copy, and the best rate that cuBLAS reaches on the listed GEMMs.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from peers import OURS, Contestant, contestants, relative_error

from autokernel.judge.stopwatch import DeviceStopwatch
from autokernel.loading import get_spec
from autokernel.records import Case
from autokernel.spec import DTYPES, Inputs, build_case, retype, upcast

ROUNDS, BLOCK_US, MOST_CALLS = 9, 12_000.0, 60
COPY_BYTES = 4 << 30
LARGEST_ERROR = 2e-2
COMPUTE_BOUND = ("matmul", "flash_attention", "masked_attention", "fused_mlp")


def cases() -> list[Case]:
    """The shapes of the comparison, in bf16."""
    found = []
    for rows, cols in ((4096, 4096), (8192, 8192), (32768, 4096)):
        found += [
            build_case("softmax", "", x=(rows, cols)),
            build_case("rmsnorm", "", x=(rows, cols), weight=(cols,)),
            build_case("layernorm", "", x=(rows, cols), weight=(cols,), bias=(cols,)),
            build_case("reduce", "", x=(rows, cols)),
        ]
    for rows, classes in ((4096, 32000), (8192, 50257), (8192, 128256)):
        case = build_case("cross_entropy", "", logits=(rows, classes), targets=(rows,))
        found.append(retype(case, targets="int64"))
    for shape in ((2, 32, 2048, 128), (8, 32, 4096, 128)):
        angles = (shape[2], shape[3] // 2)
        found.append(build_case("rotary_embedding", "", x=shape, cos=angles, sin=angles))
    for m, n, k in ((2048, 2048, 2048), (4096, 4096, 4096), (4096, 11008, 4096), (8192, 8192, 8192)):
        found.append(build_case("matmul", "", a=(m, k), b=(k, n)))
    for shape in ((2, 32, 2048, 64), (2, 32, 4096, 128), (1, 32, 16384, 128)):
        found.append(build_case("flash_attention", "", scalars={"causal": True}, q=shape, k=shape, v=shape))
    # T5's bias, padding, both a window and padding (their values are random here, and hide a fifth), and one new token.
    for shape, kv, mask, seen in (
        ((8, 16, 512, 64), (8, 16, 512, 64), (1, 16, 512, 512), False),
        ((16, 16, 512, 64), (16, 16, 512, 64), (16, 1, 1, 512), True),
        ((2, 32, 4096, 128), (2, 32, 4096, 128), (2, 1, 4096, 4096), True),
        ((8, 32, 1, 128), (8, 8, 4096, 128), (8, 1, 1, 4096), True),
    ):
        case = build_case("masked_attention", "", q=shape, k=kv, v=kv, mask=mask)
        found.append(retype(case, mask="bool") if seen else case)
    for tokens, width, hidden in ((2048, 4096, 11008), (4096, 4096, 14336)):
        up, down = (hidden, width), (width, hidden)
        found.append(build_case("fused_mlp", "", x=(tokens, width), w_gate=up, w_up=up, w_down=down))
    order = list(dict.fromkeys(case.op for case in found))
    return sorted(found, key=lambda case: order.index(case.op))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant on one case. `rate` is in GB/s or TFLOP/s, `ceiling` in the same unit; `error` is relative."""

    device: str
    op: str
    shape: str
    dtype: str
    contestant: str
    us: float
    low_us: float
    high_us: float
    rate: float
    unit: str
    ceiling: float
    error: float
    note: str = ""


def shape_of(case: Case) -> str:
    """What tells the case apart: `8192x8192`, or MxNxK for a matmul."""
    first, *rest = case.tensors.values()
    if case.op == "matmul":
        return f"{first.shape[0]}x{rest[0].shape[1]}x{first.shape[1]}"
    if case.op == "fused_mlp":
        return f"{first.shape[0]}x{first.shape[1]}x{rest[0].shape[0]}"
    shape = "x".join(map(str, first.shape))
    if case.op == "masked_attention":
        return f"{shape}, {'mask' if case.tensors['mask'].dtype == 'bool' else 'bias'}"
    return shape


def bytes_moved(case: Case) -> int:
    """Bytes that must move: the spec's, but for a cross entropy of which no row is ignored."""
    if case.op != "cross_entropy":
        return get_spec(case.op).bytes_moved(case)
    return sum(meta.numel * DTYPES[meta.dtype].itemsize for meta in case.tensors.values())


class Bench:
    """One GPU: its clock, its ceilings, and the rows measured so far."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.clock = DeviceStopwatch()
        self.copy_gbps = self._copy_gbps()
        self.gemm_tflops: dict[str, float] = {}

    def _copy_gbps(self) -> float:
        source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        block = self.clock.block(lambda: target.copy_(source), [()] * 23, warm=3, keep=0)
        return COPY_BYTES / statistics.median(block.calls_us) / 1e3

    def measure(self, case: Case, *, compiled: bool, rounds: int) -> list[Row]:
        """Time everyone on `case`."""
        spec = get_spec(case.op)
        inputs = self._inputs(case)
        runners, errors, notes = self._runnable(case, inputs, compiled)
        samples: dict[str, list[float]] = {name: [] for name in runners}
        calls = {name: self._calls(run) for name, run in runners.items()}
        for done in range(rounds):
            for name in random.sample(list(runners), len(runners)):
                if done and calls[name] == 0:
                    continue
                block = self.clock.block(runners[name], [()] * (1 + (calls[name] or 1)), warm=1, keep=0)
                samples[name].append(statistics.median(block.calls_us))
        compute = case.op in COMPUTE_BOUND
        work = spec.flops(case) / 1e6 if compute else bytes_moved(case) / 1e3
        latency = {name: statistics.median(times) for name, times in samples.items()}
        if case.op == "matmul" and "eager" in latency:
            self.gemm_tflops[case.dtype] = max(self.gemm_tflops.get(case.dtype, 0.0), work / latency["eager"])
        rows = []
        for name in [*runners, *notes]:
            us = latency.get(name, float("nan"))
            rows.append(
                Row(
                    device=self.device,
                    op=case.op,
                    shape=shape_of(case),
                    dtype=case.dtype,
                    contestant=name,
                    us=round(us, 2),
                    low_us=round(min(samples.get(name, [us])), 2),
                    high_us=round(max(samples.get(name, [us])), 2),
                    rate=round(work / us, 1),
                    unit="TFLOP/s" if compute else "GB/s",
                    ceiling=0.0 if compute else round(self.copy_gbps, 1),
                    error=errors.get(name, float("nan")),
                    note=notes.get(name, ""),
                )
            )
        return rows

    def _inputs(self, case: Case) -> Inputs:
        inputs = get_spec(case.op).make_inputs(case, random.getrandbits(40), "cuda")
        if case.op == "cross_entropy":  # no row is ignored, so that everyone has to read them all
            logits: torch.Tensor = inputs["logits"]
            inputs["targets"] = torch.randint(logits.shape[1], (logits.shape[0],), device="cuda")
        return inputs

    def _runnable(
        self, case: Case, inputs: Inputs, compiled: bool
    ) -> tuple[dict[str, Contestant], dict[str, float], dict[str, str]]:
        """Contestants that run and are right, the error of each, and why the others are left out."""
        truth: torch.Tensor | None = None
        spec = get_spec(case.op)
        good, errors, notes = {}, {}, {}
        try:
            truth = spec.oracle(**upcast(inputs, torch.float32))
        except torch.OutOfMemoryError:
            truth = spec.baselines["native"](*inputs.values()).float()
        torch.cuda.empty_cache()
        for name, run in contestants(case.op, inputs, compiled=compiled).items():
            try:
                with torch.no_grad():
                    out = run()
                torch.cuda.synchronize()
                errors[name] = float(f"{relative_error(out, truth):.2g}")
                if errors[name] > LARGEST_ERROR:
                    notes[name] = f"wrong: relative error {errors[name]}"
                else:
                    good[name] = run
            except Exception as error:  # a peer that cannot do this shape is a result, too
                notes[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[
                    :160
                ]
            torch.cuda.empty_cache()
        return good, errors, notes

    def _calls(self, run: Contestant) -> int:
        """Calls of a block; 0 for one so slow that a single call will do."""
        block = self.clock.block(run, [()] * 5, warm=2, keep=0)
        return min(MOST_CALLS, round(BLOCK_US / statistics.median(block.calls_us)))


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """All rows, one per contestant and case."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_csv(path: Path) -> list[Row]:
    """Inverse of `write_csv`."""
    numbers = {"us", "low_us", "high_us", "rate", "ceiling", "error"}
    with path.open() as file:
        return [
            Row(**{key: float(value) if key in numbers else value for key, value in raw.items()})  # type: ignore[arg-type]
            for raw in csv.DictReader(file)
        ]


def with_ceilings(rows: list[Row]) -> list[Row]:
    """Rows with the compute ceiling of their dtype: the best rate of cuBLAS on any matmul among them."""
    best: dict[str, float] = {}
    for row in rows:
        if row.op == "matmul" and row.contestant == "eager":
            best[row.dtype] = max(best.get(row.dtype, 0.0), row.rate)
    return [Row(**{**asdict(row), "ceiling": row.ceiling or best.get(row.dtype, 0.0)}) for row in rows]


def markdown(rows: list[Row]) -> str:
    """One line per case: ours, the best peer, our share of the measured ceiling, and who is faster."""
    lines = [
        "| op | shape | dtype | best peer | us | triton us | cuda us | our best | of ceiling | over the best peer |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for group in by_case(rows):
        timed = {row.contestant: row for row in group if row.us == row.us}
        peers = [row for name, row in timed.items() if name not in OURS]
        ours = [row for name, row in timed.items() if name in OURS]
        first = group[0]
        cells = [first.op, first.shape, first.dtype]
        peer = min(peers, key=lambda row: row.us, default=None)
        cells += [peer.contestant, f"{peer.us:.1f}"] if peer else ["-", "-"]
        cells += [f"{timed[name].us:.1f}" if name in timed else "-" for name in OURS]
        mine = min(ours, key=lambda row: row.us, default=None)
        if mine is None:
            cells += ["-", "-", "-"]
        else:
            share = f"{mine.rate / mine.ceiling:.0%}" if mine.ceiling else "-"
            cells += [f"{mine.rate:.0f} {mine.unit}", share, f"{peer.us / mine.us:.2f}x" if peer else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_case(rows: list[Row]) -> list[list[Row]]:
    """Rows of one case together, in order of first appearance."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.dtype), []).append(row)
    return list(groups.values())


def plot(path: Path, rows: list[Row]) -> None:
    """Speedup of our better starter over the best peer, one bar per case; nothing where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path} is left out: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels, ratios = [], []
    for group in by_case(rows):
        ours = [row.us for row in group if row.contestant in OURS and row.us == row.us]
        peers = [row.us for row in group if row.contestant not in OURS and row.us == row.us]
        if ours and peers:
            labels.append(f"{group[0].op} {group[0].shape} {group[0].dtype}")
            ratios.append(min(peers) / min(ours))
    figure, axes = pyplot.subplots(figsize=(9, 0.22 * len(labels) + 1.2))
    axes.barh(labels, ratios, color=["#2a7f62" if ratio >= 1 else "#b5443c" for ratio in ratios])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.set_xlabel("latency of the best peer / latency of our better starter (above 1: ours is faster)", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure (or read earlier CSVs), then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for csv, md and png")
    parser.add_argument("--ops", help="only these, separated by commas")
    parser.add_argument("--dtypes", default="fp16,bf16")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it tunes for minutes)")
    parser.add_argument("--compile-ops", help="torch.compile only for these, separated by commas")
    parser.add_argument("--compile-dtypes", default="fp16,bf16", help="torch.compile only in these")
    parser.add_argument("--table", type=Path, nargs="+", help="measure nothing; join these CSVs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    if args.table:
        rows = [row for path in args.table for row in read_csv(path)]
    elif not torch.cuda.is_available():
        sys.exit("error: no GPU; --table joins the CSVs of earlier runs")
    else:
        rows = run(args)
    rows = with_ceilings(rows)
    write_csv(args.out / "peers.csv", rows)
    (args.out / "peers.md").write_text(markdown(rows) + "\n")
    plot(args.out / "peers.png", rows)
    print(markdown(rows))


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every case that was asked for; what is done is written after each."""
    bench = Bench(torch.cuda.get_device_name())
    print(f"{bench.device}, torch {torch.__version__}: copy {bench.copy_gbps:.0f} GB/s", flush=True)
    wanted = set(args.ops.split(",")) if args.ops else None
    rows: list[Row] = []
    for case in cases():
        if wanted and case.op not in wanted:
            continue
        for dtype in args.dtypes.split(","):
            start = time.perf_counter()
            compiled = (
                not args.no_compile
                and dtype in args.compile_dtypes.split(",")
                and (args.compile_ops is None or case.op in args.compile_ops.split(","))
            )
            found = bench.measure(case.with_dtype(dtype), compiled=compiled, rounds=args.rounds)
            rows += found
            write_csv(args.out / "peers.csv", rows)
            line = " | ".join(
                f"{r.contestant} {r.us:.1f}" if not r.note else f"{r.contestant}: {r.note}" for r in found
            )
            print(f"{case.op} {shape_of(case)} {dtype} ({time.perf_counter() - start:.0f} s): {line}", flush=True)
            torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    main()
