"""`autokernel tune`: the best CONFIG for one kernel.py, found by measuring, or told from what it compiles to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autokernel.commands.judge import read_kernel
from autokernel.errors import ConfigError

if TYPE_CHECKING:
    from autokernel.records import TimedCase
    from autokernel.spec import KernelSpec
    from autokernel.tuner.kernel import Tuning
    from autokernel.tuner.trials import Trial
    from autokernel.tuner.tuning import Budget


def tune(
    kernel: Annotated[Path, typer.Argument(help="The kernel.py to tune.", metavar="KERNEL.py")],
    op: Annotated[str | None, typer.Option(help="The op it computes (default: the file's KERNEL_TYPE).")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="A call like 4096x4096, with *3 behind it if it counts three times; may be repeated."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 (default: bf16 on a GPU, else fp32).")] = None,
    budget: Annotated[str, typer.Option(help="Seconds, minutes or measured configurations: 90s, 5m, 64.")] = "60s",
    search: Annotated[str, typer.Option(help="lfbo, pattern, random or exhaustive.")] = "lfbo",
    seed: Annotated[int, typer.Option(help="Of the search's random choices.")] = 0,
    journal: Annotated[
        Path | None, typer.Option(help="Keep every trial in this file; the same command goes on from it.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the winner into the file's CONFIG.")] = False,
    dispatch: Annotated[
        bool, typer.Option("--dispatch", help="Also a small table: which shapes take which CONFIG.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="Measure nothing: choose for this GPU (sm_90, gfx942), present or not.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what bound each choice made without measuring.")
    ] = False,
    sandbox: Annotated[str, typer.Option(help="auto, strict or off: how KERNEL.py is confined.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Find the fastest CONFIG of KERNEL.py for the given calls. It is shown, and written only with --write."""
    from autokernel.kernelfile import parse_kernel
    from autokernel.loading import get_spec, look_beside
    from autokernel.settings import device_of
    from autokernel.tuner.declaring import declare
    from autokernel.tuner.kernel import tuner_for

    text = declare(read_kernel(kernel))
    parsed = parse_kernel(text)
    look_beside(kernel)
    spec = get_spec(op or parsed.kernel_type)
    on_gpu = target is not None or device_of(parsed.backend) == "cuda"
    calls = _calls(spec, shape or [], dtype or ("bf16" if on_gpu else "fp32"))
    if target is not None:
        chosen, result = _chosen(text, calls, target, sandbox, explain=explain)
    else:
        limit = _budget(budget)
        told = _ignore if as_json else _progress
        with tuner_for(spec, calls, parsed.backend, sandbox) as tuner:
            tuning = tuner.tune(text, limit, search=search, seed=seed, journal=journal, told=told)
        chosen, result = tuning.text, _found(tuning, calls, dispatch=dispatch)
        if not as_json:
            _show(tuning, result, explain=explain)
    if write:
        kernel.write_text(chosen)
    if as_json:
        print(json.dumps({"kernel": str(kernel), "op": spec.op, "written": write, **result}))
    elif not write:
        print("hint: --write puts this CONFIG into the file")


def _calls(spec: KernelSpec, shapes: list[str], dtype: str) -> list[TimedCase]:
    """The calls to tune for, the heaviest first. Raises: ConfigError."""
    from autokernel.records import TimedCase
    from autokernel.sizes import parse_sizes, sized_case
    from autokernel.timed import by_weight, timed_calls

    if len(spec.dtypes) == 1:
        (dtype,) = spec.dtypes
    if dtype not in spec.dtypes:
        raise ConfigError(f"unknown dtype {dtype!r}", hint=f"{spec.op} knows {', '.join(spec.dtypes)}")
    calls = []
    for shape in shapes:
        sizes, _, weight = shape.partition("*")
        if weight and not (weight.isdecimal() and int(weight) > 0):
            raise ConfigError(f"{weight!r} in {shape!r} is no weight", hint="write 4096x4096*3 for a call made 3 times")
        case = sized_case(spec.op, parse_sizes(sizes)).with_dtype(dtype)
        calls.append(TimedCase(case=case, calls=int(weight or 1)))
    if calls:
        return by_weight(spec, calls)
    return [TimedCase(case=item.case.with_dtype(dtype), calls=item.calls) for item in timed_calls(spec, ())]


