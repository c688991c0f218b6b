"""A night in minutes: thousands of scripted experiments in one real run, and how its process's memory grows.

    python benchmarks/long_night.py --experiments 3000 --minutes 12

Most candidates are wrong in a way that is found at once (a syntax error, an exception, zeros), some plainly slow, so
that an experiment takes a second or less; everything that a run keeps per experiment is as in any other run. Prints the
resident memory of the run's process every hundred experiments and its growth per thousand, the first tenth left out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.rundir import find_run
from autokernel.state import load_state
from tests.loop.conftest import HONEST
from tests.loop.faults import make_project, waiting

SAMPLE_EVERY = 100
MB = 1e6


def candidate(number: int) -> str:
    """A text that no other experiment has; one in fifty is built and run, one in two hundred is timed."""
    mark = f"# experiment {number}\n"
    if number % 200 == 0:
        return mark + waiting(300_000 + number)
    if number % 100 == 0:
        return mark + HONEST.replace("return right(x, weight, eps)", "return torch.zeros_like(x)")
    if number % 50 == 0:
        return mark + HONEST.replace("return right(x, weight, eps)", f"raise RuntimeError('not {number}')")
    return mark + HONEST + f"\ndef unfinished_{number}(\n"


def project(folder: Path, experiments: int) -> Path:
    """A user's directory with so many candidates."""
    workdir = make_project(folder)
    candidates = workdir / "candidates" / "rmsnorm"
    shutil.rmtree(candidates)
    candidates.mkdir()
    for number in range(1, experiments + 1):
        (candidates / f"{number:05d}.py").write_text(candidate(number))
    return workdir


class Memory:
    """Resident bytes of a process by the number of experiments that its results.tsv then had."""

    def __init__(self, pid: int, results: Path) -> None:
        self.samples: list[tuple[int, int]] = []
        self._pid, self._results = pid, results
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        seen = 0
        while True:
            time.sleep(0.5)
            try:
                lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
                resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
                done = self._results.read_bytes().count(b"\n") - 1
            except (OSError, StopIteration):
                if not Path(f"/proc/{self._pid}").exists():
                    return
                continue
            if done >= seen + SAMPLE_EVERY:
                seen = done
                self.samples.append((done, resident))


def run(workdir: Path, minutes: float) -> tuple[Memory, float]:
    """The whole run; its memory and its seconds."""
    flags = ["--ops", "rmsnorm", "--agent", "replay:candidates", "--starters", "starters", "--no-compile-baseline"]
    flags += ["--tune", "0", "--patience", "1000000", "--minutes", str(minutes), "--plain"]
    begin = time.monotonic()
    with (workdir.parent / "run.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "autokernel", "run", "model.py", *flags], cwd=workdir, stdout=log, stderr=log
        )
        memory = Memory(process.pid, workdir / "results.tsv")
        code = process.wait()
    if code:
        sys.exit(f"error: the run ended with {code}; see {workdir.parent / 'run.txt'}")
    return memory, time.monotonic() - begin


def growth(samples: list[tuple[int, int]]) -> float:
    """Bytes per experiment by a straight line through the samples but the first tenth: pools have filled by then."""
    settled = [each for each in samples if each[0] > samples[-1][0] / 10]
    middle_x = sum(x for x, _ in settled) / len(settled)
    middle_y = sum(y for _, y in settled) / len(settled)
    spread = sum((x - middle_x) ** 2 for x, _ in settled)
    return sum((x - middle_x) * (y - middle_y) for x, y in settled) / spread


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Thousands of scripted experiments, and the memory they take.")
    parser.add_argument("--experiments", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=30.0)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="long-night-"))
    workdir = project(folder, asked.experiments)
    memory, seconds = run(workdir, asked.minutes)
    begin = time.process_time()
    state = load_state(find_run(workdir))
    replay_s = time.process_time() - begin
    done = len(state.histories["rmsnorm"].experiments)
    print("| experiments | resident MB |\n| ---: | ---: |")
    for number, resident in memory.samples[:: max(1, len(memory.samples) // 10)]:
        print(f"| {number} | {resident / MB:.1f} |")
    print(f"\n{done} experiments in {seconds:.0f} s, {seconds / max(done, 1):.2f} s each.")
    if len(memory.samples) > 2:
        most = max(resident for _, resident in memory.samples)
        print(f"Resident at most {most / MB:.0f} MB; growth {growth(memory.samples) * 1000 / MB:.2f} MB per 1,000.")
    print(f"Replay of the journal: {replay_s:.2f} s.")
    used = sum(path.stat().st_size for path in (workdir / ".autokernel").rglob("*") if path.is_file())
    print(f"Run directory: {used / MB:.0f} MB.")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
