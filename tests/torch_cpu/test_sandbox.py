"""Hostile candidates in the judge's real children: what each tries fails, and the judge says what happened."""

import ctypes
import itertools
import os
import resource
import secrets
import signal
import socket
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from autokernel.errors import WorkerError
from autokernel.judge import attempts, nursery, orphans, sandbox, wire
from autokernel.judge.enforcement import decide, examine
from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.landlock import usable_abi
from autokernel.judge.rejected import Rejected
from autokernel.judge.sandbox import Policy
from autokernel.judge.worker import Worker
from autokernel.loading import PACKAGE_ROOT, get_spec, starter_path
from autokernel.records import TensorMeta, TimedCase
from autokernel.spec import build_case

pytestmark = pytest.mark.skipif(
    not usable_abi() or not examine().policy.seccomp,
    reason="this kernel lets no process confine itself: Landlock 2 and seccomp are needed",
)

HONEST = (Path(__file__).parents[1] / "loop" / "honest.py").read_text()

HARNESS = """
import ctypes, json, os, resource, signal, shlex, socket, sys, time
from pathlib import Path

def system_call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def become(*command):
    # Past Python's audit hooks: what the sandbox forbids must not hang on them.
    words = (ctypes.c_char_p * (len(command) + 1))(*map(os.fsencode, command), None)
    ctypes.CDLL(None).execv(words[0], words)
    os._exit(127)

def checked(*command):
    status = started(*command)
    assert status != 127, "not found"
    if status:
        raise PermissionError(f"exit status {status}")

def started(*command):
    return ctypes.CDLL(None).system(shlex.join(command).encode()) >> 8

def attempt():
{body}

try:
    outcome = "succeeded: " + repr(attempt())
except BaseException as error:
    outcome = "failed: " + repr(error)
Path("outcome").write_text(outcome)

def kernel_fn(x):
    return x.clone()
"""


class Victims:
    """What a candidate may want to reach: files, sockets and processes of this test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "run" / "journal.jsonl"
        self.other = folder / "run" / "builds" / "other" / "kernel.py"
        self.outside = folder / "outside"
        for path in (self.journal, self.other, self.outside / "file"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("precious")
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.settimeout(0.05)
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.log.bind(str(folder / "log"))
        self.abstract_name = f"autokernel-test-{secrets.token_hex(8)}"
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind("\0" + self.abstract_name)
        for sock in (self.unix, self.abstract):
            sock.listen()

    def names(self) -> dict[str, object]:
        """For the texts of the candidates."""
        return {
            "judge": os.getpid(),
            "home": Path.home(),
            "outside": self.outside,
            "run": self.journal.parent,
            "journal": self.journal,
            "other": self.other,
            "root": PACKAGE_ROOT.parent,
            "package": PACKAGE_ROOT,
            "git": git_file(),
            "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "unix": self.folder / "socket",
            "log": self.folder / "log",
            "abstract": self.abstract_name,
            "address": ctypes.addressof(SECRET),
        }

    def close(self) -> None:
        for sock in (self.tcp, self.udp, self.unix, self.log, self.abstract):
            sock.close()


def git_file() -> Path:
    """A file of the checkout's git folder, which in a worktree is itself a file."""
    git = PACKAGE_ROOT.parent / ".git"
    return git / "config" if git.is_dir() else git


