"""The real SDKs against the loopback server: requests, replies of all sorts, and every failure with short times."""

import contextlib
import json
import signal
import threading
import time

import pytest

from autokernel.agents.host import LimitReached
from autokernel.agents.spending import Ledger
from autokernel.errors import AgentError, ConfigError
from tests.agents.conftest import BETTER, KERNEL, SECRET, Listener, a_history, proposal
from tests.agents.server import Say, in_a_second

TOOL = {"hypothesis": "unroll by 2", "kernel_py": BETTER}
GOOD = Say(tool=TOOL)
EDITS = {"hypothesis": "edit", "edits": [{"search": '"UNROLL": 1}', "replace": '"UNROLL": 2}'}]}


def overloaded(provider):
    kind = "overloaded_error" if provider == "anthropic" else "server_error"
    return {"type": "error", "error": {"type": kind, "message": "try later"}}


def failing(status, message="no", kind="x", **changes):
    return Say(status=status, error={"type": "error", "error": {"type": kind, "message": message}}, **changes)


def test_tool_call_with_a_whole_file(scene):
    here = scene([GOOD])
    found = here.propose()
    assert (found.hypothesis, found.kernel_py) == ("unroll by 2", BETTER)
    assert found.tokens == 1650
    assert here.ledger.tokens == 1650
    assert here.host.outcomes == ["ok"]


def test_tool_call_with_edits(scene):
    assert scene([Say(tool=EDITS)]).propose().kernel_py == BETTER


def test_text_is_read_when_no_tool_is_called(scene):
    here = scene([Say(text=f"Hypothesis: unroll twice\n\n```python\n{BETTER}```\n")])
    found = here.propose()
    assert (found.hypothesis, found.kernel_py) == ("unroll twice", BETTER)


def test_request_streams_offers_the_tool_and_marks_the_stable_prefix(scene, provider):
    here = scene([GOOD], model="some-model", temperature=0.5, effort="low")
    here.propose()
    request = here.server.requests[0]
    assert request["stream"] is True
    assert request["model"] == "some-model"
    assert request["temperature"] == 0.5
    assert "propose_kernel" in json.dumps(request["tools"])
    if provider == "anthropic":
        assert request["system"][0]["cache_control"] == {"type": "ephemeral"}
        assert request["output_config"] == {"effort": "low"}
        assert "tool_choice" not in request  # models that always think refuse a forced tool
    else:
        assert request["messages"][0]["role"] == "system"
        assert request["reasoning_effort"] == "low"
        assert request["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [
        (Say(text="I would unroll the loop."), "prose only"),
        (Say(text=f"```python\n{BETTER[:-40]}", finish="length"), "truncated"),
        (Say(tool='{"hypothesis": "x", "kernel_py": "imp', finish="length"), "truncated"),
        (Say(refusal="I cannot help with that."), "refused"),
        (Say(), "empty"),
        (Say(tool={"hypothesis": "x", "kernel_py": KERNEL}), "unchanged"),
        (Say(tool={"hypothesis": "x", "kernel_py": "def kernel_fn(:\n"}), "syntax error"),
        (Say(tool={"hypothesis": "x", "edits": [{"search": "nowhere", "replace": "x"}]}), "edit does not apply"),
        (Say(tool={"hypothesis": "x"}), "unreadable tool call"),
    ],
)
def test_bad_reply_is_an_outcome_and_asked_about_again(scene, bad, outcome):
    here = scene([bad, GOOD])
    assert here.propose().kernel_py == BETTER
    assert here.host.outcomes == [outcome, "ok"]
    assert len(here.server.requests) == 2


def test_syntax_error_goes_back_with_the_message_once(scene):
    broken = Say(tool={"hypothesis": "x", "kernel_py": "def kernel_fn(:\n"})
    here = scene([broken, broken, GOOD])
    here.propose()
    asked = [json.dumps(request["messages"]) for request in here.server.requests]
    assert ["invalid syntax" in text for text in asked] == [False, True, False]


def test_repairs_are_bounded(scene):
    here = scene(lambda _: Say(text="Let me think about it."))
    assert here.propose() is None
    assert len(here.server.requests) == 6
    assert here.host.notes[-1].startswith("rmsnorm: ")


