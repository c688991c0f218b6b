"""The agent that plays a folder of kernel.py files, one after the other: `--agent replay:FOLDER`.

`FOLDER/<op>/*.py` are that op's files; of `FOLDER/*.py` those whose KERNEL_TYPE is the op, or whose name is `<op>.py`
or begins with `<op>_`, `<op>-` or `<op>.` where the file is too broken to say. Files are played in sorted order and
exactly as they are: whether one is any good, or Python at all, is for the judge to say.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from autokernel.agents import Agent, AgentOptions
from autokernel.errors import AgentError, ConfigError
from autokernel.history import KernelHistory
from autokernel.kernelfile import parse_kernel
from autokernel.records import Proposal

LAYOUT_HINT = "put kernel files at FOLDER/<op>/*.py, or at FOLDER/*.py with KERNEL_TYPE set"


@dataclass(slots=True, kw_only=True)
class ReplayAgent:
    """Plays the files of `folder`; the number of the op's experiments says which one is next, so a run can resume."""

    folder: Path
    name: str = "replay"

    def propose(self, history: KernelHistory) -> Proposal | None:
        """The op's next file, or None when all were played.

        Raises: AgentError when a file cannot be read any more.
        """
        files = files_of(self.folder, history.op)
        played = len(history.experiments)
        if played >= len(files):
            return None
        text = _read(files[played])
        return Proposal(hypothesis=_hypothesis(text) or files[played].name, kernel_py=text)


def build(options: AgentOptions) -> Agent:
    """The agent for `--agent replay:FOLDER`; a relative folder is taken from the working directory.

    Raises: ConfigError when no folder is named, it does not exist, or it holds no kernel file.
    """
    if not options.argument:
        raise ConfigError("the replay agent needs a folder", hint="use --agent replay:FOLDER")
    folder = (options.workdir / Path(options.argument).expanduser()).resolve()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", hint=LAYOUT_HINT)
    if not any(path.is_file() for pattern in ("*.py", "*/*.py") for path in folder.glob(pattern)):
        raise ConfigError(f"{folder} holds no kernel files", hint=LAYOUT_HINT)
    return ReplayAgent(folder=folder)


def files_of(folder: Path, op: str) -> list[Path]:
    """The files to play for `op`: those of its own subfolder first, then its share of the folder itself, each sorted.

    Raises: AgentError when the folder is gone or a file cannot be read.
    """
    if not folder.is_dir():
        raise AgentError(f"{folder} is gone", hint="restore the folder, then go on with --resume")
    own = sorted(path for path in (folder / op).glob("*.py") if path.is_file())
    shared = sorted(path for path in folder.glob("*.py") if path.is_file())
    return own + [path for path in shared if _op_of(path, op) == op]


def _op_of(path: Path, op: str) -> str | None:
    """The op that a file is for: its KERNEL_TYPE, or `op` when only its name tells."""
    try:
        return parse_kernel(_read(path)).kernel_type
    except ConfigError:
        return op if re.fullmatch(rf"{re.escape(op)}([_.-].*)?", path.stem) else None


def _read(path: Path) -> str:
    try:
        # What is not UTF-8 is played with replacement characters: a broken file is a verdict, not an error of the run.
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise AgentError(f"cannot read {path}: {error.strerror}", hint="mend the file's permissions") from None


def _hypothesis(text: str) -> str | None:
    """First line of the module docstring, or None."""
    try:
        docstring = ast.get_docstring(ast.parse(text))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return docstring.strip().splitlines()[0].strip() if docstring and docstring.strip() else None
