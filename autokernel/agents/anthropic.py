"""`--agent anthropic`: the Messages API through the official SDK, with the system part of the prompt cached."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autokernel.agents import Agent, AgentOptions
from autokernel.agents.http import HttpClient, dropped, given
from autokernel.agents.llm import llm_agent
from autokernel.agents.spending import Usage
from autokernel.agents.talk import TOOL_DESCRIPTION, TOOL_NAME, TOOL_SCHEMA, Reply, Stop
from autokernel.prompt import Prompt

if TYPE_CHECKING:
    from anthropic.types import Message

STOPS = {
    "max_tokens": Stop.LENGTH,
    "model_context_window_exceeded": Stop.LENGTH,
    "refusal": Stop.REFUSAL,
}


class AnthropicClient(HttpClient):
    """A Claude model, or another one behind the same API."""

    name = "anthropic"
    optional: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "temperature": ("temperature",),
        "effort": ("effort", "output_config"),
        "tools": ("tool",),
    }

    def __init__(self, options: AgentOptions) -> None:
        import anthropic

        super().__init__(anthropic, options, os.environ)
        token = options.keys.get("ANTHROPIC_AUTH_TOKEN")
        bearer = token if token and "ANTHROPIC_API_KEY" not in options.keys else None
        self._client = anthropic.Anthropic(
            api_key=None if bearer else self.key(),
            auth_token=bearer,
            base_url=self.base_url,
            timeout=self.timeout,
            max_retries=0,  # the waiter's business
        )

    def stream(self, prompt: Prompt, max_tokens: int) -> Reply:
        """The reply, read as it comes in."""
        system = {"type": "text", "text": prompt.system, "cache_control": {"type": "ephemeral"}}
        tool = {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "input_schema": dict(TOOL_SCHEMA)}
        request: dict[str, Any] = given(
            tools=[tool] if self.sends("tools") else None,
            output_config={"effort": self.options.effort} if self.sends("effort") else None,
            extra_body={"temperature": self.options.temperature} if self.sends("temperature") else None,
        )
        self._was_answered = False
        with self._client.messages.stream(
            model=self.model,
            max_tokens=max_tokens,
            system=[system],  # type: ignore[list-item]
            messages=[{"role": "user", "content": prompt.user}],
            **request,
        ) as stream:
            for _ in self.parts(stream, stream.response):
                pass
            if not self._was_answered:
                raise dropped(self.name, Usage())
            return self._reply(stream.get_final_message())

    def _reply(self, message: Message) -> Reply:
        usage = Usage(
            input_tokens=message.usage.input_tokens,
            cached_tokens=message.usage.cache_read_input_tokens or 0,
            cache_write_tokens=message.usage.cache_creation_input_tokens or 0,
            output_tokens=message.usage.output_tokens,
        )
        if message.stop_reason is None:
            raise dropped(self.name, usage)
        text = "\n".join(block.text for block in message.content if block.type == "text")
        calls = [block.input for block in message.content if block.type == "tool_use" and block.name == TOOL_NAME]
        stop = STOPS.get(message.stop_reason, Stop.END)
        return Reply(text=text, tool_input=json.dumps(calls[0]) if calls else None, stop=stop, usage=usage)


def build(options: AgentOptions) -> Agent:
    """The agent for `--agent anthropic[:MODEL]`. Raises: ConfigError when there is no key."""
    return llm_agent(AnthropicClient(options), options)
