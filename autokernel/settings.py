"""What the user asked of a run, written to the journal and read back on resume; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autokernel.errors import ConfigError

DEFAULT_HOURS = 8.0
SANDBOX_MODES = ("auto", "strict", "off")
BACKENDS = ("triton", "cuda", "cpp")
DTYPES_OF_BACKEND = {"triton": ("fp32", "bf16", "fp16"), "cuda": ("fp32", "bf16", "fp16"), "cpp": ("fp32", "bf16")}
"""What starters and candidates must handle; a CPU has no fast fp16."""


def device_of(backend: str) -> str:
    """Where a backend's kernels run: `cpu` or `cuda`."""
    return "cpu" if backend == "cpp" else "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run. `budget_s` is wall-clock time for everything, report included; `workdir` is where results.tsv lives."""

    model: str
    workdir: Path
    budget_s: float = DEFAULT_HOURS * 3600
    max_experiments: int | None = None
    ops: tuple[str, ...] | None = None
    agent: str = "auto"
    backend: str = "auto"
    dtype: str | None = None
    patience: int = 5
    seed: int = 0
    compile_baseline: bool = True
    starters: Path | None = None  # a folder with <op>.py that come before the project's own starters
    sandbox: str = "auto"

    def __post_init__(self) -> None:
        for name in ("budget_s", "patience"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give a positive number")
        if self.max_experiments is not None and self.max_experiments < 1:
            raise ConfigError(f"--experiments is {self.max_experiments}", hint="give 1 or more")
        if self.starters is not None and not self.starters.is_dir():
            raise ConfigError(f"--starters {self.starters} is no folder", hint="give a folder with <op>.py files")
        if self.backend not in ("auto", *BACKENDS):
            raise ConfigError(f"unknown backend {self.backend!r}", hint=f"known: auto, {', '.join(BACKENDS)}")

        if self.sandbox not in SANDBOX_MODES:
            raise ConfigError(f"--sandbox is {self.sandbox!r}", hint=f"known: {', '.join(SANDBOX_MODES)}")

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        starters = None if self.starters is None else str(self.starters)
        return {**asdict(self), "workdir": str(self.workdir), "starters": starters}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Settings:
        """Inverse of `to_json`."""
        ops, starters = raw["ops"], raw["starters"]
        parsed = {
            "workdir": Path(raw["workdir"]),
            "ops": None if ops is None else tuple(ops),
            "starters": None if starters is None else Path(starters),
        }
        return Settings(**{**raw, **parsed})