def test_what_was_tried_is_not_judged_again(scene):
    here = scene([GOOD, Say(tool={"hypothesis": "4", "kernel_py": BETTER.replace(": 2}", ": 4}")})])
    found = here.propose(a_history((proposal(), "REVERT")))
    assert '"UNROLL": 4}' in found.kernel_py
    assert here.host.outcomes == ["tried before", "ok"]


# -- failures of calls


@pytest.mark.parametrize(
    ("status", "hint"), [(400, "--model"), (401, "autokernel keys set"), (403, "permissions"), (404, "--model")]
)
def test_a_refused_request_stops_with_the_mend(scene, status, hint):
    here = scene([failing(status, f"bad key {SECRET}")])
    with pytest.raises(ConfigError) as caught:
        here.propose()
    assert hint in caught.value.hint
    assert SECRET not in f"{caught.value} {here.host.everything}"
    assert len(here.server.requests) == 1


@pytest.mark.parametrize("after", ["0.3", "date"])
def test_retry_after_is_honoured(scene, after):
    here = scene([failing(429, headers={"retry-after": in_a_second() if after == "date" else after}), GOOD])
    begin = time.monotonic()
    assert here.propose().kernel_py == BETTER
    assert time.monotonic() - begin > 0.25
    assert here.host.outcomes == ["busy", "ok"]
    assert sum(here.host.waits) > 0.25


@pytest.mark.parametrize("status", [500, 503, 529])
def test_overloaded_servers_are_asked_again(scene, status, provider):
    here = scene([Say(status=status, error=overloaded(provider))] * 3 + [GOOD])
    assert here.propose().kernel_py == BETTER
    assert here.host.outcomes == ["overloaded"] * 3 + ["ok"]


@pytest.mark.parametrize(
    ("then", "outcome"),
    [("drop", "dropped"), ("close", "dropped"), ("silent", "silent"), ("mute", "silent"), ("drip", "silent")],
)
def test_broken_streams_are_asked_again(scene, then, outcome):
    here = scene([Say(tool=TOOL, then=then), GOOD])
    assert here.propose().kernel_py == BETTER
    assert here.host.outcomes == [outcome, "ok"]


def test_error_inside_a_stream(scene, provider):
    here = scene([Say(tool=TOOL, then="error", error=overloaded(provider)), GOOD])
    assert here.propose().kernel_py == BETTER
    assert here.host.outcomes == ["overloaded", "ok"]


def test_what_a_dropped_stream_has_cost_is_counted(scene):
    here = scene([Say(text="x" * 3000, then="drop"), GOOD])
    assert here.propose().tokens > 1650


def test_too_long_a_prompt_is_shortened(scene, provider):
    message = "prompt is too long" if provider == "anthropic" else "maximum context length is 1000 tokens"
    many = [
        (proposal(BETTER + f"# {n}\n" + f"N{n} = {n}\n", hypothesis=f"idea {n} " + "word " * 40), "REVERT")
        for n in range(60)
    ]
    here = scene([failing(400, message), GOOD])
    assert here.propose(a_history(*many)).kernel_py == BETTER
    first, second = (len(json.dumps(request)) for request in here.server.requests)
    assert second < 0.8 * first
    assert here.host.outcomes == ["too long", "ok"]


def test_a_kernel_that_can_never_fit_stops(scene):
    here = scene(lambda _: failing(400, "prompt is too long: context window exceeded"))
    with pytest.raises((AgentError, ConfigError), match=r"too long|prompt"):
        here.propose()


def test_quota_is_waited_out_with_a_countdown(scene):
    here = scene([failing(429, "You exceeded your current quota", "insufficient_quota"), GOOD])
    here.agent.waiter.scale = 1e-4
    assert here.propose().kernel_py == BETTER
    assert any(stage.startswith("quota: asking again in 0:0") for stage in here.host.stages)
    assert any("asking again in" in note for note in here.host.notes)


def test_no_wait_beyond_the_end_of_the_run(scene):
    here = scene([failing(429, headers={"retry-after": "7200"})], host=Listener(time_left_s=60))
    with pytest.raises(LimitReached, match="2:00:00"):
        here.propose()


