"""The sandbox's probe and the user's choice of a mode, on this machine and on worse ones."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autokernel.errors import ConfigError
from autokernel.judge import attempts, enforcement, landlock, orphans, readable, sandbox, seccomp
from autokernel.judge.sandbox import Policy
from autokernel.settings import Settings
from autokernel.state import RunState

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def held_under(policy, tmp_path):
    for name in ("scratch", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "secret").write_text("a key")
    return attempts._held(policy, tmp_path, "cpu")


def test_every_measure_has_its_entry():
    found = enforcement.examine()
    assert [measure.name for measure in found.measures] == list(enforcement.MEASURES)
    assert all(measure.detail for measure in found.measures)


@linux
def test_the_attempts_succeed_where_nothing_is_enforced(tmp_path):
    held = held_under(Policy(), tmp_path)
    assert set(held) == set(enforcement.MEASURES)
    always = {"memory limit", "file size", "orphans"}
    assert {name for name, holds in held.items() if holds} - {"namespaces and mounts"} == always


@linux
def test_landlock_alone_leaves_what_only_seccomp_can(tmp_path):
    if not landlock.usable_abi():
        pytest.skip("no Landlock here")
    held = held_under(Policy(landlock=landlock.usable_abi(), protected=(str(tmp_path),)), tmp_path)
    assert held["writing files"]
    assert held["reading files"]
    assert not held["file modes"]
    assert not held["network"]


@linux
def test_an_older_landlock_is_said_to_let_signals_through(tmp_path):
    if landlock.usable_abi() < 6:
        pytest.skip("this kernel's Landlock cannot do it either")
    held = held_under(Policy(landlock=5, seccomp=True, protected=(str(tmp_path),)), tmp_path)
    assert not held["signals"]
    assert held["writing files"]


def test_strict_refuses_what_cannot_be_enforced(monkeypatch):
    measure = enforcement.Measure(name="network", enforced=False, detail="")
    monkeypatch.setattr(
        enforcement, "examine", lambda device: enforcement.Examined(policy=Policy(), measures=(measure,))
    )
    with pytest.raises(ConfigError, match="network") as caught:
        enforcement.decide("strict", "cpu")
    assert "doctor" in caught.value.hint
    enforcement._warn.cache_clear()
    assert enforcement.decide("auto", "cpu").landlock == 0
    assert "network" in enforcement.summary("auto", "cpu")


def test_auto_warns_once(monkeypatch, caplog):
    measure = enforcement.Measure(name="signals", enforced=False, detail="")
    monkeypatch.setattr(
        enforcement, "examine", lambda device: enforcement.Examined(policy=Policy(), measures=(measure,))
    )
    enforcement._warn.cache_clear()
    for _ in range(3):
        enforcement.decide("auto", "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "not enforced on candidates here: signals (see `autokernel doctor`)"
    ]


def test_another_system_is_told_without_a_crash(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    found = enforcement.examine.__wrapped__("cpu")
    assert found.policy == Policy()
    assert "network" in found.missing
    assert "file size" not in found.missing


def test_off_uses_nothing_and_says_so():
    assert enforcement.decide("off", "cpu") == Policy()
    assert "off" in enforcement.summary("off", "cpu")
    with pytest.raises(ConfigError, match="sometimes"):
        enforcement.decide("sometimes", "cpu")


def test_the_policy_travels_as_json():
    policy = Policy(landlock=7, seccomp=True, capabilities=True, protected=("/a", "/b"), builds="/c")
    assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


def test_settings_know_the_modes_and_read_old_journals(tmp_path):
    settings = Settings(model="m.py", workdir=tmp_path, sandbox="strict")
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    old = settings.to_json()
    del old["sandbox"]
    assert Settings.from_json(old).sandbox == "auto"
    with pytest.raises(ConfigError, match="maybe"):
        replace(settings, sandbox="maybe")
    assert RunState(settings=settings).sandbox == ""


# -- what may be read


def test_roots_hold_python_and_not_what_is_protected(tmp_path):
    roots = readable.readable_roots((str(Path.home()), str(tmp_path)))
    assert all(Path(root).is_absolute() for root in roots)

    def readable_(path):
        return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)

    assert readable_(os.path.realpath(json.__file__))
    assert readable_(os.path.realpath(sandbox.__file__))
    assert readable_("/usr/bin")
    for path in (Path.home(), Path.home() / ".ssh", tmp_path, Path("/tmp"), Path("/etc/shadow"), Path("/dev")):
        assert not readable_(str(path))
    assert "/" not in roots


def test_a_root_above_something_protected_becomes_its_other_children(tmp_path):
    for name in ("a/secret", "a/open", "b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "secret")
    found = readable._without(str(tmp_path), [str(tmp_path / "a" / "secret")])
    assert sorted(found) == [str(tmp_path / "a" / "open"), str(tmp_path / "b")]
    assert readable._without(str(tmp_path / "b"), [str(tmp_path / "b")]) == []


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_folders_that_one_may_not_enter_are_passed_over(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    (closed / "bin").mkdir(parents=True)
    closed.chmod(0o700)
    monkeypatch.setenv("PATH", f"{closed / 'bin'}:{os.environ['PATH']}")

    def as_nobody():
        os.setuid(65534)
        return list(readable.readable_roots.__wrapped__((str(tmp_path),)))

    found = attempts._in_child(as_nobody)
    assert isinstance(found, list), found
    assert "/usr" in found
    assert str(closed / "bin") not in found


# -- the filter


@pytest.mark.parametrize("name", ["x86_64", "aarch64"])
@pytest.mark.parametrize("loose", [False, True])
def test_filter_is_a_valid_program(name, loose):
    machine = seccomp._ARCHITECTURES[name]
    program = seccomp.assemble(machine, unix_sockets=loose, affinity=loose)
    assert len(program) < 4096
    for place, (code, yes, no, _) in enumerate(program):
        if code in (seccomp._JUMP_EQ, seccomp._JUMP_GE, seccomp._JUMP_SET):
            assert place + 1 + max(yes, no) < len(program)
    assert program[-1] == seccomp._return(seccomp._ALLOW)


def verdict(name, number, *arguments, audit=None, loose=False):
    """What the filter decides on a call, by running the program."""
    machine = seccomp._ARCHITECTURES[name]
    words = {0: number, 4: machine.audit if audit is None else audit}
    words |= {16 + 8 * i: value & 0xFFFFFFFF for i, value in enumerate(arguments)}
    program = seccomp.assemble(machine, unix_sockets=loose, affinity=loose)
    place = accumulator = 0
    while True:
        code, yes, no, operand = program[place]
        place += 1
        if code == seccomp._LOAD:
            accumulator = words.get(operand, 0)
        elif code == seccomp._AND:
            accumulator &= operand
        elif code == seccomp._RETURN:
            return operand
        else:
            holds = {
                seccomp._JUMP_EQ: accumulator == operand,
                seccomp._JUMP_GE: accumulator >= operand,
                seccomp._JUMP_SET: bool(accumulator & operand),
            }[code]
            place += yes if holds else no


@pytest.mark.parametrize(("name", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_filter_decides_alike_on_both_architectures(name, column):
    deny, allow = seccomp._DENY, seccomp._ALLOW
    for numbers in seccomp._BLOCKED.values():
        if numbers[column] is not None:
            assert verdict(name, numbers[column]) == deny
    socket, pair, clone = seccomp._SOCKET[column], seccomp._SOCKETPAIR[column], seccomp._CLONE[column]
    assert verdict(name, socket, 1) == verdict(name, socket, 2) == deny
    assert verdict(name, socket, 1, loose=True) == allow
    assert verdict(name, socket, 2, loose=True) == deny
    assert verdict(name, pair, 1, 1 | 0o2000000) == allow
    assert verdict(name, pair, 1, 2) == verdict(name, pair, 2, 1) == deny
    assert verdict(name, clone, 0x3D0F00) == allow
    assert verdict(name, clone, 0x10000011) == deny
    assert verdict(name, seccomp._CLONE3[column]) & 0xFFFF0000 == seccomp._FAIL
    assert verdict(name, seccomp._BY_PROCESS["prlimit64"][column], 0) == allow
    assert verdict(name, seccomp._BY_PROCESS["prlimit64"][column], 17) == deny
    assert verdict(name, 0) == allow
    assert verdict(name, 0, audit=0x40000003) == deny


def test_filter_rejects_x32():
    assert verdict("x86_64", 0x40000000 | 41, 2) == seccomp._DENY


# -- what is left behind


@linux
def test_trees_are_found_across_sessions_and_killed_without_their_neighbours():
    code = "import os, time\nos.setsid()\nprint(os.fork(), flush=True)\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    neighbour = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert parent.stdout is not None
        inner = next(int(line) for line in parent.stdout if line.strip() != "0")
        assert orphans.count_descendants([parent.pid])[parent.pid] == 1
        orphans.kill_trees([parent.pid])
        assert parent.wait(10) < 0
        assert neighbour.poll() is None
        deadline = time.monotonic() + 5
        while inner in orphans._process_table()[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert inner not in orphans._process_table()[0]
    finally:
        for process in (parent, neighbour):
            process.kill()
            process.wait()
