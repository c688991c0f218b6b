"""Models that nobody here wrote (`zoo.py`), each through the whole step: targets, kernels back in, outputs compared.

    python benchmarks/models.py --models llama,bert --out results/
    python benchmarks/models.py --backend triton --sizes gpu --compile --seconds 240 --out results/

For each model, in child processes of the package's own, as `autokernel run` does it:

- ops x places: what the plan found;
- share: of one eager forward's wall time, and of its operators' own time (a GPU waits between them), in those places;
- replaced: calls of kernels, and of originals because a call was not among those verified, in one forward with every
  starter in its place;
- outputs: whether the whole output tree then agrees with an fp64 run of the model (with eager's where that fails, and
  that is said); the worst error, and PyTorch's own;
- with kernels: eager's latency over that with the starters that help, interleaved; `--compile` adds that of
  torch.compile over the same eager model, and the quotient, whose interval is the widest that the two allow.

A model that fails is a row with the reason. What is done so far is written after each step of each: models.json and
models.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from judging import environment
from zoo import FACTORIES

from autokernel.backends import choose_backend
from autokernel.errors import AutokernelError
from autokernel.loading import REFERENCE, is_captured, look_in, starter_path
from autokernel.model_worker import call_worker
from autokernel.modelnumbers import against_compile
from autokernel.records import Interval
from autokernel.settings import BACKENDS, device_of

ZOO = Path(__file__).parent / "zoo.py"
DEADLINE_S = 900.0
SLACK_S = 180.0
"""What a measurement may take beyond its seconds before it is killed."""


@dataclass(kw_only=True)
class Row:
    """One model; None for what was not reached. `failed` says why the rest is missing."""

    model: str
    places: dict[str, int] = field(default_factory=dict)
    share: float | None = None
    wall_us: float | None = None
    operators_us: float | None = None
    graphs: int | None = None
    notes: list[str] = field(default_factory=list)
    verified: dict[str, Any] | None = None
    integrated: dict[str, Any] | None = None
    failed: str | None = None
    seconds: float = 0.0


def measure(row: Row, args: argparse.Namespace, folder: Path, write: Callable[[], None]) -> None:
    """Fill in the row of a model, whatever happens, and have it written after each step.

    Native kernels are built in `folder` once for all models.
    """
    name, started = row.model, time.perf_counter()
    asked = {
        "model": f"{ZOO}:{name}_gpu" if args.sizes == "gpu" else f"{ZOO}:{name}",
        "device": device_of(args.backend),
        "backend": args.backend,
        "dtype": args.dtype,
    }

    def tell() -> None:
        row.seconds = time.perf_counter() - started
        write()

    try:
        for _ in _walk(row, asked, folder, args):
            tell()
    except AutokernelError as error:
        row.failed = str(error)
        tell()


def _walk(row: Row, asked: dict[str, Any], folder: Path, args: argparse.Namespace) -> Iterator[None]:
    """Yields after each step."""

    def ask(request: str, deadline_s: float, **more: Any) -> dict[str, Any]:
        return call_worker({**asked, **more, "request": request}, deadline_s=deadline_s, workdir=folder)

    found = ask("profile", DEADLINE_S)
    plan = found["plan"]
    row.places = {op["op"]: sum(timed["calls"] for timed in op["cases"]) for op in plan["ops"]}
    row.share = sum(op["share"] for op in plan["ops"])
    row.wall_us, row.graphs, row.notes = plan["wall_us"], plan["graphs"], found["notes"]
    row.operators_us = found["profile"]["profiled_us"]
    yield
    kernels = _export(plan, args.backend, folder)
    row.verified = ask("verify", DEADLINE_S, run=str(folder))
    yield
    if args.seconds:
        more = {"kernels": kernels, "budget_s": args.seconds, "compile_baseline": args.compile}
        row.integrated = ask("integrate", args.seconds + SLACK_S, **more)
        yield


def _export(plan: dict[str, Any], backend: str, folder: Path) -> list[dict[str, Any]]:
    """The starters with the plan's cases, laid out as a run exports its kernels."""
    shutil.rmtree(folder / "regions", ignore_errors=True)
    for op, files in plan["files"].items():
        (folder / "regions" / op).mkdir(parents=True)
        for name, text in files.items():
            (folder / "regions" / op / name).write_text(text)
    look_in(folder / "regions")
    shutil.rmtree(folder / "optimized", ignore_errors=True)  # another model's
    builds = folder / "builds"
    builds.mkdir(exist_ok=True)
    kernels = []
    for op in plan["ops"]:
        starter = starter_path(op["op"], backend)
        if starter is None:
            continue
        cases = [timed["case"] for timed in op["cases"]]
        path = folder / "optimized" / op["op"] / "kernel.py"
        path.parent.mkdir(parents=True)
        path.write_text(starter.read_text())
        if is_captured(op["op"]):
            (path.parent / REFERENCE).write_text((starter.parent / REFERENCE).read_text())
        (path.parent / "builds").symlink_to(builds)
        (path.parent / "meta.json").write_text(json.dumps({"op": op["op"], "cases": cases, "used": True}))
        kernels.append({"op": op["op"], "path": str(path), "cases": cases})
    return kernels