@pytest.fixture
def interruptible():
    """Ctrl-C as a terminal's program gets it: one that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_waiting_at_once(scene):
    here = scene([failing(429, headers={"retry-after": "600"})])
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    begin = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        here.propose()
    assert time.monotonic() - begin < 5
    assert here.host.waits


def test_an_address_where_nobody_listens_stops(scene, provider):
    here = scene([])
    here.server.shutdown()
    here.server.server_close()
    with pytest.raises(AgentError) as caught:
        here.propose()
    assert "--base-url" in caught.value.hint
    assert len(here.host.calls) == 4


@pytest.mark.parametrize("name", ["temperature", "effort", "tools"])
def test_a_parameter_that_a_server_does_not_know_is_left_out(scene, name, provider):
    said = {
        "temperature": "temperature is deprecated",
        "effort": "reasoning_effort not supported",
        "tools": "no tools here",
    }
    here = scene([failing(400, said[name]), Say(text=f"```\n{BETTER}```"), GOOD], temperature=1.0, effort="low")
    assert here.propose().kernel_py == BETTER
    wire = {"effort": "output_config" if provider == "anthropic" else "reasoning_effort"}.get(name, name)
    assert [wire in request for request in here.server.requests] == [True, False]
    assert any("going on without it" in note for note in here.host.notes)


# -- spending


def test_cost_is_that_of_the_table(scene, provider):
    model = {"anthropic": "claude-opus-5-5", "openai": "gpt-6.2-sol"}[provider]
    cost = {"anthropic": 1000 * 4 + 400 * 0.2 + 50 * 5 + 200 * 20, "openai": 1000 * 2 + 400 * 0.1 + 50 * 2.5 + 200 * 10}
    here = scene([GOOD], model=model)
    assert here.propose().cost_usd == pytest.approx(cost[provider] / 1e6)


def test_caps_stop_before_the_call(scene):
    here = scene([GOOD], ledger=Ledger(max_tokens=6_500, tokens=5_000))
    with pytest.raises(LimitReached, match="--max-tokens"):
        here.propose()
    costly = scene([GOOD], ledger=Ledger(max_cost_usd=0.02, cost_usd=0.0))
    with pytest.raises(LimitReached, match="--max-cost"):
        costly.propose()
    assert not here.server.requests + costly.server.requests


def test_a_cap_makes_the_reply_shorter_first(scene, provider):
    here = scene([GOOD], ledger=Ledger(max_tokens=24_000))
    here.propose()
    name = "max_tokens" if provider == "anthropic" else "max_completion_tokens"
    assert 6_000 <= here.server.requests[0][name] < 24_000


def test_unknown_price_is_said_once_and_cost_cap_needs_a_token_cap(scene):
    with pytest.raises(ConfigError, match="price"):
        scene([GOOD], model="my-own", ledger=Ledger(max_cost_usd=1.0))
    here = scene([GOOD, GOOD], model="my-own", ledger=Ledger(max_cost_usd=1.0, max_tokens=100_000))
    assert here.propose().cost_usd is None
    here.propose()
    assert len([note for note in here.host.notes if "price" in note]) == 1


def test_keys_are_sent_and_never_told(scene, provider):
    here = scene([Say(tool={**TOOL, "hypothesis": f"use {SECRET}"}, then=""), failing(401, SECRET)])
    found = here.propose()
    with contextlib.suppress(ConfigError):
        here.propose()
    sent = {name.lower(): value for name, value in here.server.headers_seen[0].items()}
    assert SECRET in (sent.get("x-api-key", "") + sent.get("authorization", ""))
    assert SECRET not in json.dumps(here.server.requests)
    assert SECRET not in here.host.everything + repr(found) + repr(here.agent)


def test_no_key_is_an_error_with_the_mend_unless_the_server_is_ones_own(scene, provider):
    assert scene([GOOD], keys={}).propose().kernel_py == BETTER
    with pytest.raises(ConfigError, match="no key") as caught:
        scene([GOOD], keys={}, base_url=None)
    assert f"autokernel keys set {provider}" in caught.value.hint