SECRET = ctypes.create_string_buffer(b"the expected values")


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    found = Victims(tmp_path_factory.mktemp("victims"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def server(victims):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "sk-secret")
        with ForkServer(builds=victims.journal.parent / "builds") as server:
            yield server


@pytest.fixture
def attempt(server, victims):
    """Have a candidate run `body`; what it says of that, and its scratch folder."""

    def run(body):
        scratch = victims.journal.parent / "builds" / secrets.token_hex(8)
        scratch.mkdir(parents=True)
        names = victims.names()
        text = textwrap.indent(textwrap.dedent(body), "    ")
        for name, value in names.items():
            text = text.replace(f"<{name}>", str(value))
        (scratch / "kernel.py").write_text(HARNESS.replace("{body}", text))
        with Worker(server, {"kernel": str(scratch / "kernel.py")}, scratch) as worker:
            worker.load()
            x = torch.arange(6.0)
            outputs, _ = worker.run([{"x": x}], [TensorMeta(shape=(6,), dtype="fp32")])
            assert torch.equal(outputs[0], x)
        return (scratch / "outcome").read_text(), scratch

    return run


NETWORK = {
    "tcp": "socket.create_connection(('127.0.0.1', <tcp>), timeout=2)",
    "tcp listener": "socket.create_server(('127.0.0.1', 0))",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'secret', ('127.0.0.1', <udp>))",
    "udp over ipv6": "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "packet": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "vsock": "socket.socket(socket.AF_VSOCK)",
    "unix": "socket.socket(socket.AF_UNIX).connect('<unix>')",
    "abstract unix": "socket.socket(socket.AF_UNIX).connect(chr(0) + '<abstract>')",
    "a pair turned elsewhere": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect('<log>')",
    "io_uring": "system_call(425, ctypes.c_uint(2), ctypes.create_string_buffer(256))",
    "by a program": "checked(sys.executable, '-c', 'import socket; socket.socket()')",
}
WRITING = {
    "home": "Path('<home>/autokernel-was-here').write_text('x')",
    "parent of scratch": "Path('../was-here').write_text('x')",
    "another candidate": "Path('<other>').write_text('x')",
    "/tmp": "Path('/tmp/autokernel-was-here').write_text('x')",
    "/dev/shm": "Path('/dev/shm/autokernel-was-here').write_text('x')",
    "the package": "Path('<package>/judge/compare.py').open('a')",
    "the oracle": "Path('<root>/reference.py').open('r+')",
    "the journal": "Path('<journal>').open('a')",
    "truncate": "os.truncate('<journal>', 0)",
    "git": "Path('<git>').open('a')",
    "git's configuration": "checked('git', '-C', '<root>', 'config', 'a.b', 'c')",
    "chmod": "os.chmod('<outside>/file', 0o777)",
    "fchmod": "os.fchmod(os.open(sys.executable, os.O_RDONLY), 0o777)",
    "chown": "os.chown('<outside>/file', 1, 1)",
    "xattr": "os.setxattr('<outside>/file', 'user.x', b'x')",
    "unlink": "os.unlink('<outside>/file')",
    "rename": "os.rename('<outside>/file', 'mine')",
    "rename onto": "Path('mine').write_text('x'); os.rename('mine', '<outside>/file')",
    "link": "os.link('<outside>/file', 'mine')",
    "symlink in scratch": "os.symlink('<outside>/file', 'mine'); Path('mine').write_text('x')",
    "mkdir": "os.mkdir('<outside>/folder')",
    "mount": "system_call(165, b'none', b'<outside>', b'tmpfs', ctypes.c_ulong(0), None)",
    "user namespace": "system_call(272, ctypes.c_int(0x10000000))",
    "clone into a namespace": "system_call(56, ctypes.c_ulong(0x10000011), None, None, None, None)",
}
READING = {
    "the journal": "Path('<journal>').read_text()",
    "another candidate": "Path('<other>').read_text()",
    "the run's folder": "os.listdir('<run>')",
    "home": "os.listdir('<home>')",
    "the checkout": "os.listdir('<root>')",
    "/tmp": "os.listdir('/tmp')",
    "password hashes": "Path('/etc/shadow').read_text()",
    "symlink in scratch": "os.symlink('<journal>', 'mine'); return Path('mine').read_text()",
    "environment of the judge": "Path('/proc/<judge>/environ').read_bytes()",
    "memory of the judge": "Path('/proc/<judge>/mem').open('rb')",
    "files of the judge": "os.readlink('/proc/<judge>/fd/0')",
    "sockets of the judge": "Path('/proc/<judge>/fd/1').open('rb')",
    "environment of the server": "Path(f'/proc/{os.getppid()}/environ').read_bytes()",
    "open by handle": "system_call(304, ctypes.c_int(-100), ctypes.create_string_buffer(64), ctypes.c_int(0))",
}
PROCESSES = {
    "kill the judge": "os.kill(<judge>, signal.SIGKILL)",
    "stop the judge": "os.kill(<judge>, signal.SIGSTOP)",
    "kill the server": "os.kill(os.getppid(), signal.SIGKILL)",
    "kill all groups": "os.killpg(os.getpgid(<judge>), signal.SIGKILL)",
    "by a descriptor": "signal.pidfd_send_signal(os.pidfd_open(<judge>), signal.SIGKILL)",
    "ptrace": "system_call(101, ctypes.c_long(16), ctypes.c_long(<judge>), None, None)",
    "limits of the judge": "resource.prlimit(<judge>, resource.RLIMIT_CPU, (1, 1))",
    "priority of the judge": "os.setpriority(os.PRIO_PROCESS, <judge>, 19)",
    "own priority": "os.setpriority(os.PRIO_PROCESS, 0, -5)",
    "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "cores of the judge": "os.sched_setaffinity(<judge>, {0})",
    "read the judge's memory": """
        buffer = ctypes.create_string_buffer(8)
        mine = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
        theirs = (ctypes.c_void_p * 2)(<address>, 8)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        system_call(310, ctypes.c_int(<judge>), mine, one, theirs, one, none)
        return buffer.raw
    """,
    "a descriptor of the judge": """
        judge = os.pidfd_open(<judge>)
        system_call(438, ctypes.c_int(judge), ctypes.c_int(0), ctypes.c_uint(0))
    """,
    "bpf": "system_call(321, ctypes.c_int(0), ctypes.create_string_buffer(128), ctypes.c_uint(128))",
    "keys": "system_call(250, ctypes.c_int(0), ctypes.c_int(-3), ctypes.c_int(1))",
    "System V memory": "system_call(29, ctypes.c_int(0), ctypes.c_size_t(4096), ctypes.c_int(0o1600))",
}
EVERY = {
    f"{group}: {name}": body
    for group, bodies in {
        "network": NETWORK,
        "writing": WRITING,
        "reading": READING,
        "processes": PROCESSES,
    }.items()
    for name, body in bodies.items()
}
X86_ONLY = ("system_call(",)  # numbers of x86-64
FAILURES = ("PermissionError", "CalledProcessError", "OSError(18", "FileNotFoundError(2")


