"""`torch.compile(model, backend="autokernel")`: a run's kernels, and Inductor for everything around them.

The name is found through the package's entry point in `torch_dynamo_backends`, or once `autokernel.apply` or
`autokernel.backend` were used. What needs gradients and has no place for a kernel is compiled by Inductor alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from autokernel.applied import load_kernels, run_folder
from autokernel.customop import inductor, lower
from autokernel.replace import Replacer, Way

NAME = "autokernel"
OWN_OPTIONS = ("run", "ops")


class KernelBackend:
    """A backend for torch.compile; `calls` and `fallbacks` count over all that was compiled with it."""

    __name__ = NAME

    def __init__(self, folder: Path, ops: Sequence[str] | None, patches: Mapping[str, Any]) -> None:
        self._replacer = Replacer.of(
            load_kernels(folder, ops),
            Way(lower=partial(lower, patches=patches)),
            train=partial(inductor, patches=patches),
        )

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._replacer.backend(gm, inputs)

    @property
    def calls(self) -> Mapping[str, int]:
        """How often each op's kernel has run."""
        return self._replacer.calls

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """How often an op ran as the model wrote it, because the call was not among those verified."""
        return self._replacer.fallbacks


def backend(run: str | Path = "latest", *, ops: Sequence[str] | None = None, **options: Any) -> KernelBackend:
    """What to give to `torch.compile(model, backend=...)` for the kernels of `run`, named as for `autokernel.apply`.

    Args:
        ops: only these; None means those that made the run's whole model faster.
        options: changes to Inductor's settings, as torch.compile's own `options`.

    Raises: ConfigError when there is no such run, it has no such kernel, or a kernel cannot be loaded.
    """
    return KernelBackend(run_folder(run), ops, options)


_known: dict[Any, KernelBackend] = {}


def autokernel(
    gm: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend of that name. Its options are `run` and `ops`, else "latest" and all that helped; others, and the
    mode, are Inductor's."""
    own = {key: value for key, value in (options or {}).items() if key in OWN_OPTIONS}
    patches = {**_of_mode(mode), **{key: value for key, value in (options or {}).items() if key not in OWN_OPTIONS}}
    folder = run_folder(own.get("run", "latest"))
    # A run that goes on, or is measured anew, has other kernels.
    files = [(str(path), path.stat().st_mtime_ns) for path in sorted(folder.glob("optimized/*/*"))]
    key = repr((str(folder.resolve()), files, own.get("ops"), patches))
    if key not in _known:
        _known[key] = KernelBackend(folder, own.get("ops"), patches)
    return _known[key](gm, inputs)


def register() -> None:
    """Make the name known to torch.compile where the package is not installed; may be repeated."""
    from torch._dynamo.backends import registry

    if NAME not in registry._COMPILER_FNS:
        registry.register_backend(autokernel, name=NAME)


def _of_mode(mode: str | None) -> Mapping[str, Any]:
    if mode is None:
        return {}
    from torch._inductor import list_mode_options

    patches: Mapping[str, Any] = list_mode_options(mode)
    return patches
