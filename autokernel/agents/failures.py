"""Turns what an SDK raises into a `Failure`; both SDKs have the same classes, so one table serves both."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from autokernel.agents.talk import Failure, FailureKind
from autokernel.keys import redact

MESSAGE_LIMIT = 300

TOO_LONG_WORDS = (
    "prompt is too long",
    "context_length_exceeded",
    "context length",
    "context window",
    "maximum context",
    "request_too_large",
    "input is too long",
)
QUOTA_WORDS = ("insufficient_quota", "credit balance", "billing", "exceeded your current quota", "usage limit")
KINDS_OF_TYPE = {
    "overloaded_error": FailureKind.OVERLOADED,
    "api_error": FailureKind.OVERLOADED,
    "server_error": FailureKind.OVERLOADED,
    "timeout_error": FailureKind.OVERLOADED,
    "rate_limit_error": FailureKind.BUSY,
    "rate_limit_exceeded": FailureKind.BUSY,
}
"""Errors that come inside a stream have no status of their own, but a type."""

HINTS = {
    400: "check --model, --effort and --temperature",
    401: "the key was not accepted: set {variable}, or `autokernel keys set {agent}`",
    403: "the key may not use this model or this address: check its permissions, or choose another --model",
    404: "check --model and --base-url: the server knows no such model or address",
}


def failure_of(error: Exception, sdk: ModuleType, *, agent: str, variable: str, secrets: Collection[str]) -> Failure:
    """What `error`, raised by `sdk` or the HTTP library below it, means for the loop; its text without `secrets`."""
    message = redact(" ".join(str(error).split()), secrets)[:MESSAGE_LIMIT]
    if isinstance(error, sdk.APITimeoutError) or "timeout" in type(error).__name__.lower():
        return Failure(FailureKind.SILENT, f"{agent}: nothing came in time")
    if isinstance(error, sdk.APIConnectionError) or not isinstance(error, sdk.APIError):
        cause = redact(str(error.__cause__ or error), secrets)[:MESSAGE_LIMIT]
        return Failure(FailureKind.DROPPED, f"{agent}: the connection failed ({cause})")
    status = getattr(error, "status_code", None)
    kind = classify(status, f"{_codes(error.body)} {message}".lower())
    response = getattr(error, "response", None)
    after = None if response is None else retry_after_s(response.headers, time.time())
    hint = HINTS.get(status or 400, HINTS[400]).format(variable=variable, agent=agent)
    return Failure(kind, f"{agent}: {message}", status=status, hint=hint, retry_after_s=after)


def classify(status: int | None, text: str) -> FailureKind:
    """What an error with this HTTP status (None or 200: inside a stream) and text (codes and message) means."""
    if any(word in text for word in QUOTA_WORDS) and status not in (401, 404):
        return FailureKind.QUOTA
    if status == 429:
        return FailureKind.BUSY
    if any(word in text for word in TOO_LONG_WORDS):
        return FailureKind.TOO_LONG
    if status is not None and (status >= 500 or status in (408, 409)):
        return FailureKind.OVERLOADED
    if status is None or status < 400:
        return next((kind for word, kind in KINDS_OF_TYPE.items() if word in text), FailureKind.DROPPED)
    return FailureKind.TOO_LONG if status == 413 else FailureKind.REFUSED


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that the server asks to wait: `retry-after-ms`, or `retry-after` as a number or an HTTP date."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        text = headers.get(name, "").strip()
        try:
            seconds = float(text) * unit_s
        except ValueError:
            continue
        return seconds if 0 <= seconds < float("inf") else None
    try:
        date = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, TypeError):
        return None
    return max(0.0, date.timestamp() - now)


def _codes(body: Any) -> str:
    """The machine-readable words of an error's body."""
    if not isinstance(body, dict):
        return ""
    inner = body.get("error")
    nested = _codes(inner) if isinstance(inner, dict) else ""
    return " ".join(str(body[name]) for name in ("type", "code", "message") if body.get(name)) + f" {nested}"