# --- the table -------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> str:
    """The table, one line a model."""
    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: row.model,
        "ops x places": lambda row: ", ".join(f"{op} x{n}" for op, n in row.places.items()) or "-",
        "share": _share,
        "replaced": _replaced,
        "outputs": _outputs,
        "with kernels": lambda row: _speedup(row.integrated),
        "torch.compile": lambda row: _interval((row.integrated or {}).get("compile_speedup")),
        "kernels / compile": lambda row: _quotient(row.integrated),
    }
    if not any((row.integrated or {}).get("compile_speedup") for row in rows):
        del columns["torch.compile"], columns["kernels / compile"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def _share(row: Row) -> str:
    if row.share is None or row.wall_us is None or not row.operators_us:
        return "-"
    return f"{row.share:.0%}, {min(1.0, row.share * row.wall_us / row.operators_us):.0%}"


def _replaced(row: Row) -> str:
    if row.verified is None:
        return "-"
    left = sum(row.verified["fallbacks"].values())
    return str(sum(row.verified["calls"].values())) + (f", {left} left" if left else "")


def _outputs(row: Row) -> str:
    if row.failed:
        return f"FAILED: {row.failed}"
    if row.verified is None:
        return "-"
    if not row.verified["agrees"]:
        return f"DIFFER: {row.verified['problem'] or row.verified['idle']}"
    worst = row.verified["worst"]
    errors = f" (error {worst['error']:.1e}, eager's {worst['eager_error']:.1e})" if worst["error"] is not None else ""
    truth = "" if row.verified["truth"] == "fp64" else f" with {row.verified['truth']}"
    return f"{row.verified['tensors']} agree{truth}{errors}"


def _speedup(integrated: dict[str, Any] | None) -> str:
    if integrated is None:
        return "-"
    if integrated["used"]:
        return f"{_interval(integrated['speedup'])} {', '.join(integrated['used'])}"
    return "no starter helps" + (f": {_interval(integrated['speedup'])}" if integrated["speedup"] else "")


def _quotient(integrated: dict[str, Any] | None) -> str:
    found = against_compile(integrated)
    return str(found) if found else "-"


def _interval(raw: dict[str, float] | None) -> str:
    return str(Interval(**raw)) if raw else "-"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(FACTORIES), help="names of zoo.py")
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="of the starters")
    parser.add_argument("--sizes", choices=("small", "gpu"), default="small")
    parser.add_argument("--dtype", help="default: fp32 for small, bf16 for gpu")
    parser.add_argument("--seconds", type=float, default=30.0, help="for measuring a model; 0 leaves speed out")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile, too, within the seconds")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of models.json and models.md")
    args = parser.parse_args()
    if unknown := [name for name in args.models if name not in FACTORIES]:
        parser.error(f"unknown models {', '.join(unknown)}; known: {', '.join(FACTORIES)}")
    args.dtype = args.dtype or ("bf16" if args.sizes == "gpu" else "fp32")
    return args


def _write(rows: Sequence[Row], args: argparse.Namespace) -> None:
    document = {
        "environment": environment(args.backend),
        "arguments": {**vars(args), "out": str(args.out)},
        "rows": [asdict(row) for row in rows],
    }
    (args.out / "models.json").write_text(json.dumps(document, indent=1))
    (args.out / "models.md").write_text(markdown(rows) + "\n")


def main() -> None:
    """Measure and print the table; exit 1 when a model failed or its outputs differ."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        args.backend = choose_backend(args.backend)
        with tempfile.TemporaryDirectory(prefix="autokernel-models-") as folder:
            for name in args.models:
                rows.append(Row(model=name))
                measure(rows[-1], args, Path(folder), lambda: _write(rows, args))
                print(markdown(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    except AutokernelError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(markdown(rows))
    sys.exit(0 if all(row.verified and row.verified["agrees"] for row in rows) else 1)


if __name__ == "__main__":
    main()
