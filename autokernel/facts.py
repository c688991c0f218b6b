"""What a prompt may tell of an op beside its history: the GPU, where the incumbent stands, its binaries, the oracle.

All of it is best effort: what is not known, or cannot be read, is left out, and an op that has no spec of its own is
told by its history alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autokernel import binaries, gpus, timed
from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.judge import places
from autokernel.loading import get_spec
from autokernel.prompt import PromptContext
from autokernel.records import KernelResources
from autokernel.roofline import Ceilings

if TYPE_CHECKING:
    from autokernel.spec import KernelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Looks things up for one run. `builds` is where the judge has its candidates compile, `ceilings` asks for what was
    measured when the run began; None is unknown.
    """

    builds: Path | None = None
    ceilings: Callable[[], Ceilings] | None = None
    _read: dict[tuple[str, str], tuple[KernelResources, ...]] = field(default_factory=dict, init=False, repr=False)

    def of(self, context: PromptContext, history: KernelHistory) -> PromptContext:
        """`context` with all that is known of the history's op."""
        gpu = None if history.backend == "cpp" else gpus.lookup(history.device)
        arch = "cpu" if history.backend == "cpp" else gpu.arch if gpu else None
        context = replace(context, arch=arch, resources=self._resources(history, gpu))
        try:
            spec = get_spec(history.op)
        except ConfigError:
            return context
        position = None if self.ceilings is None else timed.position(spec, history, self.ceilings())
        calls = tuple(sorted(spec.allowed_aten))
        return replace(context, roofline=position, oracle=oracle_text(spec), allowed_calls=calls)

    def _resources(self, history: KernelHistory, gpu: gpus.Gpu | None) -> tuple[KernelResources, ...] | None:
        """Of the incumbent's compiled kernels; read once for each incumbent."""
        if self.builds is None or history.backend == "cpp":
            return None
        key = history.op, history.incumbent
        if not self._read.get(key):
            dtypes = {item.case.dtype for item in history.planned.cases}
            folder = places.of_text(self.builds / history.op, history.incumbent)
            self._read.clear()  # the incumbent before it is asked for no more
            self._read[key] = binaries.left_by_judge(folder, dtypes, gpu)
        return self._read[key]


def oracle_text(spec: KernelSpec) -> str | None:
    """The oracle's source, which is the op's definition; None where it has none."""
    try:
        return inspect.getsource(spec.oracle)
    except (OSError, TypeError):
        return None
