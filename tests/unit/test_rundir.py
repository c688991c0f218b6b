"""The run directory: names, finding a run, and one run at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from autokernel.errors import ConfigError
from autokernel.rundir import create_run, find_run, list_runs, lock

NOW = datetime(2026, 11, 29, 17, 26, tzinfo=UTC)


def test_run_is_named_after_time_and_model_and_hidden_from_git(tmp_path):
    run = create_run(tmp_path, "llama", NOW)
    assert run.name == "20261129-1726-llama"
    assert run.path == tmp_path / ".autokernel" / run.name
    assert (tmp_path / ".autokernel" / ".gitignore").read_text() == "*\n"
    assert run.kernel_path("rmsnorm", 7) == run.path / "experiments" / "rmsnorm-0007" / "kernel.py"
    assert run.experiments.is_dir()
    assert run.builds.is_dir()


def test_taken_names_get_a_number_and_the_newest_is_the_last_made(tmp_path):
    names = [create_run(tmp_path, "llama", NOW).name for _ in range(11)]
    assert names[0] == "20261129-1726-llama"
    assert names[1] == "20261129-1726-llama-2"
    assert names[10] == "20261129-1726-llama-11"
    assert [run.name for run in list_runs(tmp_path)] == names
    assert find_run(tmp_path).name == names[10]


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("hf:Org/Model_7B", "hf-org-model-7b"),
        ("../..", "model"),
        ("", "model"),
        ("x" * 90, "x" * 40),
        ("é.lock", "lock"),
    ],
)
def test_any_model_name_gives_a_name_that_git_and_file_systems_take(tmp_path, model, slug):
    assert create_run(tmp_path, model, NOW).name == f"20261129-1726-{slug}"


def test_latest_is_by_time_and_not_by_model_name(tmp_path):
    create_run(tmp_path, "zebra", NOW)
    newer = create_run(tmp_path, "ant", NOW + timedelta(seconds=20))
    assert find_run(tmp_path, None) == newer
    assert find_run(tmp_path, "latest") == newer
    assert find_run(tmp_path, "20261129-1726-zebra").name == "20261129-1726-zebra"


def test_latest_counts_time_and_not_the_clock_on_the_wall(tmp_path):
    autumn = datetime.fromisoformat("2026-10-25T02:30:00+02:00")
    create_run(tmp_path, "a", autumn)
    later = create_run(tmp_path, "b", datetime.fromisoformat("2026-10-25T02:10:00+01:00"))
    assert find_run(tmp_path) == later


def test_latest_passes_over_a_run_that_failed_before_its_journal_began(tmp_path):
    good = create_run(tmp_path, "llama", NOW)
    good.journal_path.touch()
    create_run(tmp_path, "llama", NOW + timedelta(minutes=1))
    assert find_run(tmp_path) == good


def test_unknown_run_is_an_error_that_lists_what_exists(tmp_path):
    with pytest.raises(ConfigError, match="no run"):
        find_run(tmp_path)
    create_run(tmp_path, "llama", NOW)
    for wrong in ("llam", "..", "lock"):
        with pytest.raises(ConfigError) as caught:
            find_run(tmp_path, wrong)
        assert "20261129-1726-llama" in caught.value.hint


def test_half_made_run_directory_is_no_run(tmp_path):
    good = create_run(tmp_path, "llama", NOW)
    (tmp_path / ".autokernel" / "20270101-0000-killed").mkdir()
    assert find_run(tmp_path) == good


def test_missing_working_directory_or_a_file_in_its_place_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError) as caught:
            create_run(workdir, "llama", NOW)
        assert caught.value.hint
    (tmp_path / ".autokernel").write_text("a file of that name")
    with pytest.raises(ConfigError):
        create_run(tmp_path, "llama", NOW)


READ_ONLY = """
import os, sys
from datetime import datetime
from pathlib import Path
from autokernel.errors import ConfigError
from autokernel.rundir import create_run, lock
if os.geteuid() == 0:
    os.setuid(65534)  # permissions do not bind root
try:
    create_run(Path(sys.argv[1]), "llama", datetime.now())
except ConfigError as error:
    print(error, "|", error.hint)
try:
    with lock(Path(sys.argv[1])):
        print("locked")
except ConfigError as error:
    print(error, "|", error.hint)
"""


def test_read_only_directory_is_a_clear_error():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        program = [sys.executable, "-c", READ_ONLY, folder]
        said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
        Path(folder).chmod(0o755)
    assert said.count("cannot be written") == 2
    assert said.count("directory that you can write to") == 2


HOLDER = """
import os, sys, time
from pathlib import Path
from autokernel.rundir import lock
with lock(Path(sys.argv[1])) as held:
    held.name_run("20261129-1726-llama")
    if sys.argv[2] == "fork" and os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(20)
        os._exit(0)
    if sys.argv[2] == "alone":
        print("held", flush=True)
    time.sleep(20)
"""


def start_holder(workdir, how):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(workdir), how], stdout=subprocess.PIPE, text=True)
    return holder, holder.stdout.readline().strip()


def test_second_run_is_told_who_holds_the_directory_and_a_killed_holder_holds_nothing(tmp_path):
    holder, _ = start_holder(tmp_path, "alone")
    try:
        with pytest.raises(ConfigError) as caught, lock(tmp_path):
            pass
        assert "20261129-1726-llama" in str(caught.value)
        assert f"pid {holder.pid}" in str(caught.value)
        assert f"kill -INT {holder.pid}" in caught.value.hint
    finally:
        holder.kill()
        holder.wait()
    with lock(tmp_path, "next") as held:
        assert held is not None
        assert '"run": "next"' in (tmp_path / ".autokernel" / "lock").read_text()


def test_forked_child_that_outlives_a_killed_run_does_not_hold_the_lock(tmp_path):
    holder, child = start_holder(tmp_path, "fork")
    holder.kill()
    holder.wait()
    try:
        os.kill(int(child), 0)
        with lock(tmp_path):
            assert (tmp_path / ".autokernel" / "lock").stat().st_size > 0
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_lock_is_given_back_also_after_an_error_and_can_be_taken_again(tmp_path):
    with pytest.raises(ZeroDivisionError), lock(tmp_path):
        raise ZeroDivisionError
    started = time.monotonic()
    with lock(tmp_path), pytest.raises(ConfigError, match=f"pid {os.getpid()}"), lock(tmp_path):
        pass
    assert time.monotonic() - started < 1
    with lock(tmp_path):
        pass
    assert (tmp_path / ".autokernel" / "lock").read_text() == ""


def test_lock_whose_owner_is_unreadable_is_still_a_lock(tmp_path):
    with lock(tmp_path):
        (tmp_path / ".autokernel" / "lock").write_text("{")
        with pytest.raises(ConfigError, match="owner unknown"), lock(tmp_path):
            pass
