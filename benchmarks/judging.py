"""What the benchmarks of the judge share: judges with a server and a folder, fresh texts, cases by size."""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
import shutil
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import torch

from autokernel.backends import require_backend
from autokernel.errors import ConfigError
from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.kerneltext import text_digest
from autokernel.loading import get_spec, starter_path
from autokernel.machine import usable_cores
from autokernel.records import TimedCase
from autokernel.settings import DTYPES_OF_BACKEND, device_of
from autokernel.sizes import sized_case

COMPILED_IN = ("build", "triton")
"""Folders of a candidate's own in which its libraries and Triton's kernels are kept."""


class Judges:
    """Judges of one backend, whose children come from one server; use as a context manager.

    Raises: DeviceError when this machine lacks what the backend needs.
    """

    def __init__(self, backend: str, sandbox: str = "auto") -> None:
        require_backend(backend)
        self._backend, self._sandbox, self._stack = backend, sandbox, ExitStack()

    def __enter__(self) -> Judges:
        with ExitStack() as stack:
            self._builds = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autokernel-benchmark-")))
            device = device_of(self._backend)
            self._server = stack.enter_context(ForkServer(device, sandbox=self._sandbox, builds=self._builds))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, op: str, sizes: tuple[int, ...] | None = None, dtype: str | None = None) -> Judge:
        """A judge of `op` for one call of these sizes; by default the spec's heaviest case. Raises: ConfigError."""
        dtypes = DTYPES_OF_BACKEND[self._backend]
        if dtype is not None and dtype not in dtypes:
            raise ConfigError(f"unknown dtype {dtype!r}", hint=f"backend {self._backend} knows {', '.join(dtypes)}")
        judge = self._judge(op, ())
        if sizes is None and dtype is None:
            return judge
        case = judge.timed[0].case if sizes is None else sized_case(op, sizes)
        return self._judge(op, (TimedCase(case=case.with_dtype(dtype or case.dtype), calls=1),))

    def share_builds(self, op: str, kernel_py: str, source: str) -> None:
        """Let `kernel_py`, which differs from `source` in a comment, find what was compiled for that."""
        target, origin = self._folder(op, kernel_py), self._folder(op, source)
        for name in COMPILED_IN:
            if (origin / name).is_dir():
                shutil.copytree(origin / name, target / name, dirs_exist_ok=True)
        for group in target.rglob("__grp__*.json"):  # Triton's lists of the files of a kernel have full paths
            group.write_text(group.read_text().replace(str(origin), str(target)))

    def discard(self, op: str, kernel_py: str) -> None:
        """Remove the folder of a text that will not be judged again."""
        shutil.rmtree(self._folder(op, kernel_py), ignore_errors=True)

    def _judge(self, op: str, cases: tuple[TimedCase, ...]) -> Judge:
        return Judge(
            server=self._server,
            spec=get_spec(op),
            dtypes=DTYPES_OF_BACKEND[self._backend],
            cases=cases,
            builds=self._builds / op,
        )

    def _folder(self, op: str, kernel_py: str) -> Path:
        return self._builds / op / text_digest(kernel_py)


def starter(op: str, backend: str) -> str:
    """Text of the project's kernel. Raises: ConfigError when there is none."""
    get_spec(op)
    path = starter_path(op, backend)
    if path is None:
        raise ConfigError(f"there is no starter of {op} for backend {backend}", hint="see kernels/")
    return path.read_text()


def numbered(kernel_py: str) -> str:
    """The same kernel as a new text: a fresh number in a comment, at the end, so that no line moves."""
    return f"{kernel_py}\n# {secrets.token_hex(8)}\n"


def environment(backend: str) -> dict[str, str | int | None]:
    """Where and when something is measured, for a JSON file."""
    on_gpu = device_of(backend) == "cuda"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu ({platform.machine()})",
        "cores": usable_cores(),
        "torch": torch.__version__,
        "triton": triton,
    }
