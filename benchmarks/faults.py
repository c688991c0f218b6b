"""Kill runs of the real loop at random points, go on with each until it ends, and compare what they leave.

    python benchmarks/faults.py --kills 200 --seed 1 [--workers 2] [--keep]

Prints a line per run and a table of what was killed; ends with 1 when a run differs from the undisturbed one.
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.loop.faults import Ahead, Nursery, Told, assert_rows_name_the_commits, final_state, make_project
from tests.loop.faults import run_with_faults as run_killed

KILLS_PER_RUN = 12


class Campaign:
    """Runs until so many kills have been made; several workers may take from it."""

    def __init__(self, folder: Path, kills: int, seed: int, *, minutes: float, verbose: bool) -> None:
        self._verbose, self._end = verbose, time.monotonic() + 60 * minutes
        self.folder, self._kills, self._seed = folder, kills, seed
        self.told: list[Told] = []
        self.failed: list[str] = []
        self._lock, self._runs = threading.Lock(), 0

    def reference(self) -> None:
        """An undisturbed run, what it leaves, and the lines that it and its resumption come by."""
        folder = self.folder / "undisturbed"
        workdir = make_project(folder)
        with Nursery() as nursery:
            self._expect(nursery.attempt(workdir, trace=folder / "whole.json"))
            self.expected = final_state(workdir)
            self._expect(nursery.attempt(workdir, trace=folder / "resumed.json"))
        assert final_state(workdir) == self.expected, "going on with a finished run changed it"
        self.ahead = Ahead(folder / "whole.json", folder / "resumed.json")

    def work(self) -> None:
        """Make runs until there are kills enough."""
        with Nursery() as nursery:
            while (number := self._next()) is not None:
                folder = self.folder / f"run-{number}"
                begin = time.monotonic()
                told = Told()
                try:
                    workdir = run_killed(
                        nursery, folder, random.Random(f"{self._seed}-{number}"), self.ahead, told, kills=KILLS_PER_RUN
                    )
                    self._compare(workdir, told)
                    said = "same"
                except Exception as error:
                    self.failed.append(str(folder))
                    said = f"DIFFERS: {type(error).__name__}: {error}"
                with self._lock:
                    self.told.append(told)
                seconds = time.monotonic() - begin
                print(f"run {number}: {told.kills} kills, {len(told.steps)} steps, {seconds:.0f} s: {said}", flush=True)
                if said != "same" or self._verbose:
                    print("\n".join(f"    {step}" for step in told.steps), flush=True)

    def _compare(self, workdir: Path, told: Told) -> None:
        found = final_state(workdir)
        for name, value in self.expected.items():
            assert found[name] == value, f"{name}: {found[name]!r} where {value!r} was expected"
        if not told.journal_was_cut:
            assert_rows_name_the_commits(workdir)

    def _next(self) -> int | None:
        with self._lock:
            if sum(told.kills for told in self.told) >= self._kills or time.monotonic() > self._end:
                return None
            self._runs += 1
            return self._runs

    @staticmethod
    def _expect(code: int) -> None:
        assert code == 0, f"the undisturbed run ended with {code}"


def main() -> None:
    """Parse the arguments, run, print."""
    parser = argparse.ArgumentParser(description="Kill runs at random points and compare what they leave.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further run after so long")
    parser.add_argument("--keep", action="store_true", help="leave the directories of the runs")
    parser.add_argument("--verbose", action="store_true", help="print what was done to each run")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    begin = time.monotonic()
    campaign = Campaign(folder, asked.kills, asked.seed, minutes=asked.minutes, verbose=asked.verbose)
    campaign.reference()
    print(f"undisturbed: {time.monotonic() - begin:.0f} s with its resumption", flush=True)
    workers = [threading.Thread(target=campaign.work) for _ in range(asked.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    count = collections.Counter(kind for told in campaign.told for kind in told.kinds)
    print("\n| what was killed | times |\n| --- | ---: |")
    for kind, times in sorted(count.items()):
        print(f"| {kind} | {times} |")
    kills = sum(told.kills for told in campaign.told)
    print(f"\n{kills} kills in {len(campaign.told)} runs, {len(campaign.failed)} of which differ; ", end="")
    print(f"{time.monotonic() - begin:.0f} s.")
    if asked.keep or campaign.failed:
        print(f"The runs are in {folder}.")
    else:
        shutil.rmtree(folder)
    sys.exit(bool(campaign.failed))


if __name__ == "__main__":
    main()
