"""What the two SDK clients share: keys, timeouts, the deadline, and leaving out what a server does not know."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from autokernel.agentchoice import API_KEYS, BASE_URLS
from autokernel.agents import AgentOptions
from autokernel.agents.failures import failure_of
from autokernel.agents.spending import Usage, default_model, estimate_tokens
from autokernel.agents.talk import Failure, FailureKind, Reply
from autokernel.errors import ConfigError
from autokernel.prompt import Prompt

T = TypeVar("T")

NO_KEY = "none"
"""What a server of the user's own gets as key when there is none: the SDKs insist on one."""


class HttpClient(ABC):
    """One model behind an SDK. Subclasses know the wire format; `optional` are parameters that may be left out."""

    name: ClassVar[str]
    optional: ClassVar[Mapping[str, tuple[str, ...]]]
    """Parameter -> words by which a server's refusal names it."""

    def __init__(self, sdk: ModuleType, options: AgentOptions, environ: Mapping[str, str]) -> None:
        self.model = options.argument or options.model or default_model(self.name)
        self.sdk, self.options = sdk, options
        self.base_url = options.base_url or environ.get(BASE_URLS[self.name]) or None
        self.left_out: set[str] = set()
        self.timeout = sdk.Timeout(options.timeouts.idle_s, connect=options.timeouts.connect_s)

    @abstractmethod
    def stream(self, prompt: Prompt, max_tokens: int) -> Reply:
        """The reply, read as it comes in. Raises: what the SDK raises, or Failure."""

    def ask(self, prompt: Prompt, max_tokens: int) -> Reply:
        """The reply; a parameter that the server refuses by name is left out from then on. Raises: Failure."""
        while True:
            try:
                return self._ask_once(prompt, max_tokens)
            except Failure as failure:
                refused = self._refused_parameter(failure)
                if refused is None:
                    raise
                self.left_out.add(refused)
                self.options.host.note(f"{self.name}: {self.model} does not take {refused}; going on without it")

    def _ask_once(self, prompt: Prompt, max_tokens: int) -> Reply:
        variable, secrets = API_KEYS[self.name], tuple(self.options.keys.values())
        try:
            return self.stream(prompt, max_tokens)
        except Exception as error:  # the border to the SDK and the HTTP library below it
            failure = (
                error
                if isinstance(error, Failure)
                else failure_of(error, self.sdk, agent=self.name, variable=variable, secrets=secrets)
            )
            if self._was_answered and not failure.usage.total:
                failure.usage = Usage(input_tokens=estimate_tokens(prompt.system, prompt.user))
            raise failure from None

    def _refused_parameter(self, failure: Failure) -> str | None:
        if failure.kind is not FailureKind.REFUSED or failure.status not in (400, 422):
            return None
        text = failure.message.lower()
        return next(
            (
                name
                for name, words in self.optional.items()
                if name not in self.left_out and self.sends(name) and any(word in text for word in words)
            ),
            None,
        )

    def sends(self, name: str) -> bool:
        """Whether requests carry the optional parameter `name` at present."""
        given = {"temperature": self.options.temperature, "effort": self.options.effort}
        return name not in self.left_out and given.get(name, True) is not None

    def parts(self, stream: Iterable[T], response: Any) -> Iterator[T]:
        """The parts of a stream, until the deadline for the whole reply. Raises: Failure.

        Time is looked at where bytes come in, as the SDKs swallow the pings by which a server can go on forever.
        """
        read = response.iter_bytes
        response.iter_bytes = lambda *args, **kwargs: self._until_deadline(read(*args, **kwargs))
        for part in stream:
            self._was_answered = True
            yield part

    def _until_deadline(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        limit_s = self.options.timeouts.total_s
        deadline = time.monotonic() + limit_s
        for chunk in chunks:
            if time.monotonic() > deadline:
                raise Failure(FailureKind.SILENT, f"{self.name}: no complete reply in {limit_s:g} s")
            yield chunk

    _was_answered = False  # whether the call of now has begun to bring something: then its prompt is paid for

    def key(self) -> str:
        """The key for the SDK. Raises: ConfigError when there is none and the server is the provider's own."""
        variable = API_KEYS[self.name]
        if key := self.options.keys.get(variable):
            return key
        if self.base_url:
            return NO_KEY
        raise ConfigError(
            f"the {self.name} agent has no key", hint=f"set {variable}, or `autokernel keys set {self.name}`"
        )


def dropped(name: str, usage: Usage) -> Failure:
    """The failure of a stream that ended without saying that it was complete."""
    return Failure(FailureKind.DROPPED, f"{name}: the stream ended before the reply was complete", usage=usage)


def given(**parameters: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in parameters.items() if value is not None}
