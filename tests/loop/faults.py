"""Runs of the real loop that are killed at random points and gone on with, and what must be the same in the end.

A process that has imported everything (`Nursery`) forks one process per attempt, so that an attempt costs no seconds of
imports; that process runs the loop of `orchestrate.py` with real git, a real judge and real children. A `Fault` says
where it dies by SIGKILL: at a line of the code, inside a call of git, or at some moment; and which of it dies:
the run's process, one of its children, or all of them. A `Cut` then takes bytes off a file's end, as a power loss does.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from autokernel import results
from autokernel.loading import load_file, toplevel
from autokernel.rundir import find_run, list_runs
from autokernel.state import load_state
from tests.loop.conftest import HERE, HONEST, git

ROOT = toplevel("orchestrate.py").parent
PACKAGE = ROOT / "autokernel"
LINES_OF = (
    "orchestrate.py",
    *(
        f"autokernel/{name}.py"
        for name in (
            "bench",
            "gitcall",
            "gitrepo",
            "journal",
            "model_worker",
            "opening",
            "recording",
            "results",
            "rundir",
            "session",
            "wholemodel",
        )
    ),
)
"""Where a run may be killed at any line."""

MEASURE_S = 1.0
"""For the whole model at the end: nobody looks at the number."""

EXPERIMENTS = 6
"""The run's cap, two fewer than there are candidates: it must hold over any number of resumed runs."""

BUG = 70
"""Exit code of an attempt that ended with an exception that is no AutokernelError."""

ATTEMPT_LIMIT_S = 180.0
MOMENTS_S = 8.0
MOST_GIT_CALLS = 30
CHILD_DIES = 0.4
"""How often a child dies in an attempt, too."""

KILLS = "kills"
"""Name of the file that has a byte for every kill."""
GIT_S = 0.006
"""How long a call of git takes here; it is killed somewhere within."""

MODEL = (HERE / "models" / "norms.py").read_text().replace("4, 512, 1024", "1, 16, 1024")


def waiting(turns: int) -> str:
    """A right kernel that waits `turns` turns of a loop in every row."""
    wait = f"for (volatile int i = 0; i < {turns}; ++i) {{}}\n        double scale = 1 /"
    return HONEST.replace("double scale = 1 /", wait)


