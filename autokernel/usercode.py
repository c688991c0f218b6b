"""Run code that the user wrote: its folder importable, its random numbers fixed, its faults shown as its own."""

from __future__ import annotations

import contextlib
import importlib
import linecache
import random
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autokernel.errors import AutokernelError, ConfigError

_siblings: set[str] = set()
"""Modules that earlier model files imported from their own folders; another file may have a sibling of that name."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shown_exception(error: BaseException, path: Path | None) -> str:
    """`KeyError: 'x' (model.py:12: y = table["x"])`: the exception and the user's line that led to it.

    The line is the innermost one in `path`, else in its folder, else the innermost of all.
    """
    text = f"{type(error).__name__}: {str(error).strip()}".rstrip(": ")
    if isinstance(error, SyntaxError):
        where = f"{Path(error.filename or '?').name}:{error.lineno}"
        line = (error.text or "").strip()
        return f"{type(error).__name__}: {error.msg} ({where}: {line})" if line else f"{text} ({where})"
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [(file, line) for file, line in frames if not _is_noise(file)]
    own = [frame for frame in frames if path is not None and frame[0] == path]
    near = [frame for frame in frames if path is not None and path.parent in frame[0].parents]
    chosen = (own or near or frames)[-1:]
    if not chosen:
        return text
    file, number = chosen[0]
    return f"{text} ({file.name}:{number}: {linecache.getline(str(file), number).strip()})"


def _is_noise(file: Path) -> bool:
    """Frames that say nothing about the user's code: ours, the import system's, and nn.Module.__call__."""
    inside = Path(__file__).parent in file.parents
    return inside or str(file).startswith("<") or file.parts[-4:] == ("torch", "nn", "modules", "module.py")


@contextlib.contextmanager
def blaming(what: str, path: Path, *, hint: str = "") -> Iterator[None]:
    """Turn any exception of the user's code into a ConfigError that shows it after `what` ("get_inputs() raised")."""
    try:
        yield
    except AutokernelError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() in a user's file must not end us without a word
        raise ConfigError(f"{what} {shown_exception(error, path)}", hint=hint or "fix the model file") from None


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """`folder` first on sys.path, as `python file.py` would have it; sys.path is as before afterwards."""
    before, known = list(sys.path), set(sys.modules)
    for name in list(_siblings):
        if any((folder / candidate).exists() for candidate in (f"{name}.py", name)):
            for stale in [key for key in sys.modules if key.partition(".")[0] == name]:
                del sys.modules[stale]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        for name in {key.partition(".")[0] for key in set(sys.modules) - known}:
            file = Path(getattr(sys.modules.get(name), "__file__", None) or "/")
            if file in (folder / f"{name}.py", folder / name / "__init__.py"):
                _siblings.add(name)


@contextlib.contextmanager
def seeded(seed: int, target: torch.device) -> Iterator[None]:
    """Fixed random numbers inside (torch, random, numpy if loaded); the caller's generators are untouched."""
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[target.index] if target.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)
