"""The record of one search: what was asked, what came of it, which best was accepted; read back to go on exactly.

On top of the run's journal format. Lines, in order of a search:

    begin      which search this is; another search must not go on from it
    start      points about to be measured
    done       their trials, how many of them were timed, and the seconds used so far
    stopped    the points of the last start were left on purpose (Ctrl-C), not by a crash
    confirmed  an interleaved comparison: the points, and the one that is the best from now on

A start that nothing follows means that the process died while it measured. Which point did it is known when there was
one; of several, each is measured alone when the search goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autokernel.errors import LogError
from autokernel.journal import Journal
from autokernel.records import KernelResources
from autokernel.tuner.space import Point
from autokernel.tuner.trials import Status, Trial

CRASHED = "the tuner's process ended while this was measured"


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a search stands. `crashed` was under way when it died, and has no trial yet."""

    trials: list[Trial] = field(default_factory=list)
    evaluations: int = 0
    elapsed_s: float = 0.0
    best: Point | None = None
    compared: int = 0  # trials of which it is decided whether they are the best
    crashed: tuple[Point, ...] = ()


class TrialLog:
    """Writes and reads a search's journal. Without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._journal = None if path is None else Journal(path)

    def resume(self, identity: Mapping[str, Any]) -> Progress:
        """What the journal holds; a new search is begun when it is empty.

        Raises: LogError when it is damaged, or of a search with another `identity`.
        """
        progress = Progress()
        if self._journal is None:
            return progress
        events = self._journal.events()
        if not events:
            self._write("begin", identity=identity)
            return progress
        if events[0].kind != "begin" or events[0].fields.get("identity") != identity:
            raise LogError(
                f"{self._journal.path} is of another search", hint="name another journal, or give the same arguments"
            )
        try:
            for event in events[1:]:
                _apply(progress, event.kind, event.fields)
        except (KeyError, TypeError, ValueError) as error:
            raise LogError(f"{self._journal.path}, line {event.seq}: {error!r}", hint="name another journal")
        return progress

    def start(self, points: Sequence[Point]) -> None:
        self._write("start", points=points)

    def stopped(self) -> None:
        self._write("stopped")

    def done(self, trials: Sequence[Trial], timed: int, elapsed_s: float) -> None:
        self._write("done", trials=[_trial_record(t) for t in trials], timed=timed, elapsed_s=elapsed_s)

    def confirmed(self, points: Sequence[Point], best: Point, compared: int, elapsed_s: float) -> None:
        self._write("confirmed", points=points, best=best, compared=compared, elapsed_s=elapsed_s)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _write(self, kind: str, **fields: Any) -> None:
        if self._journal is not None:
            self._journal.append(kind, **fields)


def crash_of(point: Point) -> Trial:
    """The trial of a point that ended the tuner's own process."""
    return Trial(point=point, status=Status.LAUNCH_ERROR, error=CRASHED)


def _apply(progress: Progress, kind: str, fields: Mapping[str, Any]) -> None:
    match kind:
        case "start":
            progress.crashed = tuple(tuple(point) for point in fields["points"])
        case "stopped":
            progress.crashed = ()
        case "done":
            progress.trials += [_trial_of(record) for record in fields["trials"]]
            progress.evaluations += int(fields["timed"])
            progress.elapsed_s = float(fields["elapsed_s"])
            progress.crashed = ()
        case "confirmed":
            progress.best = tuple(fields["best"])
            progress.compared = int(fields["compared"])
            progress.elapsed_s = float(fields["elapsed_s"])
        case _:
            raise ValueError(f"unknown kind {kind!r}")


def _trial_record(trial: Trial) -> dict[str, Any]:
    """The trial without what it does not have."""
    record = {name: value for name, value in asdict(trial).items() if value not in (None, "")}
    return record | {"point": list(trial.point), "status": str(trial.status)}


def _trial_of(record: Mapping[str, Any]) -> Trial:
    resources = record.get("resources")
    return Trial(
        **{
            **record,
            "point": tuple(record["point"]),
            "status": Status(record["status"]),
            "resources": None if resources is None else KernelResources(**resources),
        }
    )
