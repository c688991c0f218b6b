"""Load Python files by path under private names, and find the files that stand beside the package.

`reference.py`, `orchestrate.py`, `program.md` and `kernels/` live at the top of a checkout; in a wheel they lie inside
the package, so that no top-level module of those names is installed. Captured subgraphs are ops of one model: each has
a folder of its own with a `reference.py`, in a run's directory, and `look_in` makes them known.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from autokernel.errors import ConfigError
from autokernel.kernelfile import parse_kernel

if TYPE_CHECKING:
    from autokernel.spec import KernelSpec

PACKAGE_ROOT = Path(__file__).resolve().parent

REFERENCE = "reference.py"
STARTER = "starter.py"
"""The files of a captured subgraph: the op itself, and its first kernel."""

ANY_CAPTURED = "graph"
_CAPTURED = re.compile(rf"{ANY_CAPTURED}_\w+")
"""Names of captured subgraphs, and the word for all of them."""

_folders: list[Path] = []
"""Where captured subgraphs are looked for, by their names; the newest folder first."""


def toplevel(name: str) -> Path:
    """Path of a top-level file or folder of the project (`reference.py`, `kernels`...).

    Raises: ConfigError when neither the checkout nor the installed package has it.
    """
    for root in (PACKAGE_ROOT.parent, PACKAGE_ROOT / "_toplevel"):
        # The checkout counts only when it really is ours: a neighbour in site-packages could be called `kernels`.
        ours = root.name == "_toplevel" or (root / "pyproject.toml").is_file()
        if ours and (root / name).exists():
            return root / name
    raise ConfigError(f"{name} is missing from this installation", hint="reinstall autokernel")


def load_file(path: Path, name: str) -> ModuleType:
    """Run the Python file at `path` as a module called `name`, with its folder not on sys.path.

    Raises: whatever the file raises; ImportError when it is not Python.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@functools.cache
def specs() -> Mapping[str, KernelSpec]:
    """The registry of `reference.py`: op -> KernelSpec."""
    module = load_file(toplevel("reference.py"), "autokernel_reference")
    registry: Mapping[str, KernelSpec] = module.SPECS
    return registry


def get_spec(op: str) -> KernelSpec:
    """The spec of `op`. Raises: ConfigError with the known names."""
    if path := _captured_file(op, REFERENCE):
        return _captured_spec(op, path)
    if op not in specs():
        raise ConfigError(f"unknown op {op!r}", hint=f"known ops: {', '.join(specs())}")
    return specs()[op]


def starter_path(op: str, backend: str) -> Path | None:
    """The starter kernel of `op` for `backend`, or None when the project has none."""
    if is_captured(op):
        own = _captured_file(op, STARTER)
        return own if own and parse_kernel(own.read_text()).backend == backend else None
    path = toplevel("kernels") / backend / f"{op}.py"
    return path if path.is_file() else None


def is_captured(op: str) -> bool:
    """Whether the name is that of a captured subgraph, or means them all."""
    return op == ANY_CAPTURED or _CAPTURED.fullmatch(op) is not None


def look_in(folder: Path) -> None:
    """Know the captured subgraphs in `folder` (each in a folder of its name) from now on, before those known so far."""
    folder = folder.resolve()
    if folder in _folders:
        _folders.remove(folder)
    _folders.insert(0, folder)


def look_beside(kernel: Path) -> None:
    """Know the captured subgraph that the kernel file is for, if its `reference.py` lies beside it."""
    if (kernel.parent / REFERENCE).is_file():
        look_in(kernel.resolve().parent.parent)


def _captured_file(op: str, name: str) -> Path | None:
    if not _CAPTURED.fullmatch(op):
        return None
    return next((path for folder in _folders if (path := folder / op / name).is_file()), None)


@functools.cache
def _captured_spec(op: str, path: Path) -> KernelSpec:
    spec: KernelSpec = load_file(path, f"autokernel_{op}").SPEC
    if spec.op != op:
        raise ConfigError(f"{path} describes {spec.op}, not {op}", hint="restore the run's files")
    return replace(spec, source=path.read_text())
