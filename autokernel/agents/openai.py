"""`--agent openai`: chat completions through the official SDK, which vLLM, Ollama, OpenRouter and others speak, too.

Servers cache the stable beginning of a prompt by themselves here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from autokernel.agents import Agent, AgentOptions
from autokernel.agents.http import HttpClient, dropped, given
from autokernel.agents.llm import llm_agent
from autokernel.agents.spending import Usage, estimate_tokens
from autokernel.agents.talk import TOOL_DESCRIPTION, TOOL_NAME, TOOL_SCHEMA, Reply, Stop
from autokernel.prompt import Prompt

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletionChunk

STOPS = {"length": Stop.LENGTH, "content_filter": Stop.REFUSAL}


@dataclass(slots=True)
class _Gathered:
    """The parts of one reply so far."""

    text: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    finish: str | None = None
    usage: CompletionUsage | None = None

    def add(self, chunk: ChatCompletionChunk) -> None:
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices[:1]:
            self.finish = choice.finish_reason or self.finish
            self.text.append(choice.delta.content or "")
            self.refusal.append(choice.delta.refusal or "")
            for call in choice.delta.tool_calls or ():
                if call.function is not None:
                    self.names.setdefault(call.index, call.function.name or "")
                    self.calls.setdefault(call.index, []).append(call.function.arguments or "")

    def tool_input(self) -> str | None:
        wanted = [index for index, name in self.names.items() if name in (TOOL_NAME, "")]
        return "".join(self.calls[wanted[0]]) if wanted else None


class OpenAIClient(HttpClient):
    """A model behind chat completions."""

    name = "openai"
    optional: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "temperature": ("temperature",),
        "effort": ("reasoning_effort", "reasoning effort"),
        "tools": ("tool", "function"),
        "stream_options": ("stream_options",),
        "max_completion_tokens": ("max_completion_tokens",),
    }

    def __init__(self, options: AgentOptions) -> None:
        import openai

        super().__init__(openai, options, os.environ)
        self._client = openai.OpenAI(api_key=self.key(), base_url=self.base_url, timeout=self.timeout, max_retries=0)

    def stream(self, prompt: Prompt, max_tokens: int) -> Reply:
        """The reply, read as it comes in."""
        tool = {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": dict(TOOL_SCHEMA)}
        limit = "max_completion_tokens" if self.sends("max_completion_tokens") else "max_tokens"
        request: dict[str, Any] = given(
            tools=[{"type": "function", "function": tool}] if self.sends("tools") else None,
            reasoning_effort=self.options.effort if self.sends("effort") else None,
            temperature=self.options.temperature if self.sends("temperature") else None,
            stream_options={"include_usage": True} if self.sends("stream_options") else None,
        )
        request[limit] = max_tokens
        self._was_answered = False
        gathered = _Gathered()
        with self._client.chat.completions.create(
            model=self.model,
            messages=[{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.user}],
            stream=True,
            **request,
        ) as stream:
            for chunk in self.parts(stream, stream.response):
                gathered.add(chunk)
        return self._reply(gathered, prompt)

    def _reply(self, gathered: _Gathered, prompt: Prompt) -> Reply:
        text, refusal, tool_input = "".join(gathered.text), "".join(gathered.refusal), gathered.tool_input()
        usage = _usage(gathered.usage) or Usage(
            input_tokens=estimate_tokens(prompt.system, prompt.user) if self._was_answered else 0,
            output_tokens=estimate_tokens(text, tool_input or "") if self._was_answered else 0,
        )
        if gathered.finish is None:
            raise dropped(self.name, usage)
        stop = Stop.REFUSAL if refusal else STOPS.get(gathered.finish, Stop.END)
        return Reply(text=text or refusal, tool_input=tool_input, stop=stop, usage=usage)


def _usage(told: CompletionUsage | None) -> Usage | None:
    """What the server counted; cached and written tokens are part of the prompt's there."""
    if told is None:
        return None
    details = told.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    written = (getattr(details, "cache_write_tokens", None) or 0) if details else 0
    return Usage(
        input_tokens=max(0, told.prompt_tokens - cached - written),
        cached_tokens=cached,
        cache_write_tokens=written,
        output_tokens=told.completion_tokens,
    )


def build(options: AgentOptions) -> Agent:
    """The agent for `--agent openai[:MODEL]`. Raises: ConfigError when there is no key and no --base-url."""
    return llm_agent(OpenAIClient(options), options)