@pytest.mark.parametrize("name", EVERY)
def test_attempt_fails_and_the_judge_goes_on(attempt, victims, name):
    body = EVERY[name]
    if any(mark in body for mark in X86_ONLY) and os.uname().machine != "x86_64":
        pytest.skip("this attempt uses a system call's number on x86-64")
    outcome, _ = attempt(body)
    assert outcome.startswith("failed: "), outcome
    assert any(kind in outcome for kind in FAILURES), outcome  # refused, not mistyped
    for path in (victims.journal, victims.other, victims.outside / "file"):
        assert path.read_text() == "precious"
    for path in (Path.home(), Path("/tmp"), Path("/dev/shm")):
        assert not (path / "autokernel-was-here").exists()


def test_nothing_arrives_by_udp(attempt, victims):
    attempt(NETWORK["udp"])
    with pytest.raises(TimeoutError):
        victims.udp.recv(16)


def test_what_the_attempts_look_for_is_there(victims):
    for path in (victims.unix, victims.log):
        assert Path(path.getsockname()).exists()
    assert (PACKAGE_ROOT / "judge" / "compare.py").exists()


def test_no_secret_of_the_judge_is_in_the_environment(attempt):
    outcome, scratch = attempt("return dict(os.environ)")
    assert "sk-secret" not in outcome
    assert "OPENAI" not in outcome
    assert str(scratch) in outcome


