"""`autokernel mcp`: a run that is driven from outside, as tools over stdio for an MCP client."""

from __future__ import annotations

import importlib.util

from autokernel.commands import _flags as flags
from autokernel.errors import ConfigError


def mcp(
    model: flags.Model = None,
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
) -> None:
    """Serve next_experiment, submit_kernel, report and finish_run over stdio; MODEL is for a run that is to begin."""
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
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("the MCP server needs the mcp package", hint="pip install 'autokernel[mcp]'")
    from autokernel import mcpserver

    mcpserver.serve(lambda: flags.driven(changes))
