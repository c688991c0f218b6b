"""A whole run on a captured subgraph: planned, judged, searched, gone on with, put back in another process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autokernel import loading, results, wholemodel
from autokernel.live import PlainView
from autokernel.loading import load_file, toplevel
from autokernel.rundir import find_run
from autokernel.settings import Settings
from tests.loop.conftest import git

MODEL = (Path(__file__).parent / "models" / "gated.py").read_text()

APPLY = """
import sys, json, torch, autokernel
from autokernel.model import load_model
loaded = load_model("gated.py")
with torch.no_grad():
    before = loaded.model(*loaded.args)
    applied = autokernel.apply(loaded.model, "latest", ops=[sys.argv[1]])
    after = loaded.model(*loaded.args)
print(json.dumps([applied.calls, float((before - after).abs().max())]))
"""


@pytest.mark.slow
def test_a_run_on_a_captured_subgraph_from_plan_to_apply(tmp_path, monkeypatch):
    (tmp_path / "gated.py").write_text(MODEL)
    measure = wholemodel.measure
    monkeypatch.setattr(wholemodel, "measure", lambda *run: measure(*run[:-1], budget_s=min(run[-1], 10.0)))
    orchestrate = load_file(toplevel("orchestrate.py"), "autokernel_orchestrate")
    asked = Settings(
        model=str(tmp_path / "gated.py"),
        workdir=tmp_path,
        budget_s=600,
        ops=("graph",),
        agent="search",
        backend="cpp",
        max_experiments=1,
        compile_baseline=False,
        tune_s=0,
    )
    summary = orchestrate.run(asked, PlainView())
    assert summary.histories[0].op.startswith("graph_gelu_")
    assert summary.histories[0].planned.cases[0].calls == 2
    # On a busy machine the residual sum may take enough of the time to be an op, too, and get the first experiment.
    (history,) = (history for history in summary.histories if history.experiments)
    op, calls = history.op, history.planned.cases[0].calls
    integration = summary.integration
    assert integration["calls"].get(op) == calls or op in integration["left_out"]

    monkeypatch.setattr(loading, "_folders", [])  # as a process that has not planned it
    orchestrate.run(replace(asked, max_experiments=2), PlainView(), resume="latest")
    rows = results.read_rows(tmp_path / "results.tsv")
    assert [row.experiment for row in rows] == [1, 2]
    assert rows[0].op == op
    assert rows[1].op.startswith("graph_")
    run = find_run(tmp_path)
    files = git(run.worktree, "ls-tree", "--name-only", f"autokernel/{run.name}", "optimized/").splitlines()
    assert {f"optimized/{op}.py", f"optimized/{op}.reference.py"} <= set(files)

    command = [sys.executable, "-c", APPLY, op]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    called, difference = json.loads(done.stdout)
    assert called == {op: calls}
    assert difference < 1e-4
    judged = [sys.executable, "-m", "autokernel", "judge", str(run.optimized_dir(op) / "kernel.py"), "--no-timing"]
    done = subprocess.run(judged, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "PASS", done.stdout + done.stderr
