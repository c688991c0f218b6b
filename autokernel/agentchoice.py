"""Which agent `--agent auto` means: an LLM when this version has one and its key is set, else the built-in search.

Only the names of environment variables are ever looked at or shown, never their values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

API_KEYS: Mapping[str, str] = {
    "anthropic": "ANTHROPIC_API_KEY",
    "openai": "OPENAI_API_KEY",
}
"""LLM agent -> environment variable that holds its key, in the order of preference."""

BASE_URLS: Mapping[str, str] = {
    "anthropic": "ANTHROPIC_BASE_URL",
    "openai": "OPENAI_BASE_URL",
}
"""LLM agent -> environment variable that names another server; both SDKs read it themselves."""

FALLBACK = "search"


def choose_agent(
    choice: str, known: Collection[str], environ: Mapping[str, str], base_url: str | None = None
) -> tuple[str, str]:
    """The agent that `choice` stands for, and one line for the user when it had to be guessed (else "").

    `known` are the agents that this version has; a `choice` other than `auto` is returned as it is. With `base_url`
    alone it is the openai agent, whose wire format nearly every server speaks.
    """
    if choice != "auto":
        return choice, ""
    if base_url is not None and "openai" in known:
        return "openai", "--base-url is given: the openai agent proposes the edits (or choose --agent anthropic)"
    for agent, key in API_KEYS.items():
        if agent in known and environ.get(key, "").strip():
            return agent, f"{key} is set: the {agent} agent proposes the edits (--agent search needs no key)"
    for agent, variable in BASE_URLS.items():
        if agent in known and environ.get(variable, "").strip():
            return agent, f"{variable} is set: the {agent} agent proposes the edits (--agent search needs no server)"
    lacking = "no API key found" if any(agent in known for agent in API_KEYS) else "no LLM agent in this version"
    return FALLBACK, f"{lacking}: the built-in {FALLBACK} agent proposes the edits"
