"""What `autokernel doctor` finds, on this machine and on worse ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autokernel import keys, machine
from autokernel.doctor import (
    Check,
    Status,
    can_run,
    check_agent,
    check_clock,
    check_compiler,
    check_git,
    check_keys,
    check_python,
    check_sandbox,
    check_workdir,
)
from autokernel.judge import enforcement

ROOT = Path(__file__).resolve().parents[2]


def doctor_without_torch(*args, **kwargs):
    """The command on a machine where torch cannot be imported."""
    code = "\n".join(
        [
            "import sys",
            f"sys.path.insert(0, {str(ROOT)!r})",
            "sys.modules['torch'] = sys.modules['triton'] = None",
            "from autokernel.cli import main",
            "main()",
        ]
    )
    command = [sys.executable, "-c", code, "doctor", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)


def test_compiler_check_really_builds_and_counts_threads(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOKERNEL_BUILD_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = check_compiler()
    assert found.status is Status.OK
    assert found.detail.endswith("threads")
    assert int(found.detail.split()[-2]) >= 1
    assert list(tmp_path.iterdir()) == []  # built elsewhere, and thrown away
    import os

    assert os.environ["AUTOKERNEL_BUILD_DIR"] == str(tmp_path)


def test_a_compiler_that_fails_is_missing_with_its_own_message(monkeypatch, tmp_path):
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho 'kernel.cpp:2: fatal error: omp.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    found = check_compiler()
    assert found.status is Status.MISSING
    assert "omp.h" in found.detail
    assert found.fix
    assert not can_run([found])


def test_no_compiler_and_no_git_are_missing_and_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for found in (check_compiler(), check_git()):
        assert found.status is Status.MISSING
        assert found.needed
        assert found.fix


SECRET = "sk-secret-0123456789"


def test_keys_are_named_with_their_place_and_values_never(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "OPENAI_API_KEY": SECRET, "ANTHROPIC_API_KEY": "  "}
    found = check_keys(environ)
    assert (found.status, found.detail) == (Status.OK, "openai: OPENAI_API_KEY is set")
    path = keys.keys_path(environ)
    keys.store_keys(path, {"anthropic": SECRET, "openai": SECRET})
    found = check_keys(environ)
    assert found.detail == (
        f"anthropic: stored in {path} (mode 0600); openai: OPENAI_API_KEY is set (before the stored one)"
    )
    assert SECRET not in repr(check_keys(environ)) + repr(check_agent(environ))


def test_no_key_is_no_reason_not_to_run(tmp_path):
    found = check_keys({"XDG_CONFIG_HOME": str(tmp_path)})
    assert found.status is Status.MISSING
    assert "autokernel keys set" in found.fix
    assert can_run([found])


def test_a_file_of_keys_that_others_can_read_stops_a_run(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = keys.keys_path(environ)
    keys.store_keys(path, {"openai": SECRET})
    path.chmod(0o644)
    found = check_keys(environ)
    assert "mode 0644" in found.detail
    assert found.fix == f"chmod 600 {path}"
    assert not can_run([found])
    assert check_agent(environ).status is Status.WARN


@pytest.mark.parametrize(
    ("environ", "stored", "agent", "why"),
    [
        ({}, {}, "search", "no API key found"),
        ({"OPENAI_API_KEY": SECRET}, {}, "openai", "OPENAI_API_KEY is set"),
        ({"OPENAI_API_KEY": SECRET}, {"anthropic": SECRET}, "anthropic", "ANTHROPIC_API_KEY is set"),
        ({"ANTHROPIC_BASE_URL": "http://localhost:1"}, {}, "anthropic", "ANTHROPIC_BASE_URL is set"),
    ],
)
def test_the_agent_that_auto_takes_is_named_with_the_reason(tmp_path, environ, stored, agent, why):
    environ = {"XDG_CONFIG_HOME": str(tmp_path), **environ}
    if stored:
        keys.store_keys(keys.keys_path(environ), stored)
    found = check_agent(environ)
    assert found.status is Status.OK
    assert found.detail.startswith(f"{agent} ({why}")


def test_working_directory_is_tried_and_left_clean(tmp_path):
    assert check_workdir(tmp_path).status is Status.OK
    assert list(tmp_path.iterdir()) == []
    gone = check_workdir(tmp_path / "nowhere")
    assert gone.status is Status.MISSING
    assert "No such file" in gone.detail


def test_sandbox_lines_say_of_each_measure_whether_it_holds():
    lines = {check.name: check for check in check_sandbox()}
    found = enforcement.examine()
    for measure in found.measures:
        line = lines[f"sandbox: {measure.name}"]
        assert line.status is (Status.OK if measure.enforced else Status.WARN)
        assert not line.needed
    assert ("sandbox" in lines) == bool(found.missing)


def test_clock_check_names_cores_and_spread():
    found = check_clock()
    assert found.status in (Status.OK, Status.WARN)
    assert f"{machine.usable_cores()} cores" in found.detail
    assert bool(found.fix) == (found.status is Status.WARN)
    assert machine.spin_spread() >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_landlock_has_a_version_or_is_absent():
    abi = machine.landlock_abi()
    assert abi is None or abi >= 1


def test_only_needed_checks_decide():
    optional = Check(name="GPU", status=Status.MISSING, detail="")
    needed = Check(name="git", status=Status.MISSING, detail="", needed=True)
    assert can_run([check_python(), optional])
    assert not can_run([optional, needed])


def test_doctor_exits_3_and_prints_only_json_when_torch_is_missing(tmp_path):
    done = doctor_without_torch("--json", cwd=tmp_path)
    assert done.returncode == 3
    answer = json.loads(done.stdout)
    assert answer["can_run"] is False
    torch = next(check for check in answer["checks"] if check["name"] == "torch")
    assert (torch["status"], torch["fix"]) == ("missing", "pip install torch")
    assert done.stderr == ""


def test_doctor_table_names_the_command_that_mends_it(tmp_path):
    done = doctor_without_torch(cwd=tmp_path)
    assert done.returncode == 3
    assert "-> pip install torch" in done.stdout
    assert "cannot run" in done.stdout
