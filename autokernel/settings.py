"""What the user asked of a run, written to the journal and read back on resume; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autokernel.errors import ConfigError

DEFAULT_HOURS = 8.0
SANDBOX_MODES = ("auto", "strict", "off")
OUTSIDE = "outside"
"""The agent of a run that is driven by `next` and `submit`."""

LIMITS = ("budget_s", "max_experiments", "sandbox", "tune_s", "base_url", "max_cost_usd", "max_tokens")
"""What may change when a run is resumed."""

BACKENDS = ("triton", "cuda", "cpp")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
DTYPES_OF_BACKEND = {"triton": ("fp32", "bf16", "fp16"), "cuda": ("fp32", "bf16", "fp16"), "cpp": ("fp32", "bf16")}
"""What starters and candidates must handle; a CPU has no fast fp16."""


def dtypes_of(backend: str, known: Sequence[str]) -> tuple[str, ...]:
    """In which dtypes an op that knows `known` is judged: the backend's, or its own where it has none of those."""
    return tuple(dtype for dtype in DTYPES_OF_BACKEND[backend] if dtype in known) or tuple(known)


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
    tune_s: float = 45.0  # for the search of an edit's best configuration; 0: none
    llm_model: str | None = None  # None: the agent's default
    base_url: str | None = None
    temperature: float | None = None
    effort: str | None = None
    max_cost_usd: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("budget_s", "patience"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give a positive number")
        if not 0 <= self.tune_s < float("inf"):
            raise ConfigError(f"--tune is {self.tune_s}", hint="give seconds, or 0 for no search")
        if self.max_experiments is not None and self.max_experiments < 1:
            raise ConfigError(f"--experiments is {self.max_experiments}", hint="give 1 or more")
        if self.starters is not None and not self.starters.is_dir():
            raise ConfigError(f"--starters {self.starters} is no folder", hint="give a folder with <op>.py files")
        check_llm(self)
        if self.backend not in ("auto", *BACKENDS):
            raise ConfigError(f"unknown backend {self.backend!r}", hint=f"known: auto, {', '.join(BACKENDS)}")

        if self.sandbox not in SANDBOX_MODES:
            raise ConfigError(f"--sandbox is {self.sandbox!r}", hint=f"known: {', '.join(SANDBOX_MODES)}")

    @property
    def shown_model(self) -> str:
        """The model as a report names it: by a path below `workdir`, or by the file's name where it lies elsewhere."""
        scheme = "hf:" if self.model.startswith("hf:") else ""
        path, colon, name = self.model.removeprefix(scheme).partition(":")
        if not Path(path).is_absolute():
            return self.model
        below = Path(path).is_relative_to(self.workdir)
        shown = str(Path(path).relative_to(self.workdir)) if below else Path(path).name
        return f"{scheme}{shown}{colon}{name}"

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


def check_llm(settings: Settings) -> None:
    """The options of agents that ask a model. Raises: ConfigError."""
    if settings.max_cost_usd is not None and not 0 < settings.max_cost_usd < float("inf"):
        raise ConfigError(f"--max-cost is {settings.max_cost_usd}", hint="give US dollars above 0")
    if settings.max_tokens is not None and settings.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {settings.max_tokens}", hint="give 1 or more")
    if settings.temperature is not None and not 0 <= settings.temperature <= 2:
        raise ConfigError(f"--temperature is {settings.temperature}", hint="give 0 to 2")
    if settings.effort is not None and settings.effort not in EFFORTS:
        raise ConfigError(f"--effort is {settings.effort!r}", hint=f"known: {', '.join(EFFORTS)}")
    if settings.base_url is not None:
        url = urlsplit(settings.base_url)
        if url.username or url.password:  # settings are journaled
            raise ConfigError("--base-url holds a password", hint="give the key with `autokernel keys set` instead")
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(f"--base-url {settings.base_url!r} is no address", hint="http://localhost:8000/v1, say")
