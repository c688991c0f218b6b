"""`autokernel.apply`: put a run's kernels into a model, in this process, and take them out again.

The model object itself stays as it is (parameters, state_dict, hooks, attributes, other models): only its call goes
through a graph with kernels in it. Whether that pays is `integrate`'s business, not this module's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from autokernel.capture import compile_call
from autokernel.customop import way_of
from autokernel.errors import ConfigError
from autokernel.kernelfile import parse_kernel
from autokernel.kerneltext import text_digest
from autokernel.loading import load_file, look_beside
from autokernel.native import BuildError
from autokernel.records import Case
from autokernel.replace import Replacer
from autokernel.rundir import find_run
from autokernel.sites import Replacement

BUILD_DIR = "AUTOKERNEL_BUILD_DIR"


class Applied:
    """Kernels at work in one model; `undo` (or leaving the `with` block) restores the model exactly."""

    def __init__(self, model: nn.Module, replacements: Sequence[Replacement], *, compiler: str = "graph") -> None:
        self.compiler = compiler
        self._model = model
        self._replacer = Replacer.of(replacements, way_of(compiler))
        self._before = model._compiled_call_impl
        # Where nn.Module.compile puts its result: not part of the state_dict, and neither copied nor pickled.
        model._compiled_call_impl = compile_call(model, self._replacer.backend, self._replacer.tally)

    @property
    def calls(self) -> Mapping[str, int]:
        """How often each op's kernel has run."""
        return self._replacer.calls

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """How often an op ran as the model wrote it, because the call was not among those verified."""
        return self._replacer.fallbacks

    @property
    def training_graphs(self) -> int:
        """Graphs that need gradients and were left alone, as no kernel had a place or they could not be traced."""
        return self._replacer.training_graphs

    @property
    def uncaptured(self) -> int:
        """Calls of the model that ran eagerly as a whole, as torch.compile had given up: after too many shapes."""
        return self._replacer.tally.uncaptured

    def check(self) -> None:
        """Raises: ConfigError when a kernel was never called."""
        if idle := [op for op, count in self.calls.items() if count == 0]:
            raise ConfigError(f"never called: the kernels for {', '.join(idle)}", hint=self._why_idle(idle))

    def undo(self) -> None:
        """Give the model back the call it had; may be repeated."""
        self._model._compiled_call_impl = self._before
        self._replacer.release()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.undo()

    def _why_idle(self, idle: Sequence[str]) -> str:
        if not self._replacer.graphs and not self.training_graphs:
            return "the model was not called; call the module itself, not its forward"
        if seen := [op for op in idle if self.fallbacks[op]]:
            return (
                f"{', '.join(seen)} ran with other shapes, dtypes or strides than in the run: optimize for these inputs"
            )
        if self.training_graphs:
            return "graphs that need gradients ran without kernels, for the reason in the log; try torch.no_grad()"
        return "this model does not contain the op as the run's model did"


def apply(
    model: nn.Module, run: str | Path = "latest", *, ops: Sequence[str] | None = None, compiler: str | None = None
) -> Applied:
    """Put the kernels of `run` into `model`; they are called for exactly the calls that the run verified.

    Where a forward needs gradients, its backward runs the model's own nodes, some of which it computes anew.

    Args:
        run: a run's name in ./.autokernel, "latest", or the path of a run directory.
        ops: only these; None means those that made the run's whole model faster.
        compiler: "inductor" has torch.compile's compiler fuse what is around the kernels, "graph" runs the model's own
            operators around them; "inductor-cudagraph" and "cudagraph" replay that as a CUDA graph, whose memory is
            kept between calls. None means what the run measured to be fastest, "graph" if it measured none.

    Raises: ConfigError when there is no such run, it has no such kernel, or a kernel cannot be loaded.
    """
    folder = run_folder(run)
    replacements = load_kernels(folder, ops)
    return Applied(model, replacements, compiler=compiler or measured_compiler(folder))


def load_kernels(folder: Path, ops: Sequence[str] | None = None) -> list[Replacement]:
    """The kernels of the run in `folder`: of these ops, or those that made its whole model faster.

    Raises: ConfigError as `apply` does.
    """
    replacements = [
        load_kernel(found / "kernel.py", op=meta["op"], cases=_cases(meta), builds=folder / "builds")
        for found, meta in _exported(folder)
        if (meta["op"] in ops if ops is not None else meta.get("used", True))
    ]
    if missing := sorted(set(ops or ()) - {item.op for item in replacements}):
        raise ConfigError(f"run {folder.name} has no kernel for {', '.join(missing)}", hint=_available(folder))
    if not replacements:
        raise ConfigError(f"run {folder.name} has no kernel that makes its model faster", hint=_available(folder))
    return replacements


def measured_compiler(folder: Path) -> str:
    """What the run in `folder` measured to be the fastest way for its kernels, "graph" if it measured none."""
    return next((meta["compiler"] for _, meta in _exported(folder) if meta.get("compiler")), "graph")


def load_kernel(path: Path, *, op: str, cases: Sequence[Case], builds: Path) -> Replacement:
    """Run the kernel.py at `path` in this process, its native code built below `builds`.

    Raises: ConfigError when the file is missing, is for another op, or fails.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="name a finished run")
    look_beside(path)
    declared = parse_kernel(text).kernel_type
    if declared != op:
        raise ConfigError(f"{path} is a kernel for {declared}, not for {op}", hint="restore the run's files")
    before = os.environ.get(BUILD_DIR)
    os.environ[BUILD_DIR] = str(builds)
    try:
        module = load_file(path, f"autokernel_kernel_{op}_{text_digest(text)}")
    except BuildError as error:
        raise ConfigError(f"the kernel for {op} does not build here: {error}", hint="`autokernel doctor` tells more")
    except Exception as error:
        raise ConfigError(f"the kernel for {op} fails here: {type(error).__name__}: {error}", hint=f"see {path}")
    finally:
        if before is None:
            del os.environ[BUILD_DIR]
        else:
            os.environ[BUILD_DIR] = before
    return Replacement(op=op, kernel_fn=module.kernel_fn, cases=cases)


def run_folder(run: str | Path) -> Path:
    """The directory of a run, given as `apply` takes it. Raises: ConfigError when there is none."""
    path = Path(run)
    if path.is_dir() and (path / "optimized").is_dir():
        return path
    if isinstance(run, Path) or path.name != str(run):
        raise ConfigError(f"{run} is no run directory with kernels", hint="name a folder below .autokernel")
    return find_run(Path.cwd(), run).path


def _exported(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Each op's folder and its meta.json, in order of the ops' names."""
    found = []
    for path in sorted((folder / "optimized").glob("*/meta.json")):
        try:
            meta = json.loads(path.read_text())
            meta["op"], meta["cases"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", hint="restore or remove that folder")
        found.append((path.parent, meta))
    return found


def _cases(meta: Mapping[str, Any]) -> list[Case]:
    return [Case.from_json(raw) for raw in meta["cases"]]


def _available(folder: Path) -> str:
    found = [meta["op"] for _, meta in _exported(folder)]
    return f"it has kernels for: {', '.join(found)}" if found else "the run exported no kernel"