def _budget(text: str) -> Budget:
    """`90s`, `5m` or `64`. Raises: ConfigError."""
    from autokernel.tuner.tuning import Budget

    parts = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|)", text)
    if parts is None or float(parts[1]) <= 0 or (not parts[2] and "." in parts[1]):
        raise ConfigError(f"{text!r} is no budget", hint="give seconds, minutes or configurations: 90s, 5m, 64")
    if not parts[2]:
        return Budget(evaluations=int(parts[1]))
    return Budget(seconds=float(parts[1]) * (60 if parts[2] == "m" else 1))


def _chosen(
    text: str, calls: list[TimedCase], target: str, sandbox: str, *, explain: bool
) -> tuple[str, dict[str, Any]]:
    """The text with the configuration that is thought to be best on a GPU that need not be here, and why."""
    from autokernel.kernelfile import with_config
    from autokernel.tuner.compiling import Compiler
    from autokernel.tuner.heuristics import Heuristics
    from autokernel.tuner.studies import gather

    with Compiler([item.case for item in calls], target, sandbox=sandbox) as compiler:
        heuristics = Heuristics(gather(text, calls[0].case, compiler))
        config = heuristics.space.config_at(heuristics.default())
        chosen = with_config(text, config)
        (compiled,) = compiler.compile([chosen])
    print(f"for {target}, without measuring: {config}")
    print(f"compiled: {compiled.status}{': ' + compiled.error if compiled.error else ''}")
    for each in compiled.resources:
        print(f"  {each}")
    for line in heuristics.explain(heuristics.default()) if explain else ():
        print(f"  {line}")
    return chosen, {"target": target, "config": config, "status": str(compiled.status)}


def _ignore(_trial: Trial) -> None:
    pass


def _progress(trial: Trial) -> None:
    """One line per configuration that was measured."""
    took = "" if trial.latency_us is None else f" {trial.latency_us:10.1f} us"
    print(f"  {trial.status:<14}{took}{' ' + trial.error.splitlines()[0] if trial.error else ''}", flush=True)


def _found(tuning: Tuning, calls: list[TimedCase], *, dispatch: bool) -> dict[str, Any]:
    """What the search found, for machines."""
    from autokernel.tuner.shapes import dispatch_table

    outcome = tuning.outcome
    found: dict[str, Any] = {
        "config": outcome.config,
        "latency_us": outcome.latency_us,
        "own_us": tuning.own_us,
        "guess": tuning.space.config_at(tuning.guess),
        "evaluations": outcome.evaluations,
        "seconds": round(outcome.elapsed_s, 2),
        "why": outcome.why,
    }
    if dispatch and tuning.by_case:
        table = dispatch_table(tuning.by_case, [float(item.calls) for item in calls])
        found["dispatch"] = [
            {"case": item.case.label, "config": tuning.space.config_at(point)}
            for item, point in zip(calls, table.takes, strict=True)
        ]
        found["dispatch_loss"] = table.loss
    return found


def _show(tuning: Tuning, result: dict[str, Any], *, explain: bool) -> None:
    outcome = tuning.outcome
    print(f"{outcome.evaluations} configurations of {tuning.space.size} in {outcome.elapsed_s:.0f} s: {outcome.why}")
    for line in tuning.explanation if explain else ():
        print(f"  {line}")
    print(tuning.words)
    if outcome.config is None:
        print("no configuration ran")
        return
    speedup = f", {tuning.own_us / outcome.latency_us:.2f}x" if tuning.own_us and outcome.latency_us else ""
    verdict = f"faster than CONFIG was{speedup}" if tuning.is_faster else "as CONFIG has it"
    print(f"best: {outcome.latency_us:.1f} us, {verdict}: {outcome.config}")
    for row in result.get("dispatch", ()):
        print(f"  {row['case']}: {row['config']}")
