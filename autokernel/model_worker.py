"""Work on the user's whole model in a child process: her code may crash it, and the parent never runs a candidate.

    python -m autokernel.model_worker request.json response.json

A request names what to do: "profile" (profile, plan and ceilings), "integrate" (which kernels help, by how much),
"verify" (whether the outputs agree) or "race" (the ways to run the model with them, against torch.compile).
`call_worker` is the parent's side, without torch.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autokernel import errors
from autokernel.errors import AutokernelError, WorkerError

STDERR_LINES = 3  # of a dead child that are shown
_PDEATHSIG = 1

SCRATCH = "model-worker-"
"""How the names of scratch folders begin, before the process id of their owner."""

# The folder of this package goes last on the path: the child's working directory must shadow nothing (-P), and a
# checkout need not be installed.
_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from autokernel.model_worker import main; main()"


def call_worker(request: Mapping[str, Any], *, deadline_s: float, workdir: Path) -> dict[str, Any]:
    """The child's answer to `request`. Its process group is dead when this returns, however it returns.

    Args:
        workdir: where scratch files go; the child runs in this process's own working directory.

    Raises: the AutokernelError that the child raised; WorkerError when it died or passed the deadline, or when there is
    no room for its files.
    """
    try:
        return _answer(request, deadline_s, workdir)
    except OSError as error:
        raise WorkerError(f"the model's process cannot be asked: {error}", hint="check space on the disk, and memory")


def _answer(request: Mapping[str, Any], deadline_s: float, workdir: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-", dir=_scratch(workdir)) as folder:
        asked, answered, log = (Path(folder) / name for name in ("request.json", "response.json", "stderr.txt"))
        asked.write_text(json.dumps(dict(request)))
        root = str(Path(__file__).resolve().parent.parent)
        command = [sys.executable, "-P", "-c", _BOOT, root, str(asked), str(answered)]
        code = _run(command, log, deadline_s, what=str(request.get("request")))
        if not answered.is_file():
            raise WorkerError(f"the model's process died ({_death(code)}): {_last_lines(log)}", hint=_DIED)
        response: dict[str, Any] = json.loads(answered.read_text())
    if "error" in response:
        raise _as_error(response["error"])
    return response


def sweep(workdir: Path) -> None:
    """Remove the scratch folders that killed processes have left in `workdir`."""
    for path in (workdir / ".autokernel").glob(f"{SCRATCH}*"):
        owner = path.name.removeprefix(SCRATCH).partition("-")[0]
        if not (owner.isdecimal() and _is_alive(int(owner))):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_DIED = "run the model on its own to see whether it crashes; native code of a kernel may be at fault, too"


def _run(command: list[str], log: Path, deadline_s: float, what: str) -> int:
    with log.open("wb") as stderr:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, start_new_session=True
        )
    try:
        return child.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise WorkerError(f"{what} of the model did not end within {deadline_s:.0f} s", hint="allow it more time")
    finally:
        _kill_group(child)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        child.kill()
    child.wait()


def _scratch(workdir: Path) -> Path | None:
    folder = workdir / ".autokernel"
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


def _death(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-STDERR_LINES:]) or "it said nothing"


def _as_error(raw: Mapping[str, str]) -> AutokernelError:
    kind = getattr(errors, raw["type"], WorkerError)
    return kind(raw["message"], hint=raw["hint"])


# --- the child -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer the request in the file argv[1] with the file argv[2]; a fault is an answer too."""
    asked, answered = Path(sys.argv[1]), Path(sys.argv[2])
    _die_with_parent()
    warnings = _Warnings()
    logging.getLogger("autokernel").addHandler(warnings)
    try:
        from autokernel.modelanswers import ANSWERS

        request = json.loads(asked.read_text())
        response = ANSWERS[request["request"]](request)
        response["notes"] = list(dict.fromkeys([*response.get("notes", []), *warnings.messages]))
    except AutokernelError as error:
        response = {"error": {"type": type(error).__name__, "message": str(error), "hint": error.hint}}
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        response = {"error": {"type": "WorkerError", "message": f"{type(error).__name__}: {first}", "hint": _DIED}}
    unfinished = answered.with_suffix(".part")
    unfinished.write_text(json.dumps(response))
    unfinished.replace(answered)


class _Warnings(logging.Handler):
    """Collects what may change a number, to be told with the answer."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _die_with_parent() -> None:
    """A killed run leaves no child behind; where there is no prctl, the child ends at its own budget."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
