"""Runs that are killed, cut off from power or from their disk, and gone on with: nothing is lost, doubled or misjudged.

`benchmarks/faults.py` kills at many more points; each place where it has found a fault is killed at here.
"""

import os
import random
import shutil
import subprocess

import pytest

from autokernel import errors, results
from autokernel.rundir import find_run
from autokernel.state import load_state
from tests.loop import faults
from tests.loop.faults import Ahead, Cut, Fault, Nursery, Told, final_state, make_project, run_with_faults

pytestmark = pytest.mark.slow  # half a minute for the undisturbed run, once

RANDOM_KILLS = 6
SEED = "night"


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(nursery, tmp_path_factory):
    """What an undisturbed run leaves, and the lines that an attempt will come by."""
    folder = tmp_path_factory.mktemp("undisturbed")
    workdir = make_project(folder)
    assert nursery.attempt(workdir, trace=folder / "whole.json") == 0
    state = final_state(workdir)
    assert [each[2:4] for each in state["experiments"]] == list(faults.EXPECTED)
    assert nursery.attempt(workdir, trace=folder / "resumed.json") == 0
    assert final_state(workdir) == state, "going on with a finished run changed it"
    return state, Ahead(folder / "whole.json", folder / "resumed.json")


def before(file, text, *, who="parent", hit=1):
    """The fault at the one line of `file` in the package that holds `text`."""
    lines = (faults.PACKAGE / file).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return Fault(kind="line", who=who, file=f"autokernel/{file}", line=number, hit=hit)


def test_killed_where_it_hurts(nursery, undisturbed, tmp_path):
    workdir = make_project(tmp_path)
    steps = [
        before("opening.py", 'journal.append("planned"'),  # the model must be profiled anew
        before("session.py", '"op-started", op=planned.op'),  # the starter's commit is in no journal yet
        before("session.py", "self._rows.add(history, experiment, work)"),  # recorded, without its row
        before("gitrepo.py", 'self._git("update-ref", self._rejected_ref(number), commit)'),
        before("session.py", 'self._journal.append("exported"'),  # the best kernel's commit is in no journal yet
        before("model_worker.py", "return child.wait(deadline_s)", who="both"),  # a child's folder is left
    ]
    for step in steps:
        assert nursery.attempt(workdir, [step]) == -9, step
        if step.file.endswith("gitrepo.py"):  # what git leaves when it is killed at the same moment
            run = find_run(workdir)
            rejected = workdir / ".git" / "refs" / "autokernel" / "rejected" / run.name
            rejected.mkdir(parents=True, exist_ok=True)
            (rejected / "2.lock").touch()
            assert Cut(file="results", fraction=0.5, last_line=False).make(workdir)
    assert nursery.attempt(workdir) == 0
    assert final_state(workdir) == undisturbed[0]
    faults.assert_rows_name_the_commits(workdir)


def test_killed_anywhere(nursery, undisturbed, tmp_path):
    told = Told()
    expected, ahead = undisturbed
    workdir = run_with_faults(nursery, tmp_path, random.Random(SEED), ahead, told, kills=RANDOM_KILLS)
    assert told.kills >= RANDOM_KILLS, told.steps
    assert final_state(workdir) == expected, told.steps


def fill(disk, left_bytes):
    """Write a file until so many bytes are left."""
    with (disk / "filler").open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, file.tell() + shutil.disk_usage(disk).free - left_bytes)


def test_full_disk_is_nobodys_verdict(nursery, undisturbed, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        workdir = make_project(disk)
        assert nursery.attempt(workdir, [before("session.py", "self._rows.add(history, experiment, work)")]) == -9
        for left_bytes in (2 << 20, 0):  # room for the journal, but none for a compiler; then none for anything
            fill(disk, left_bytes)
            assert nursery.attempt(workdir) in (errors.RepositoryError.exit_code, errors.LogError.exit_code)
            assert len(load_state(find_run(workdir)).histories["rmsnorm"].experiments) == 1
        (disk / "filler").unlink()
        assert nursery.attempt(workdir) == 0
        assert final_state(workdir) == undisturbed[0]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_results_that_somebody_edited_are_completed_and_not_overwritten(nursery, undisturbed, tmp_path):
    workdir = make_project(tmp_path)
    path = workdir / "results.tsv"
    assert nursery.attempt(workdir, [before("session.py", "self._rows.add(history, experiment, work)", hit=4)]) == -9
    header, first, _, third = path.read_text().splitlines()
    path.write_text("\n".join([header, third, first.replace("experiments of the tests", "my own words")]))
    shutil.copy(path, tmp_path / "edited.tsv")
    assert nursery.attempt(workdir) == 0
    assert path.read_text().startswith((tmp_path / "edited.tsv").read_text())
    rows = results.read_rows(path)
    assert [row.experiment for row in rows] == [3, 1, 2, 4, 5, 6]
    assert [row.correctness for row in sorted(rows, key=lambda row: row.experiment)] == [v for v, _ in faults.EXPECTED]
    assert load_state(find_run(workdir)).histories["rmsnorm"].incumbent == undisturbed[0]["incumbent"]
