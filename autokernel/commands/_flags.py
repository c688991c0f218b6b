"""Flags that several commands share: their types, and the settings that they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autokernel.errors import ConfigError
from autokernel.settings import LIMITS
from autokernel.settings import OUTSIDE as OUTSIDE  # settings is light: no torch

if TYPE_CHECKING:
    from autokernel.settings import Settings

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="model.py, model.py:factory, package.module:Class or hf:<architecture or path>"
    ),
]
Minutes = Annotated[float | None, typer.Option(help="Wall-clock budget, everything included.")]
Hours = Annotated[float | None, typer.Option(help="The same in hours (default: 8).")]
Experiments = Annotated[int | None, typer.Option(help="Stop after this many experiments.")]
Ops = Annotated[str | None, typer.Option(help="Only these ops, e.g. rmsnorm,softmax.")]
Backend = Annotated[str | None, typer.Option(help="auto, triton, cuda or cpp (default: auto).")]
Dtype = Annotated[str | None, typer.Option(help="Convert the model to fp32, bf16 or fp16 first.")]
Patience = Annotated[int | None, typer.Option(help="Reverts in a row before moving on (default: 5).")]
Seed = Annotated[int | None, typer.Option(help="Seed of the run (default: 0).")]
CompileBaseline = Annotated[
    bool | None,
    typer.Option("--compile-baseline/--no-compile-baseline", help="Also measure torch.compile (default: yes)."),
]
Starters = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Begin with the <op>.py of this folder where it has one.")
]
Sandbox = Annotated[str | None, typer.Option(help="auto, strict or off: how candidates are confined (default: auto).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
RunName = Annotated[str, typer.Argument(metavar="[RUN]", help="Name of the run (default: the latest).")]
Op = Annotated[str | None, typer.Option(help="The op to work on (default: the loop's choice).")]


def changes_of(
    *,
    model: str | None,
    minutes: float | None,
    hours: float | None,
    experiments: int | None,
    ops: str | None,
    starters: Path | None,
    **others: Any,
) -> dict[str, Any]:
    """Fields of `Settings` for the flags that were given; `others` have the names of fields already.

    Raises: ConfigError.
    """
    given = {
        "model": model,
        "budget_s": budget_s(minutes, hours),
        "max_experiments": experiments,
        "ops": _ops(ops),
        "starters": starters.resolve() if starters else None,
        **others,
    }
    return {name: value for name, value in given.items() if value is not None}


def budget_s(minutes: float | None, hours: float | None) -> float | None:
    """Seconds of --minutes or --hours; None when neither is given. Raises: ConfigError."""
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
    from autokernel.loading import get_spec, is_captured

    for name in names:
        if is_captured(name):
            continue  # which there are is known once the model is profiled
        get_spec(name)  # an unknown name ends here, with the known ones
    return names


def fresh(changes: dict[str, Any]) -> Settings:
    """The settings of a new run. Raises: ConfigError when something in them cannot be."""
    from autokernel.agents import check_choice
    from autokernel.settings import Settings

    if "model" not in changes:
        raise ConfigError("no model is given", hint="autokernel run model.py (or --resume to go on with a run)")
    settings = Settings(workdir=Path.cwd(), **changes)
    check_choice(settings)  # a wrong name ends here, not after the model was profiled
    return settings


def resumed(name: str, changes: dict[str, Any], otherwise: str = "or start a new run") -> tuple[Settings, str]:
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
                f"change while a run goes on; {otherwise}",
            )
    limits = {field: value for field, value in changes.items() if field in LIMITS}
    return replace(settings, workdir=Path.cwd(), **limits), run_dir.name


def driven(changes: dict[str, Any]) -> tuple[Settings, str | None]:
    """The settings and the name of this directory's open driven run; the name is None where one is to begin.

    Raises: ConfigError when none is open and no model is given, or when the open one is of another kind than asked for.
    """
    name = open_run(Path.cwd())
    if name is not None:
        return resumed(name, changes, otherwise="or end that run by `autokernel finish` first")
    if "model" not in changes:
        raise ConfigError(
            "no driven run is open in this directory",
            hint="`autokernel next model.py` begins one",
        )
    return fresh({**changes, "agent": OUTSIDE}), None


def open_run(workdir: Path) -> str | None:
    """Name of the directory's newest run that is driven from outside and has not ended; None without one."""
    from autokernel.journal import Journal
    from autokernel.rundir import list_runs

    for run in reversed(list_runs(workdir)):
        agent = None
        for event in Journal(run.journal_path).events():  # not load_state: it reads every kernel of every run
            if event.kind == "run-started":
                agent = event.fields["settings"]["agent"]
            elif event.kind == "run-ended":
                agent = None
        if agent == OUTSIDE:
            return run.name
    return None