WORKING = {
    "scratch": """
        os.makedirs('a/b')
        Path('a/b/file').write_text('x')
        os.rename('a/b/file', 'file')
        os.unlink('file')
        os.truncate('kernel.py', os.path.getsize('kernel.py'))
        os.rmdir('a/b')
    """,
    "temporary files": """
        import tempfile
        with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as folder:
            assert file.name.startswith(os.getcwd()), file.name
    """,
    "a pair of sockets": "a, b = socket.socketpair(); a.sendall(b'x'); assert b.recv(1) == b'x'",
    "threads and programs": """
        import threading
        thread = threading.Thread(target=lambda: None)
        thread.start(); thread.join()
        assert started('/bin/sh', '-c', 'sleep 0 & wait') == 0
        process = os.fork()
        if process == 0:
            become(sys.executable, '-c', 'import time; time.sleep(9)')
        os.kill(process, signal.SIGKILL); os.waitpid(process, 0)
    """,
    "imports": "import sqlite3, multiprocessing, numpy, torch.nn, torch._inductor.config, autokernel.native",
    "OpenMP": '''
        from autokernel.native import build
        library = build("""
            #include <omp.h>
            #include <cstdint>
            extern "C" int sum(int64_t n) {
              int64_t total = 0;
              #pragma omp parallel for reduction(+:total) num_threads(4)
              for (int64_t i = 0; i < n; ++i) total += i;
              return total == n * (n - 1) / 2 ? 0 : 1;
            }
        """)
        library.sum(100000)
        import torch
        torch.set_num_threads(4)
        assert torch.ones(1 << 20).sum() == 1 << 20
    ''',
}


@pytest.mark.parametrize("name", WORKING)
def test_what_kernels_need_works(attempt, name):
    outcome, _ = attempt(WORKING[name])
    assert outcome == "succeeded: None", outcome


@pytest.mark.parametrize("abi", range(2, 8))
def test_older_landlock_still_builds(server, victims, monkeypatch, abi):
    if abi > usable_abi():
        pytest.skip(f"this kernel has Landlock {usable_abi()}")
    monkeypatch.setitem(server.policy, "landlock", abi)
    outcome, _ = evaluate(server, victims, "")
    assert outcome.verdict == "PASS", outcome.reason


def test_torch_compile_baseline_works(server, victims):
    case = TimedCase(case=build_case("rmsnorm", "model", x=(8, 64), weight=(64,)), calls=1)
    builds = victims.journal.parent / "builds" / "baseline"
    judge = Judge(server=server, spec=get_spec("rmsnorm"), dtypes=("fp32",), cases=[case], builds=builds)
    baseline, _ = judge.baseline(starter_path("rmsnorm", "cpp").read_text(), compiled=True)
    assert "compile" in baseline.latencies_us


def test_triton_compiles_for_a_gpu(attempt):
    pytest.importorskip("triton")
    outcome, scratch = attempt(
        f"""
        from autokernel.loading import load_file
        from autokernel.offgpu import compile_launches
        import torch
        module = load_file(Path({str(starter_path("rmsnorm", "triton"))!r}), "starter")
        launches = compile_launches(module.kernel_fn, {{"x": torch.ones(4, 256), "weight": torch.ones(256)}}, "sm_90")
        assert launches
        """
    )
    assert outcome == "succeeded: None", outcome
    assert (scratch / "triton").is_dir()


# -- too much of something


def evaluate(server, victims, text, timing=False):
    builds = victims.journal.parent / "builds" / secrets.token_hex(8)
    judge = Judge(server=server, spec=get_spec("rmsnorm"), dtypes=("fp32",), cases=(), builds=builds)
    return judge.evaluate(HONEST + textwrap.dedent(text), timing=timing), builds


