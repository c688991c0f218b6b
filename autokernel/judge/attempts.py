"""What a hostile candidate would try, tried in a throw-away process: the body of the sandbox's probe.

    python -I -c "... from autokernel.judge.attempts import main; main(folder, device)"

It prints one JSON object: which means can be used on this machine, and which measures hold with all of them in use.
Nothing here harms anyone when it succeeds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from autokernel.judge import landlock, orphans, sandbox
from autokernel.judge.sandbox import Policy

_MEMORY_BYTES = 1 << 30
_CLONE_NEWUSER = 0x10000000


def main(folder: str, device: str) -> None:
    """Find the usable means, then try everything with all of them; `folder` is empty and will be removed."""
    root = Path(folder).resolve()
    for name in ("scratch", "outside"):
        (root / name).mkdir()
    (root / "outside" / "secret").write_text("a key")
    policy, faults = _usable(root, device)
    found = {"policy": policy.to_json(), "faults": faults, "held": _held(policy, root, device)}
    sys.stdout.write(json.dumps(found))


def _usable(root: Path, device: str) -> tuple[Policy, dict[str, str]]:
    """The policy of all means that work one by one, and why the others do not."""
    abi = landlock.usable_abi()
    means = {
        "seccomp": Policy(seccomp=True),
        "capabilities": Policy(capabilities=True),
        "landlock": Policy(landlock=abi, protected=(str(root),)),
    }
    faults = {name: fault for name, policy in means.items() if (fault := _fault(name, policy, root, device))}
    policy = Policy(
        landlock=0 if "landlock" in faults else abi,
        seccomp="seccomp" not in faults,
        capabilities="capabilities" not in faults,
        protected=(str(root),),
    )
    return policy, faults


def _fault(name: str, policy: Policy, root: Path, device: str) -> str:
    """Why a child cannot live under this policy, "" when it can."""
    if sys.platform != "linux":
        return f"not on {sys.platform}"
    if name == "landlock" and not policy.landlock:
        return "the kernel has no Landlock, or a version before 2 (Linux 5.19)"

    def live() -> str:
        _confine(policy, root, device)
        return _work(root / "scratch" / name)

    return str(_in_child(live))


def _work(folder: Path) -> str:
    """What every kernel needs: folders, files and renames in its scratch, and to start a program."""
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("text")
    (folder / "inner" / "file").replace(folder / "file")
    code = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-I", "-S", "-c", "import json"])
    return "" if code == 0 else f"a program that it starts fails with {code}"


def _confine(policy: Policy, root: Path, device: str) -> None:
    # The filter and the rules are those of a child on `device`; there are no threads of a GPU's driver here.
    sandbox.begin(policy, device, _MEMORY_BYTES)
    sandbox.enter(policy, device, root / "scratch")
    os.chdir(root / "scratch")


def _held(policy: Policy, root: Path, device: str) -> dict[str, bool]:
    """Whether each measure holds: every attempt on it fails."""
    with _targets(root) as tcp_port:
        tries = _tries(root / "outside", os.getpid(), tcp_port)

        def attempt_all() -> dict[str, bool]:
            _confine(policy, root, device)
            return {name: all(map(_fails, attempts)) for name, attempts in tries.items()}

        held = _in_child(attempt_all)
    if not isinstance(held, dict):
        return {**dict.fromkeys(tries, False), "orphans": False}
    return {**held, "orphans": _kills_a_daemon(root)}


@contextlib.contextmanager
def _targets(root: Path) -> Iterator[int]:
    """Listeners to connect to: TCP (its port is the result), and UNIX sockets with and without a path."""
    with contextlib.ExitStack() as stack:
        port = 1  # nobody's, where there is no loopback interface to listen on
        with contextlib.suppress(OSError):
            tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = tcp.getsockname()[1]
        for address in (str(root / "outside" / "socket"), _abstract()):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):
                listener.bind(address)
                listener.listen()
        yield port


def _abstract() -> str:
    return f"\0autokernel-probe-{os.environ.get('AUTOKERNEL_PROBE', '')}"


def _tries(outside: Path, other: int, port: int) -> dict[str, list[Callable[[], object]]]:
    """measure -> what must fail; `other` is a process outside the sandbox."""
    secret = outside / "secret"
    return {
        "network": [
            lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
            lambda: socket.create_connection(("127.0.0.1", port), timeout=1),
        ],
        "UNIX sockets": [lambda: _connect(str(outside / "socket")), lambda: _connect(_abstract())],
        "writing files": [
            lambda: (outside / "new").write_text(""),
            lambda: secret.write_text("changed"),
            lambda: os.truncate(secret, 0),
            lambda: secret.rename(outside / "moved"),
            lambda: os.link(secret, "linked"),
            secret.unlink,
            (outside / "folder").mkdir,
        ],
        "reading files": [secret.read_text, lambda: list(outside.iterdir())],
        "file modes": [lambda: secret.chmod(0o777)],
        "signals": [lambda: os.kill(other, 0), lambda: os.kill(os.getppid(), signal.SIGCONT)],
        "other processes": [
            lambda: _read_memory(other),
            lambda: Path(f"/proc/{other}/environ").read_bytes(),
            lambda: resource.prlimit(other, resource.RLIMIT_CORE, (0, 0)),
            lambda: os.setpriority(os.PRIO_PROCESS, other, 19),
        ],
        "namespaces and mounts": [lambda: _system_call("unshare", ctypes.c_int(_CLONE_NEWUSER))],
        "memory limit": [lambda: mmap.mmap(-1, 2 * _MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)],
        "file size": [lambda: os.truncate(_touched("large"), sandbox.MAX_FILE_BYTES + 1)],
    }


def _fails(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, ValueError, AttributeError):  # resource.prlimit and others do not exist everywhere
        return True
    return False


def _connect(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)


def _touched(name: str) -> str:
    Path(name).touch()
    return name


def _system_call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def _read_memory(pid: int) -> None:
    buffer = ctypes.create_string_buffer(16)
    target = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 16)  # struct iovec; the parent has the same addresses
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    _system_call("process_vm_readv", ctypes.c_int(pid), target, one, target, one, zero)


def _kills_a_daemon(root: Path) -> bool:
    """Whether a process that has left group, session and parent is found and ended with its child."""
    if not orphans.adopt():
        return False
    note = root / "scratch" / "daemon"
    if os.fork() == 0:
        os.setsid()
        if daemon := os.fork():
            note.write_text(str(daemon))
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    os.wait()
    orphans.kill_orphans(())
    return bool(note.read_text()) and not _exists(int(note.read_text()))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _in_child(body: Callable[[], object]) -> object:
    """What `body` returned in a forked process, or a text that says how it failed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = body()
        except BaseException as error:
            answer = "".join(traceback.format_exception_only(error)).strip()
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else "the process died"
