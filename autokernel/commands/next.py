"""`autokernel next`: what somebody outside needs for the next experiment of a run that she drives; begins the run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from autokernel.commands import _flags as flags


def next(
    model: flags.Model = None,
    op: flags.Op = None,
    minutes: flags.Minutes = None,
    hours: flags.Hours = None,
    experiments: flags.Experiments = None,
    ops: flags.Ops = None,
    backend: flags.Backend = None,
    dtype: flags.Dtype = None,
    patience: flags.Patience = None,
    seed: flags.Seed = None,
    compile_baseline: flags.CompileBaseline = None,
    starters: flags.Starters = None,
    sandbox: flags.Sandbox = None,
    brief: Annotated[bool, typer.Option("--brief", help="Leave out the playbook, for one who has read it.")] = False,
    as_json: flags.AsJson = False,
) -> None:
    """Say what to try next: begin a run of MODEL that is driven from outside, or go on with the open one."""
    changes = flags.changes_of(
        model=model,
        minutes=minutes,
        hours=hours,
        experiments=experiments,
        ops=ops,
        starters=starters,
        backend=backend,
        dtype=dtype,
        patience=patience,
        seed=seed,
        compile_baseline=compile_baseline,
        sandbox=sandbox,
    )
    settings, run = flags.driven(changes)
    from autokernel import handout
    from autokernel.driven import open_driven

    with open_driven(settings, run) as driven:
        turn = driven.next(op)
    submit = f'autokernel submit {f"--op {op} " if op else ""}-m "WHAT CHANGES, AND WHY"'
    told = json.dumps(handout.turn_json(turn, brief=brief)) if as_json else handout.turn_text(turn, submit, brief=brief)
    print(told)