def running(marker):
    """Processes whose command line holds `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in text:
            found.append(int(path.parent.name))
    return found


def test_a_daemon_ends_with_its_child(attempt):
    marker = f"daemon-{secrets.token_hex(8)}"
    outcome, _ = attempt(
        f"""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                become(sys.executable, "-c", "import time; time.sleep(300)", {marker!r})
            os._exit(0)
        time.sleep(0.5)
        """
    )
    assert outcome == "succeeded: None"
    assert running(marker) == []


def test_a_daemon_is_really_there_before_it_is_killed(server, tmp_path):
    marker = f"daemon-{secrets.token_hex(8)}"
    body = f"""
        if os.fork() == 0:
            os.setsid()
            become(sys.executable, "-c", "import time; time.sleep(300)", {marker!r})
    """
    (tmp_path / "kernel.py").write_text(HARNESS.replace("{body}", textwrap.indent(textwrap.dedent(body), "    ")))
    with Worker(server, {"kernel": str(tmp_path / "kernel.py")}, tmp_path) as worker:
        worker.load()
        deadline = time.monotonic() + 5
        while not running(marker) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(running(marker)) == 1
    assert running(marker) == []


def test_a_fork_bomb_is_ended_and_named(server, victims):
    outcome, _ = evaluate(
        server,
        victims,
        """
        import os, time
        def kernel_fn(x, weight, eps=1e-6):
            for _ in range(2500):
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(300)
            time.sleep(300)
        """,
    )
    assert outcome.verdict == "CRASH"
    assert "processes" in outcome.reason
    parents, _ = orphans._process_table()
    assert not [pid for pid, parent in parents.items() if parent == server._process.pid]
    again, _ = evaluate(server, victims, "")
    assert again.verdict == "PASS", again.reason


def test_a_huge_file_fails(attempt):
    outcome, scratch = attempt(
        """
        with open("huge", "wb") as file:
            file.truncate(2 << 30)
        """
    )
    assert "File too large" in outcome
    assert (scratch / "huge").stat().st_size <= 1 << 30


def test_a_child_that_fills_the_disk_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(nursery, "MAX_SCRATCH_BYTES", 2 << 20)
    monkeypatch.setattr(nursery, "_LOOK_AT_BYTES", -1 << 50)  # look whatever others do to this disk

    def fill(sock, setup):
        (tmp_path / "large").write_bytes(b"x" * (4 << 20))
        time.sleep(60)

    ours, theirs = socket.socketpair()
    if (server := os.fork()) == 0:  # of its own: it kills all children of its process that it does not know
        children = nursery.Nursery(theirs, fill)
        for _ in range(3):
            children.wait_for_message()
            children.obey(*wire.receive(theirs, max_fds=1))
        os._exit(0)
    _, child = socket.socketpair()
    wire.send(ours, {"command": "spawn", "setup": {"sandbox": Policy().to_json()}}, [child.fileno()])
    pid = wire.receive(ours)[0]["pid"]
    wire.send(ours, {"command": "watch", "pid": pid, "scratch": str(tmp_path)})
    time.sleep(1)
    wire.send(ours, {"command": "reap", "pid": pid})
    answer, _ = wire.receive(ours)
    os.waitpid(server, 0)
    assert answer["status"] == -signal.SIGKILL
    assert "into its folder" in answer["excess"]


def test_output_goes_to_a_file_of_limited_size(server, victims):
    outcome, builds = evaluate(
        server,
        victims,
        """
        import os
        block = b"x" * (64 << 20)
        for _ in range(17):
            done = 0
            while done < len(block):
                done += os.write(1, block[done:])
        """,
    )
    assert (outcome.verdict, outcome.stage) == ("CRASH", "smoke")
    assert "File too large" in outcome.reason
    (log,) = builds.rglob("output.log")
    assert log.stat().st_size <= 1 << 30


def test_a_memory_hog_is_out_of_memory(server, victims):
    outcome, _ = evaluate(
        server,
        victims,
        """
        def kernel_fn(x, weight, eps=1e-6):
            hoard = []
            while True:
                hoard.append(torch.empty(1 << 40, dtype=torch.uint8))
        """,
    )
    assert outcome.verdict == "OOM"


def test_the_judge_survives_all_children_being_signalled(server, tmp_path):
    (tmp_path / "kernel.py").write_text(
        "import os, signal\ndef kernel_fn(x):\n    os.kill(-1, signal.SIGKILL)\n    return x\n"
    )
    with Worker(server, {"kernel": str(tmp_path / "kernel.py")}, tmp_path) as worker:
        worker.load()
        with pytest.raises(Rejected):
            worker.run([{"x": torch.ones(4)}], [TensorMeta(shape=(4,), dtype="fp32")])
    assert server._process.poll() is None


def test_links_left_in_its_folder_lead_neither_judge_nor_child_out(server, victims):
    text = """
        import os
        for name in ("kernel.py", "output.log"):
            os.unlink(name)
            os.symlink({journal!r}, name)
        """
    outcome, builds = evaluate(server, victims, text.format(journal=str(victims.journal)))
    assert outcome.verdict == "PASS", outcome.reason
    again = Judge(server=server, spec=get_spec("rmsnorm"), dtypes=("fp32",), cases=(), builds=builds)
    text = HONEST + textwrap.dedent(text.format(journal=str(victims.journal)))
    assert again.evaluate(text, timing=False).verdict == "PASS"
    assert victims.journal.read_text() == "precious"


def test_folders_in_the_way_do_not_stop_the_judge(server, victims):
    text = """
        import os
        for name in ("kernel.py", "output.log"):
            os.unlink(name)
            os.mkdir(name)
        """
    _, builds = evaluate(server, victims, text)
    again = Judge(server=server, spec=get_spec("rmsnorm"), dtypes=("fp32",), cases=(), builds=builds)
    assert again.evaluate(HONEST + textwrap.dedent(text), timing=False).verdict == "PASS"


# -- the promise itself


def test_a_child_that_cannot_enter_is_our_fault_not_the_candidates(tmp_path):
    (tmp_path / "kernel.py").write_text("def kernel_fn(x): return x\n")
    with ForkServer() as server:
        target = {"kernel": str(tmp_path / "kernel.py")}
        with Worker(server, target, tmp_path) as worker:
            worker.load()
        # Children of this server can open their log and nothing more: no rule can be made.
        used = {int(path.name) for path in Path(f"/proc/{server._process.pid}/fd").iterdir()}
        _, limit = itertools.islice((fd for fd in itertools.count() if fd not in used), 2)
        resource.prlimit(server._process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        with Worker(server, target, tmp_path) as worker, pytest.raises(WorkerError, match="Too many open files"):
            worker.load()


def test_a_server_that_is_gone_is_our_fault(tmp_path):
    with ForkServer() as server:
        server._wait_ready()
        server._process.kill()
        server._process.wait()
        with pytest.raises(WorkerError, match="server"):
            Worker(server, {"kernel": "kernel.py"}, tmp_path)


def test_threads_of_a_gpu_driver_reach_scratch_folders_at_most(tmp_path):
    """On a GPU the first step comes before the driver's threads, the second after; no GPU is needed to see it."""
    for name in ("builds/mine", "builds/other"):
        (tmp_path / name).mkdir(parents=True)
    policy = decide("auto", "cuda", protected=[str(tmp_path)], builds=tmp_path / "builds")
    sandbox.prepare(policy)

    def can_write(folder):
        try:
            (tmp_path / folder / secrets.token_hex(4)).touch()
        except PermissionError:
            return False
        return True

    def confined():
        sandbox.begin(policy, "cuda", 64 << 30)
        entered, done, early = threading.Event(), threading.Event(), {}

        def driver():
            entered.wait()
            early.update({folder: can_write(folder) for folder in ("builds/mine", "builds/other", ".")})
            done.set()

        threading.Thread(target=driver, daemon=True).start()
        sandbox.enter(policy, "cuda", tmp_path / "builds" / "mine")
        entered.set()
        done.wait()
        return early, {folder: can_write(folder) for folder in ("builds/mine", "builds/other", ".")}

    early, late = attempts._in_child(confined)
    assert early == {"builds/mine": True, "builds/other": True, ".": False}
    assert late == {"builds/mine": True, "builds/other": False, ".": False}


def test_off_leaves_the_file_system_open(tmp_path):
    (tmp_path / "kernel.py").write_text(
        f"open({str(tmp_path.parent / 'was-here')!r}, 'w').close()\nimport socket; socket.socket()\n"
        "def kernel_fn(x): return x\n"
    )
    with ForkServer(sandbox="off") as server, Worker(server, {"kernel": str(tmp_path / "kernel.py")}, tmp_path) as w:
        w.load()
    assert (tmp_path.parent / "was-here").exists()


@pytest.mark.alone
def test_entering_takes_a_few_milliseconds(tmp_path):
    policy = decide("auto", "cpu")
    sandbox.prepare(policy)
    times = []
    for _ in range(9):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            start = time.perf_counter()
            sandbox.begin(policy, "cpu", 64 << 30)
            try:
                sandbox._close_files(policy, "cpu", str(tmp_path), shared_memory=False)
            finally:
                os.write(writing, str(time.perf_counter() - start).encode())
                os._exit(0)
        os.waitpid(pid, 0)
        times.append(float(os.read(reading, 64)))
        os.close(reading)
        os.close(writing)
    assert sorted(times)[len(times) // 2] < 0.02  # 5 ms on a quiet machine
