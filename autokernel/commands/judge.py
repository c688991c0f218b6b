"""`autokernel judge`: the judge's verdict on one kernel.py, outside any run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autokernel.errors import ConfigError

if TYPE_CHECKING:
    from autokernel.kernelfile import KernelFile
    from autokernel.records import Outcome

REJECTED = 1


def judge(
    kernel: Annotated[Path, typer.Argument(help="The kernel.py to judge.", metavar="KERNEL.py")],
    op: Annotated[str | None, typer.Option(help="The op it must compute (default: the file's KERNEL_TYPE).")] = None,
    timing: Annotated[
        bool, typer.Option("--timing/--no-timing", help="Also time it against the project's starter of that op.")
    ] = True,
    sandbox: Annotated[
        str, typer.Option(help="auto, strict or off: how KERNEL.py is confined while it runs.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check KERNEL.py in five stages and time it. Exits 0 on PASS, 1 on any other verdict, 2 on misuse."""
    from autokernel.kernelfile import parse_kernel
    from autokernel.loading import look_beside

    text = read_kernel(kernel)
    parsed = parse_kernel(text)
    chosen = op or parsed.kernel_type
    look_beside(kernel)
    starter = _starter(chosen, parsed) if timing else None
    if not as_json:
        source = "--op" if op else "the file's KERNEL_TYPE"
        print(f"judging {kernel} as {chosen} (from {source}), backend {parsed.backend}", flush=True)
    outcome = _evaluate(text, chosen, parsed.backend, starter, sandbox)
    passed = outcome.verdict == "PASS"
    if as_json:
        print(json.dumps(_to_json(kernel, chosen, op is not None, parsed, outcome)))
    else:
        _show(outcome, timed=starter is not None, wanted=timing)
    raise typer.Exit(0 if passed else REJECTED)


def read_kernel(path: Path) -> str:
    """The text of a kernel.py that a user names. Raises: ConfigError."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}", hint="give the path of a kernel.py") from None


def _starter(op: str, parsed: KernelFile) -> str | None:
    from autokernel.loading import get_spec, starter_path

    get_spec(op)  # an unknown op ends here, before a path is made of its name
    path = starter_path(op, parsed.backend)
    return path.read_text() if path else None


def _evaluate(text: str, op: str, backend: str, starter: str | None, sandbox: str) -> Outcome:
    from autokernel.backends import require_backend
    from autokernel.judge.engine import Judge
    from autokernel.judge.forkserver import ForkServer
    from autokernel.loading import get_spec
    from autokernel.settings import device_of, dtypes_of

    require_backend(backend)
    spec = get_spec(op)
    with (
        tempfile.TemporaryDirectory(prefix="autokernel-judge-") as builds,
        ForkServer(device_of(backend), sandbox=sandbox, builds=Path(builds)) as server,
    ):
        dtypes = dtypes_of(backend, spec.dtypes)
        judging = Judge(server=server, spec=spec, dtypes=dtypes, cases=(), builds=Path(builds) / op)
        return judging.evaluate(text, starter, timing=starter is not None)


def _show(outcome: Outcome, *, timed: bool, wanted: bool) -> None:
    for stage in outcome.stages:
        print(f"  {stage.stage:<12} {stage.verdict:<8} {stage.cases:3d} cases  {stage.seconds:6.2f} s")
    if outcome.timing is not None:
        timing = outcome.timing
        print(
            f"  timing       {timing.candidate_us:.1f} us; the starter {timing.incumbent_us:.1f} us: {timing.speedup}"
        )
        if timing.host_us is not None:
            graph = "cannot be captured" if timing.graph_us is None else f"{timing.graph_us:.1f} us"
            print(f"               the host needs {timing.host_us:.1f} us to start it; in a CUDA graph: {graph}")
        if timing.clocks is not None:
            print(f"               GPU clock {timing.clocks}")
    elif wanted and not timed:
        print("  timing       left out: the project has no starter of this op for this backend")
    where = f" in {outcome.stage}" if outcome.stage else ""
    print(f"{outcome.verdict}{where}{': ' + outcome.reason if outcome.reason else ''}")
    if outcome.verdict == "SCREENED":
        print("hint: --no-timing runs all stages whatever the speed")


def _to_json(path: Path, op: str, op_given: bool, parsed: KernelFile, outcome: Outcome) -> dict[str, Any]:
    raw = outcome.to_json()
    timing = raw.pop("timing")
    return {
        "kernel": str(path),
        "op": op,
        "op_from": "--op" if op_given else "KERNEL_TYPE",
        "backend": parsed.backend,
        "verdict": raw["verdict"],
        "stage": raw["stage"],
        "reason": raw["reason"],
        "stages": raw["stages"],
        "measurements": timing,
        "peak_memory_mb": raw["peak_memory_mb"],
        "seconds": raw["seconds"],
    }
