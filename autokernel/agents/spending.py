"""What calls cost, and the hard caps of a run on money and tokens, checked before each call with its worst case."""

from __future__ import annotations

import datetime
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autokernel.agents.host import LimitReached
from autokernel.errors import ConfigError

TABLE = Path(__file__).with_name("models.toml")
PER_MILLION = 1e-6

REPLY_TOKENS = 32_000
"""Room for a reply, reasoning included; a kernel.py is a few thousand."""

LEAST_REPLY_TOKENS = 6_000
"""Below this, a kernel would be cut off: the cap counts as reached."""

CHARACTERS_PER_TOKEN = 3.0
"""Of source code; tokenizers need more characters for prose, so estimates are on the high side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call. `input_tokens` are those neither read from nor written to a cache."""

    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.input_tokens + self.cached_tokens + self.cache_write_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD per million tokens; a cache price that is not known is that of input."""

    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None

    def of(self, usage: Usage) -> float:
        """USD for a call."""
        cached = self.input if self.cached is None else self.cached
        return PER_MILLION * (
            usage.input_tokens * self.input
            + usage.cached_tokens * cached
            + usage.cache_write_tokens * self.dearest_input
            + usage.output_tokens * self.output
        )

    @property
    def dearest_input(self) -> float:
        """What a token of the prompt costs at most: when it is written to the cache."""
        return max(self.input, self.cache_write or 0.0)


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What a run has spent, earlier sessions included, and what it may spend (None: no cap)."""

    max_tokens: int | None = None
    max_cost_usd: float | None = None
    tokens: int = 0
    cost_usd: float = 0.0

    def allowance(self, prompt_tokens: int, price: Price | None) -> int:
        """How many tokens the next reply may have, REPLY_TOKENS at most.

        Raises: LimitReached when the caps leave too few, though the call might have come out cheaper.
        """
        allowed: float = REPLY_TOKENS
        if self.max_tokens is not None:
            allowed = min(allowed, self.max_tokens - self.tokens - prompt_tokens)
            if allowed < LEAST_REPLY_TOKENS:
                raise LimitReached(
                    f"the next call could exceed --max-tokens {self.max_tokens:,} ({self.tokens:,} are used)"
                )
        if self.max_cost_usd is not None and price is not None:
            left = self.max_cost_usd - self.cost_usd - prompt_tokens * price.dearest_input * PER_MILLION
            allowed = min(allowed, left / (price.output * PER_MILLION)) if price.output else allowed
            if left < 0 or allowed < LEAST_REPLY_TOKENS:
                raise LimitReached(
                    f"the next call could exceed --max-cost {self.max_cost_usd:g} (${self.cost_usd:.2f} are spent)"
                )
        return int(allowed)

    def charge(self, usage: Usage, price: Price | None) -> float | None:
        """Count a call; its USD, None when the price is unknown."""
        cost = None if price is None else price.of(usage)
        self.tokens += usage.total
        self.cost_usd += cost or 0.0
        return cost

    def check_enforceable(self, model: str, price: Price | None) -> str:
        """One line for the user when the price of `model` is unknown, else "".

        Raises: ConfigError when only --max-cost is given, as it could not be kept.
        """
        if price is not None:
            return ""
        if self.max_cost_usd is not None and self.max_tokens is None:
            raise ConfigError(
                f"the price of {model} is unknown, so --max-cost cannot be kept",
                hint=f"give --max-tokens, or add the model to {TABLE}",
            )
        cap = "--max-tokens is the only cap" if self.max_tokens is not None else "no cap is set"
        return f"the price of {model} is unknown (table of {table_date():%Y-%m-%d}): tokens are counted, {cap}"


def price_of(model: str) -> Price | None:
    """The list price of a model; a date at the end of its name (`-20251001`, `-2026-04-23`) does not matter."""
    prices: Mapping[str, Mapping[str, float]] = _table()["prices"]
    known = max((name for name in prices if model == name or _is_dated(model, name)), key=len, default=None)
    return None if known is None else Price(**prices[known])


def default_model(agent: str) -> str:
    """The model that an agent asks when none is named."""
    return str(_table()["defaults"][agent])


def table_date() -> datetime.date:
    """When the prices were read."""
    date: datetime.date = _table()["date"]
    return date


def estimate_tokens(*texts: str) -> int:
    """Upper estimate of the tokens of texts."""
    return sum(int(len(text) / CHARACTERS_PER_TOKEN) + 1 for text in texts)


def _is_dated(model: str, name: str) -> bool:
    rest = model.removeprefix(f"{name}-").replace("-", "")
    return model.startswith(f"{name}-") and len(rest) == 8 and rest.isdigit()


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text())
