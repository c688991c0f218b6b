"""What passes between the loop of an LLM agent and the client of one provider, and how a call can fail; no SDK here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from autokernel.agents.spending import Usage
from autokernel.prompt import Prompt

TOOL_NAME = "propose_kernel"
TOOL_DESCRIPTION = (
    "Hand in the next version of kernel.py. Give either kernel_py, the whole file, or edits of the current file; "
    "each `search` must occur exactly once."
)
TOOL_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "hypothesis": {"type": "string", "description": "One line: what changes, and why it should be faster."},
        "kernel_py": {"type": "string", "description": "Full text of the new kernel.py."},
        "edits": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"search": {"type": "string"}, "replace": {"type": "string"}},
                "required": ["search", "replace"],
            },
        },
    },
    "required": ["hypothesis"],
}


class Stop(StrEnum):
    """Why a reply ended."""

    END = "end"
    LENGTH = "length"  # cut off at the limit of tokens
    REFUSAL = "refusal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A complete reply. `tool_input` is what the tool was called with, as JSON text. `usage` is None where unknown."""

    text: str
    tool_input: str | None = None
    stop: Stop = Stop.END
    usage: Usage | None = None


class FailureKind(StrEnum):
    """What went wrong with a call, by what can be done about it."""

    REFUSED = "refused"  # 400, 401, 403, 404: a person must mend something
    BUSY = "busy"  # 429: asked again after the time that the server names
    OVERLOADED = "overloaded"  # 529 and 5xx
    DROPPED = "dropped"  # the connection broke before the reply was complete
    SILENT = "silent"  # nothing came in time
    TOO_LONG = "too long"  # the prompt does not fit
    QUOTA = "quota"  # paid or free quota used up: comes back with time or money
    BROKEN = "broken"  # a program that ended with an error


@dataclass(slots=True)
class Failure(Exception):
    """A call that brought no reply. The message holds no secret. `usage` is what it may have cost all the same."""

    kind: FailureKind
    message: str
    status: int | None = None
    hint: str = ""
    retry_after_s: float | None = None
    usage: Usage = field(default_factory=Usage)

    def __str__(self) -> str:
        return self.message


class Client(Protocol):
    """One model of one provider."""

    @property
    def name(self) -> str:
        """Of the provider."""

    @property
    def model(self) -> str:
        """Of the model, as the provider calls it."""

    def ask(self, prompt: Prompt, max_tokens: int) -> Reply:
        """The reply, of `max_tokens` at most. Raises: Failure."""
