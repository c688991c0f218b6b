"""Load Python files by path under private names, and find the files that stand beside the package.

`reference.py`, `orchestrate.py`, `program.md` and `kernels/` live at the top of a checkout; in a wheel they lie inside
the package, so that no top-level module of those names is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from autokernel.errors import ConfigError

if TYPE_CHECKING:
    from autokernel.spec import KernelSpec

PACKAGE_ROOT = Path(__file__).resolve().parent


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
    if op not in specs():
        raise ConfigError(f"unknown op {op!r}", hint=f"known ops: {', '.join(specs())}")
    return specs()[op]


def starter_path(op: str, backend: str) -> Path | None:
    """The starter kernel of `op` for `backend`, or None when the project has none."""
    path = toplevel("kernels") / backend / f"{op}.py"
    return path if path.is_file() else None
