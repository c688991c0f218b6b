"""`autokernel finish`: end the open driven run: its kernels into the model, the whole model measured, the report."""

from __future__ import annotations

import json

from autokernel.commands import _flags as flags


def finish(as_json: flags.AsJson = False) -> None:
    """Measure the whole model with the best kernels of the open driven run, close the run, print the report."""
    settings, run = flags.driven({})
    from autokernel import report
    from autokernel.driven import open_driven

    with open_driven(settings, run) as driven:
        found = report.from_summary(driven.finish())
    print(json.dumps(report.to_json(found)) if as_json else report.render_text(found))
