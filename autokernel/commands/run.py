"""`autokernel run`: the settings from the flags, a view for the terminal, then the loop; the report at the end."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from autokernel.commands import _flags as flags
from autokernel.errors import ConfigError

if TYPE_CHECKING:
    from autokernel.notify import Notifier
    from autokernel.settings import Settings
    from autokernel.view import View


def run(
    model: flags.Model = None,
    minutes: flags.Minutes = None,
    hours: flags.Hours = None,
    experiments: flags.Experiments = None,
    ops: flags.Ops = None,
    agent: Annotated[
        str | None, typer.Option(help="auto, anthropic, openai, command:PROGRAM, ensemble:A,B, search or replay:DIR.")
    ] = None,
    backend: flags.Backend = None,
    dtype: flags.Dtype = None,
    patience: flags.Patience = None,
    seed: flags.Seed = None,
    compile_baseline: flags.CompileBaseline = None,
    starters: flags.Starters = None,
    sandbox: flags.Sandbox = None,
    tune: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="At most, for an edit's best configuration (default: 45; 0: none)."),
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
    notify: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Run this with the summary as JSON on stdin when the run ends or stops."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="One line per event instead of the live view.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per event on stdout.")] = False,
) -> None:
    """Profile MODEL, then optimize its kernels one after another until the budget is used up."""
    changes = flags.changes_of(
        model=model,
        minutes=minutes,
        hours=hours,
        experiments=experiments,
        ops=ops,
        starters=starters,
        agent=agent,
        backend=backend,
        dtype=dtype,
        patience=patience,
        seed=seed,
        compile_baseline=compile_baseline,
        sandbox=sandbox,
        tune_s=tune,
        llm_model=llm_model,
        base_url=base_url,
        temperature=temperature,
        effort=effort,
        max_cost_usd=max_cost,
        max_tokens=max_tokens,
    )
    if agent == flags.OUTSIDE:
        raise ConfigError("--agent outside proposes nothing by itself", hint="`autokernel next MODEL` begins its runs")
    settings, run_name = flags.resumed(resume, changes) if resume else (flags.fresh(changes), None)
    notifier = None
    if notify is not None:
        from autokernel.notify import Notifier

        notifier = Notifier(notify)
    view = _view(settings, plain=plain, json_lines=json_lines)
    try:
        _optimize(settings, view, run_name, notifier, json_lines=json_lines)
    finally:
        view.close()


def _optimize(
    settings: Settings, view: View, run_name: str | None, notifier: Notifier | None, *, json_lines: bool
) -> None:
    from autokernel import report
    from autokernel.loading import load_file, toplevel

    loop = load_file(toplevel("orchestrate.py"), "autokernel_orchestrate")
    try:
        summary = loop.run(settings, view, resume=run_name)
    except Exception as error:  # told and raised again: whoever sleeps has to know of bugs, too
        if notifier:
            notifier.stopped(error, run_name)
        raise
    view.close()  # the report goes below the live view, not into it
    found = report.from_summary(summary)
    if json_lines:
        print(json.dumps({"event": "report", **report.to_json(found)}), flush=True)
    else:
        print(report.render_text(found), flush=True)
    if notifier:
        notifier.ended(found)


def _view(settings: Settings, *, plain: bool, json_lines: bool) -> View:
    from autokernel import live

    if json_lines:
        return live.JsonView(sys.stdout)
    if plain or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return live.PlainView(sys.stderr)
    return live.RichView(model=settings.model, budget_s=settings.budget_s)
