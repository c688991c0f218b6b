"""`autokernel run`: the settings from the flags, a view for the terminal, then the loop; the report at the end."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autokernel.errors import ConfigError

if TYPE_CHECKING:
    from autokernel.settings import Settings
    from autokernel.view import View

LIMITS = ("budget_s", "max_experiments", "sandbox", "base_url", "max_cost_usd", "max_tokens")
"""What may change when a run is resumed."""

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="model.py, model.py:factory, package.module:Class or hf:<architecture or path>"
    ),
]


def run(
    model: Model = None,
    minutes: Annotated[float | None, typer.Option(help="Wall-clock budget, everything included.")] = None,
    hours: Annotated[float | None, typer.Option(help="The same in hours (default: 8).")] = None,
    experiments: Annotated[int | None, typer.Option(help="Stop after this many experiments.")] = None,
    ops: Annotated[str | None, typer.Option(help="Only these ops, e.g. rmsnorm,softmax.")] = None,
    agent: Annotated[
        str | None, typer.Option(help="auto, anthropic, openai, command:PROGRAM, ensemble:A,B, search or replay:DIR.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="auto, triton, cuda or cpp (default: auto).")] = None,
    dtype: Annotated[str | None, typer.Option(help="Convert the model to fp32, bf16 or fp16 first.")] = None,
    patience: Annotated[int | None, typer.Option(help="Reverts in a row before moving on (default: 5).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run (default: 0).")] = None,
    compile_baseline: Annotated[
        bool | None,
        typer.Option("--compile-baseline/--no-compile-baseline", help="Also measure torch.compile (default: yes)."),
    ] = None,
    starters: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Begin with the <op>.py of this folder where it has one.")
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="auto, strict or off: how candidates are confined (default: auto).")
    ] = None,
    llm_model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model that the agent asks (default: the agent's).")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Another server: vLLM, Ollama, OpenRouter.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the model (default: the server's).")] = None,
    effort: Annotated[
        str | None, typer.Option(help="How long the model reasons: low, medium, high (default: the server's).")
    ] = None,
    max_cost: Annotated[float | None, typer.Option(metavar="USD", help="Stop before this is spent on calls.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop before calls need more tokens in total.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[RUN]", help="Go on with a run of this directory, the latest if not named.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="One line per event instead of the live view.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per event on stdout.")] = False,
) -> None:
    """Profile MODEL, then optimize its kernels one after another until the budget is used up."""
    given = {
        "model": model,
        "budget_s": _budget_s(minutes, hours),
        "max_experiments": experiments,
        "ops": _ops(ops),
        "agent": agent,
        "backend": backend,
        "dtype": dtype,
        "patience": patience,
        "seed": seed,
        "compile_baseline": compile_baseline,
        "starters": starters.resolve() if starters else None,
        "sandbox": sandbox,
        "llm_model": llm_model,
        "base_url": base_url,
        "temperature": temperature,
        "effort": effort,
        "max_cost_usd": max_cost,
        "max_tokens": max_tokens,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    settings, run_name = _resumed(resume, changes) if resume else (_fresh(changes), None)
    view = _view(settings, plain=plain, json_lines=json_lines)
    try:
        _optimize(settings, view, run_name, json_lines=json_lines)
    finally:
        view.close()


def _optimize(settings: Settings, view: View, run_name: str | None, *, json_lines: bool) -> None:
    from autokernel import report
    from autokernel.loading import load_file, toplevel

    loop = load_file(toplevel("orchestrate.py"), "autokernel_orchestrate")
    summary = loop.run(settings, view, resume=run_name)
    view.close()  # the report goes below the live view, not into it
    found = report.from_summary(summary, settings)
    if json_lines:
        print(json.dumps({"event": "report", **report.to_json(found)}), flush=True)
    else:
        print(report.render_text(found), flush=True)


def _budget_s(minutes: float | None, hours: float | None) -> float | None:
    if minutes is not None and hours is not None:
        raise ConfigError("--minutes and --hours are both given", hint="give one of them")
    for name, value, unit_s in (("--minutes", minutes, 60.0), ("--hours", hours, 3600.0)):
        if value is not None:
            if not 0 < value < float("inf"):  # not-a-number compares false, too
                raise ConfigError(f"{name} is {value}", hint="give a positive number")
            return value * unit_s
    return None


def _ops(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ConfigError(f"--ops {text!r} names no op", hint="give names such as --ops rmsnorm,softmax")
    from autokernel.loading import get_spec

    for name in names:
        get_spec(name)  # an unknown name ends here, with the known ones
    return names


def _fresh(changes: dict[str, Any]) -> Settings:
    from autokernel.agents import check_choice
    from autokernel.settings import Settings

    if "model" not in changes:
        raise ConfigError("no model is given", hint="autokernel run model.py (or --resume to go on with a run)")
    settings = Settings(workdir=Path.cwd(), **changes)
    check_choice(settings)  # a wrong name ends here, not after the model was profiled
    return settings


def _resumed(name: str, changes: dict[str, Any]) -> tuple[Settings, str]:
    """The settings of a run of this directory, with the limits given now, and the run's name.

    Raises: ConfigError when anything but a limit is to change: the run's experiments would no longer be comparable.
    """
    from autokernel.rundir import find_run
    from autokernel.state import load_state

    run_dir = find_run(Path.cwd(), name)
    settings = load_state(run_dir).settings
    for field, value in changes.items():
        if field not in LIMITS and value != getattr(settings, field):
            raise ConfigError(
                f"run {run_dir.name} has {field} = {getattr(settings, field)}, not {value}",
                hint="only --minutes, --hours, --experiments, --sandbox, --base-url, --max-cost and --max-tokens may "
                "change on --resume; or start a new run",
            )
    limits = {field: value for field, value in changes.items() if field in LIMITS}
    return replace(settings, workdir=Path.cwd(), **limits), run_dir.name


def _view(settings: Settings, *, plain: bool, json_lines: bool) -> View:
    from autokernel import live

    if json_lines:
        return live.JsonView(sys.stdout)
    if plain or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return live.PlainView(sys.stderr)
    return live.RichView(model=settings.model, budget_s=settings.budget_s)