CANDIDATES = {
    "1_zeros": HONEST.replace("return right(x, weight, eps)", "return torch.zeros_like(x)"),
    "2_broken": "def kernel_fn(",
    "3_slower": waiting(400_000),
    "4_fast": HONEST,
    "5_raises": HONEST.replace("return right(x, weight, eps)", "raise RuntimeError('not today')"),
    "6_slow": waiting(60_000),
    "7_one_too_many": HONEST.replace("-O2", "-O1"),
    "8_another": HONEST.replace("-O2", "-O3"),
}
STARTER = waiting(30_000)
EXPECTED = (
    ("FAIL", "REVERT"),
    ("CRASH", "REVERT"),
    ("SCREENED", "REVERT"),
    ("PASS", "KEEP"),
    ("CRASH", "REVERT"),
    ("SCREENED", "REVERT"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Where an attempt dies: the `hit`-th time at `line` of `file`, or `delay_s` into the `hit`-th call of git, or
    `delay_s` after its start; and who: `parent`, `child` (one of its own) or `both`."""

    kind: str  # line, git or moment
    who: str
    file: str = ""
    line: int = 0
    hit: int = 1
    delay_s: float = 0.0

    def __str__(self) -> str:
        where = {
            "line": f"{self.file}:{self.line} (time {self.hit})",
            "git": f"git call {self.hit} after {1e3 * self.delay_s:.1f} ms",
            "moment": f"{self.delay_s:.1f} s",
        }
        return f"{self.who} at {where[self.kind]}"


@dataclass(slots=True, kw_only=True)
class Trace:
    """Where an attempt came by: each line with how many journal events (starts aside) it had written by then, at the
    first time and at the last."""

    lines: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    events: int = 0

    def pass_by(self, at: tuple[str, int], event: str, frame) -> None:
        """Note the line, and whether an event of the journal is written with it."""
        first, _ = self.lines.get(at, (self.events, 0))
        self.lines[at] = (first, self.events)
        if (event, frame.f_code.co_name, at[0]) == ("return", "append", "autokernel/journal.py"):
            self.events += frame.f_locals["kind"] != "run-started"


class Ahead:
    """The lines that an attempt will still come by, as traces of an undisturbed run and of its resumption tell."""

    def __init__(self, whole: Path, resumed: Path) -> None:
        self._whole = json.loads(whole.read_text())
        self._always = [(file, line) for file, line, first, _ in json.loads(resumed.read_text()) if first == 0]

    def of(self, workdir: Path) -> list[tuple[str, int]]:
        """For an attempt on the run in `workdir`, which may not have begun."""
        events = [line for path in workdir.glob(".autokernel/*/journal.jsonl") for line in path.open("rb")]
        done = len([line for line in events if b'"kind":"run-started"' not in line])
        ahead = [(file, line) for file, line, _, last in self._whole if last >= done]
        return ahead + (self._always if events else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A file that loses its end: all behind `fraction` of the file, or of its last line alone."""

    file: str  # journal or results
    fraction: float
    last_line: bool

    def make(self, workdir: Path) -> bool:
        """Cut, if there is something to cut; whether there was."""
        path = workdir / "results.tsv"
        if self.file == "journal":
            journals = list(workdir.glob(".autokernel/*/journal.jsonl"))
            path = journals[-1] if len(journals) == 1 else path
        if not path.exists() or not path.stat().st_size:
            return False
        content = path.read_bytes()
        begin = content.rfind(b"\n", 0, -1) + 1 if self.last_line else 0
        os.truncate(path, begin + int(self.fraction * (len(content) - begin)))
        return True

    def __str__(self) -> str:
        return f"{self.file} cut at {self.fraction:.3f} of {'its last line' if self.last_line else 'all'}"


# -- the process that an attempt is


def _main() -> None:
    """Body of the nursery: one line of JSON asks for an attempt, two lines answer: its pid, then how it ended."""
    importlib.import_module("autokernel.bench")  # with torch, for all attempts

    loop = load_file(toplevel("orchestrate.py"), "autokernel_orchestrate")
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _attempt(loop, asked)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def _attempt(loop, asked) -> None:
    from autokernel import wholemodel
    from autokernel.errors import AutokernelError
    from autokernel.live import PlainView
    from autokernel.settings import Settings

    workdir, code = Path(asked["workdir"]), BUG
    os.chdir(workdir)
    output = os.open(workdir.parent / "attempts.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    measure = wholemodel.measure
    wholemodel.measure = lambda *run: measure(*run[:-1], budget_s=MEASURE_S)
    settings = Settings(
        model="model.py",
        workdir=workdir,
        budget_s=asked["budget_s"],
        max_experiments=EXPERIMENTS,
        ops=("rmsnorm",),
        agent="replay:candidates",
        patience=50,
        compile_baseline=False,
        starters=workdir / "starters",
        tune_s=0,
    )
    trace = Trace()
    try:
        _arm([Fault(**fault) for fault in asked["faults"]], trace, Path(asked["note"]))
        loop.run(settings, PlainView(sys.stderr), resume=asked["resume"])
        code = 0
    except AutokernelError as error:
        print(f"{type(error).__name__}: {error} (hint: {error.hint})", file=sys.stderr, flush=True)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    sys.settrace(None)
    if asked["trace"]:
        Path(asked["trace"]).write_text(json.dumps([[*at, *times] for at, times in trace.lines.items()]))
    os._exit(code)


def _arm(faults: Sequence[Fault], trace: Trace, note: Path) -> None:
    """Have this process or its children die as the faults say; without one, note the lines passed by in `trace`."""
    calls = {fault.hit: fault for fault in faults if fault.kind == "git"}
    if calls:
        _arm_git(calls, note)
    left = {fault: fault.hit for fault in faults if fault.kind == "line"}
    if faults and not left:
        return
    names = {str(ROOT / name): name for name in LINES_OF}

    def on_line(frame, event, _):
        at = (names[frame.f_code.co_filename], frame.f_lineno)
        if not faults:
            trace.pass_by(at, event, frame)
        for fault in left if event == "line" else ():
            if at == (fault.file, fault.line):
                left[fault] -= 1
                if left[fault] == 0:
                    die(os.getpid(), fault.who, note)
        return on_line

    sys.settrace(lambda frame, *_: on_line if frame.f_code.co_filename in names else None)


def _arm_git(calls: Mapping[int, Fault], note: Path) -> None:
    counted = itertools.count(1)

    def on_event(event, arguments):
        if event == "subprocess.Popen" and arguments[0] == "env":
            fault = calls.get(next(counted))
            if fault is not None:
                killer = threading.Timer(fault.delay_s, die, (os.getpid(), fault.who, note))
                killer.daemon = True
                killer.start()

    sys.addaudithook(on_event)


def die(pid: int, who: str, note: Path) -> None:
    """SIGKILL to the process, to its newest child, or to all of them and it; one more byte in `note` tells of it."""
    below = children_of(pid) if who != "parent" else []
    victims = {"parent": [pid], "child": below[-1:], "both": [*below, pid]}[who]
    if victims:
        with note.open("a") as file:
            file.write(".")
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Direct children, oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] not in "ZX":
                found.append((int(fields[19]), int(path.parent.name)))
    return [child for _, child in sorted(found)]


# -- the side of the test


class Nursery:
    """Starts attempts; use as a context manager."""

    def __enter__(self) -> Nursery:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", "from tests.loop.faults import _main; _main()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(60)

    def attempt(
        self, workdir: Path, faults: Sequence[Fault] = (), *, trace: Path | None = None, budget_s: float = 3600.0
    ) -> int:
        """Run, or go on, until the end or a deadly fault; the exit code, -9 when it was killed."""
        note = workdir.parent / KILLS
        asked = {
            "workdir": str(workdir),
            "resume": "latest" if begun(workdir) else None,
            "faults": [asdict(fault) for fault in faults],
            "note": str(note),
            "trace": str(trace) if trace else None,
            "budget_s": budget_s,
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        pid = json.loads(self._process.stdout.readline())["pid"]
        timers = [threading.Timer(ATTEMPT_LIMIT_S, die, (pid, "both", note))]
        moments = [fault for fault in faults if fault.kind == "moment"]
        timers += [threading.Timer(fault.delay_s, die, (pid, fault.who, note)) for fault in moments]
        start = time.monotonic()
        for timer in timers:
            timer.start()
        try:
            code: int = json.loads(self._process.stdout.readline())["code"]
        finally:
            for timer in timers:
                timer.cancel()
                timer.join()
        assert time.monotonic() - start < ATTEMPT_LIMIT_S, f"the attempt hung: {faults}"
        return code


def begun(workdir: Path) -> bool:
    """Whether there is a run to go on with: its journal has a first line."""
    return any(run.journal_path.exists() and b"\n" in run.journal_path.read_bytes() for run in list_runs(workdir))


def make_project(folder: Path) -> Path:
    """A user's repository, dirty, with the model, the starter and the candidates."""
    workdir = folder / "project"
    (workdir / "starters").mkdir(parents=True)
    (workdir / "candidates" / "rmsnorm").mkdir(parents=True)
    (workdir / "model.py").write_text(MODEL)
    (workdir / "starters" / "rmsnorm.py").write_text(STARTER)
    for name, text in CANDIDATES.items():
        (workdir / "candidates" / "rmsnorm" / f"{name}.py").write_text(text)
    (workdir / "notes.txt").write_text("committed\n")
    git(workdir, "init", "-q")
    git(workdir, "add", "-A")
    git(workdir, "commit", "-qm", "mine")
    (workdir / "notes.txt").write_text("not committed\n")
    return workdir


def draw_faults(rng: random.Random, lines: Sequence[tuple[str, int]]) -> list[Fault]:
    """What ends an attempt, and now and then a child that dies before."""
    deadly = _draw_fault(rng, lines, rng.choice(("parent", "parent", "both")))
    return [deadly] if rng.random() > CHILD_DIES else [deadly, _draw_fault(rng, lines, "child")]


def _draw_fault(rng: random.Random, lines: Sequence[tuple[str, int]], who: str) -> Fault:
    """A random fault; every line of the loop's code is as likely, however often it runs."""
    kind = rng.choices(("line", "git", "moment"), (6, 2, 2))[0]
    if kind == "line":
        file, line = rng.choice(lines)
        return Fault(kind=kind, who=who, file=file, line=line, hit=rng.choice((1, 1, 1, 1, 2)))
    if kind == "git":
        return Fault(kind=kind, who=who, hit=rng.randint(1, MOST_GIT_CALLS), delay_s=rng.uniform(0, GIT_S))
    return Fault(kind=kind, who=who, delay_s=rng.uniform(0, MOMENTS_S))


def draw_cut(rng: random.Random) -> Cut | None:
    """A power loss after one kill in three."""
    if rng.random() > 1 / 3:
        return None
    return Cut(file=rng.choice(("journal", "results")), fraction=rng.random(), last_line=rng.random() < 2 / 3)


@dataclass(slots=True, kw_only=True)
class Told:
    """What happened to one run until it ended."""

    kills: int = 0
    steps: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    journal_was_cut: bool = False


def run_with_faults(
    nursery: Nursery, folder: Path, rng: random.Random, ahead: Ahead, told: Told, *, kills: int
) -> Path:
    """A run that is killed up to `kills` times, gone on with each time, until it ends; where it is."""
    workdir = make_project(folder)
    while True:
        faults = draw_faults(rng, ahead.of(workdir)) if told.kills < kills else []
        code = nursery.attempt(workdir, faults)
        told.steps.append(f"{' and '.join(map(str, faults)) or 'undisturbed'}: {code}")
        assert code != BUG, "an exception that nobody foresaw; see attempts.txt"
        assert code == 0 or faults, "an undisturbed attempt failed; see attempts.txt"
        told.kills = (folder / KILLS).stat().st_size if (folder / KILLS).exists() else 0
        if code == 0:
            return workdir
        told.kinds += [f"{fault.kind}, {fault.who}" for fault in faults[:1]]
        cut = draw_cut(rng)
        if cut is not None and cut.make(workdir):
            told.steps.append(str(cut))
            told.kinds.append(f"{cut.file} cut {'in its last line' if cut.last_line else 'anywhere'}")
            told.journal_was_cut |= cut.file == "journal"


def final_state(workdir: Path) -> dict[str, object]:
    """All of a run's outcome that does not depend on noise: journal, results.tsv, branch, refs, files."""
    run = find_run(workdir)
    state = load_state(run)
    history = state.histories["rmsnorm"]
    branch = git(workdir, "rev-list", "--reverse", f"autokernel/{run.name}").splitlines()
    refs = git(workdir, "for-each-ref", "--format=%(refname)", f"refs/autokernel/rejected/{run.name}").splitlines()
    messages = [git(workdir, "log", "-1", "--format=%B", commit) for commit in branch]
    rows = results.read_rows(workdir / "results.tsv")
    return {
        "experiments": [
            (each.number, each.op, str(each.outcome.verdict), str(each.decision), each.proposal.digest)
            for each in history.experiments
        ],
        "incumbent": history.incumbent,
        "pending": state.pending,
        "ended": state.ended,
        "integrated": state.integration is not None,
        "tip": state.tip == branch[-1],
        "rows": [(row.experiment, row.op, row.correctness, row.decision) for row in rows if row.run == run.name],
        "branch": [_kind_of(message, run.name) for message in messages],
        "rejected": {int(ref.rsplit("/", 1)[1]): git(workdir, "show", f"{ref}:kernel.py") for ref in refs},
        "kernel.py": git(workdir, "show", f"{branch[-1]}:kernel.py"),
        "best": git(workdir, "show", f"{branch[-1]}:optimized/rmsnorm.py"),
        "worktree": git(run.worktree, "status", "--porcelain"),
        "exported": (run.optimized_dir("rmsnorm") / "kernel.py").read_text(),
        "scratch": [path.name for path in (workdir / ".autokernel").glob("model-worker-*")],
        "locks": [path.name for path in (workdir / ".git").rglob("*.lock")],
        "user": git(workdir, "status", "--porcelain", "--", ":!results.tsv.torn"),
    }


def _kind_of(message: str, run: str) -> str:
    """What a commit of the branch is for, by its trailers."""
    if found := re.search(rf"^Experiment: {re.escape(run)}/(\d+)$", message, re.MULTILINE):
        return f"experiment {found[1]}"
    if re.search(r"^Starter: ", message, re.MULTILINE):
        return "starter"
    return "best" if "best kernel of this run" in message else "root"


def assert_rows_name_the_commits(workdir: Path) -> None:
    """Each row of results.tsv names the commit that the journal names, which is on the branch or under its own ref."""
    run = find_run(workdir)
    experiments = load_state(run).histories["rmsnorm"].experiments
    rows = {row.experiment: row for row in results.read_rows(workdir / "results.tsv") if row.run == run.name}
    for each in experiments:
        assert rows[each.number].commit == each.commit
        if str(each.decision) == "KEEP":
            git(workdir, "merge-base", "--is-ancestor", each.commit, f"autokernel/{run.name}")
        else:
            assert git(workdir, "rev-parse", f"refs/autokernel/rejected/{run.name}/{each.number}") == each.commit
