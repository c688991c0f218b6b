"""Open a run: a new one with its profile, directory, branch and journal, or one of this directory that goes on.

Whatever can be wrong is found here, before anything is written that cannot be used later.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from autokernel import __version__, keys, recording, results, rundir, wholemodel
from autokernel.backends import choose_backend
from autokernel.budget import Budget
from autokernel.errors import RepositoryError
from autokernel.gitrepo import RunRepository
from autokernel.journal import Journal, write_whole
from autokernel.judge import enforcement
from autokernel.loading import look_in
from autokernel.model_worker import sweep
from autokernel.report import environment
from autokernel.rundir import RunDir
from autokernel.session import Session
from autokernel.settings import LIMITS, Settings, device_of
from autokernel.state import RunState, load_state
from autokernel.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """What a session works with. `state` is that of a run that goes on, None for one that begins."""

    settings: Settings
    run_dir: RunDir
    journal: Journal
    repo: RunRepository
    plan: dict[str, Any]
    budget: Budget
    sandbox: str  # what of the judge's sandbox is enforced here, for the report
    state: RunState | None = None


@contextmanager
def open_session(
    settings: Settings, view: View, resume: str | None = None, *, same_clock: bool = False
) -> Iterator[Session]:
    """A new run, or the one called `resume` ("latest" for the newest), for as long as the context is open.

    Limits (time, experiments) are those of `settings`; everything else of a resumed run is as it was started. A killed
    run has what is left of its time, unless `settings` gives it another. With `same_clock` its time goes on counting
    from when it was last started, unless a limit changes: an outside agent opens the run anew for every step.
    Raises: ConfigError, RepositoryError or LogError.
    """
    with rundir.lock(settings.workdir) as held, keys.withheld(os.environ) as secrets:  # no child inherits the secrets
        check_surroundings(settings)
        sweep(settings.workdir)
        run = _begin(settings, view) if resume is None else _reopen(settings, view, resume, same_clock=same_clock)
        held.name_run(run.run_dir.name)
        with Session(run, view, secrets) as session:
            session.mend_results()
            view.note(f"run {run.run_dir.name}; experiments go to branch {run.repo.branch}")
            yield session


def _begin(settings: Settings, view: View) -> OpenRun:
    settings = replace(settings, backend=choose_backend(settings.backend))
    budget = Budget(settings)
    sandbox = _enforced(settings)
    view.stage("profiling the model")
    plan = wholemodel.profile(settings)  # a model that does not run leaves no run behind
    run_dir = rundir.create_run(settings.workdir, wholemodel.short_name(settings.model), _utc_now())
    repo = RunRepository.create(settings.workdir, run_dir.path, run_dir.name)
    journal = _started(run_dir, settings, sandbox, budget)
    _planned(run_dir, journal, plan)
    look_in(run_dir.regions)
    return OpenRun(
        settings=settings, run_dir=run_dir, journal=journal, repo=repo, plan=plan, budget=budget, sandbox=sandbox
    )


def _reopen(asked: Settings, view: View, name: str, *, same_clock: bool) -> OpenRun:
    run_dir = rundir.find_run(asked.workdir, name)
    state = load_state(run_dir)
    limits: dict[str, Any] = {name: getattr(asked, name) for name in LIMITS}
    settings = replace(state.settings, workdir=asked.workdir, backend=choose_backend(state.settings.backend), **limits)
    goes_on = same_clock and state.ended is None and settings == state.settings
    sandbox = state.sandbox if goes_on else _enforced(settings)  # trying it takes a second; the judge does, too
    repo = RunRepository.open(settings.workdir, run_dir.path, run_dir.name)
    repo.restore(state.tip or repo.first_commit())
    budget = Budget(settings, already_s=_already_s(state, settings, goes_on=goes_on))
    if goes_on:
        journal = _journal(run_dir, budget)
    else:
        journal = _started(run_dir, settings, sandbox, budget)
        state = replace(state, unusable=frozenset())  # perhaps a starter passes by now
    plan = state.plan
    if plan is None:  # killed between its start and its plan
        view.stage("profiling the model")
        plan = wholemodel.profile(settings)
        _planned(run_dir, journal, plan)
    look_in(run_dir.regions)
    return OpenRun(
        settings=settings,
        run_dir=run_dir,
        journal=journal,
        repo=repo,
        plan=dict(plan),
        budget=budget,
        sandbox=sandbox,
        state=state,
    )


def _already_s(state: RunState, settings: Settings, *, goes_on: bool) -> float:
    """Seconds of its time that a run has used: a killed run goes on with the rest, unless it is given another time."""
    if goes_on:
        return max(state.elapsed_s, _seconds_since(state.started_utc))
    was_killed = state.ended is None and settings.budget_s == state.settings.budget_s
    return state.elapsed_s if was_killed else 0.0


def _journal(run_dir: RunDir, budget: Budget) -> Journal:
    return Journal(run_dir.journal_path, also=lambda: {"elapsed_s": round(budget.elapsed_s(), 2)})


def _started(run_dir: RunDir, settings: Settings, sandbox: str, budget: Budget) -> Journal:
    journal = _journal(run_dir, budget)
    journal.append(
        "run-started",
        settings=settings.to_json(),
        version=__version__,
        sandbox=sandbox,
        environment=environment(),
    )
    return journal


def _planned(run_dir: RunDir, journal: Journal, plan: Mapping[str, Any]) -> None:
    for op, files in plan["plan"].get("files", {}).items():
        for name, text in files.items():
            write_whole(run_dir.regions / op / name, text)
    write_whole(run_dir.path / "plan.json", json.dumps(plan, indent=1))
    journal.append("planned", **plan)


def _enforced(settings: Settings) -> str:
    """What of the judge's sandbox is enforced here. Raises: ConfigError for `strict` where something cannot be."""
    device = device_of(settings.backend)
    enforcement.decide(settings.sandbox, device)
    return enforcement.summary(settings.sandbox, device)


def check_surroundings(settings: Settings) -> None:
    """Fail before the night, not in it: git, and a results.tsv that can be appended to.

    Raises: RepositoryError, LogError.
    """
    if shutil.which("git") is None:
        raise RepositoryError("git is not installed", hint="install git: every experiment is a commit")
    path = settings.workdir / recording.RESULTS
    if path.exists():
        results.read_rows(path)


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _seconds_since(stamp: str) -> float:
    began = datetime.datetime.fromisoformat(stamp) if stamp else _utc_now()
    return max(0.0, (_utc_now() - began).total_seconds())
