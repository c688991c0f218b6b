"""The prompt: from the state of one op to what a language model reads. Pure; program.md is read once.

The system part is the same for all experiments of an op, so that providers can cache it: the playbook's sections for
this op, backend and architecture. The user part changes. Its size is bounded whatever the history: the oldest
experiments go first, then reasons are shortened; kernel.py is never cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autokernel import experience, playbook
from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.records import Decision, KernelResources, TimedCase
from autokernel.standing import RooflinePosition, standing

CHARS_PER_TOKEN = 3.5
"""An estimate, on the safe side for English and code in today's tokenizers; no tokenizer is loaded for it."""

NUMBERS_LINES = 24
HISTORY_TOKENS = 4000
"""Kept free for what experiments have taught: of a playbook that would leave less, less is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is sent: `system` is stable over an op's experiments, `user` is not."""

    system: str
    user: str

    @property
    def tokens(self) -> int:
        """Estimated size of both parts."""
        return estimate_tokens(self.system) + estimate_tokens(self.user)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherIdea:
    """What worked on another op of this run."""

    op: str
    idea: str
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContext:
    """What is known beside the history; whatever is None is taken from there, or left out.

    `arch` is `sm_90`, `gfx942`, `cpu`. `cases` are the user's calls, as records or as labels. `resources` are the
    incumbent's compiled kernels. `oracle` is the source of the op's oracle, `allowed_calls` what it may call in ATen.
    `closing` asks for the answer.
    """

    op: str
    backend: str
    device: str
    arch: str | None = None
    cases: tuple[TimedCase | str, ...] | None = None
    roofline: RooflinePosition | None = None
    resources: tuple[KernelResources, ...] | None = None
    ideas: tuple[OtherIdea, ...] | None = None
    baselines_us: Mapping[str, float] | None = None
    oracle: str | None = None
    closing: str = "Propose the next experiment, in the form that the playbook asks for."
    allowed_calls: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Detail:
    """How much of the history is told."""

    rows: int
    reason_chars: int
    avoided: int
    failure_chars: int
    ideas: int = 6


LADDER = (
    _Detail(rows=40, reason_chars=200, avoided=60, failure_chars=6000),
    _Detail(rows=30, reason_chars=200, avoided=40, failure_chars=6000),
    _Detail(rows=20, reason_chars=200, avoided=30, failure_chars=6000),
    _Detail(rows=12, reason_chars=200, avoided=20, failure_chars=6000),
    _Detail(rows=8, reason_chars=200, avoided=12, failure_chars=4000),
    _Detail(rows=8, reason_chars=90, avoided=12, failure_chars=3000),
    _Detail(rows=8, reason_chars=0, avoided=8, failure_chars=2000, ideas=3),
    _Detail(rows=4, reason_chars=0, avoided=4, failure_chars=1200, ideas=3),
    _Detail(rows=2, reason_chars=0, avoided=2, failure_chars=600, ideas=1),
    _Detail(rows=0, reason_chars=0, avoided=0, failure_chars=300, ideas=0),
)
"""From all that is useful down to next to nothing; the first that fits is taken."""


def build_prompt(history: KernelHistory, context: PromptContext, *, budget_tokens: int) -> Prompt:
    """The prompt for the next experiment, at most `budget_tokens` long (estimated).

    Raises: ConfigError when the budget does not hold the playbook's core, kernel.py and the bare task.
    """
    system = system_part(context, budget_tokens - estimate_tokens(history.incumbent) - HISTORY_TOKENS)
    left = budget_tokens - estimate_tokens(system)
    user = ""
    for detail in LADDER:
        user = user_part(history, context, detail)
        if estimate_tokens(user) <= left:
            return Prompt(system=system, user=user)
    needed = estimate_tokens(system) + estimate_tokens(user)
    raise ConfigError(
        f"{context.op}: the prompt needs about {needed} tokens (kernel.py alone "
        f"{estimate_tokens(history.incumbent)}), and {budget_tokens} are allowed",
        hint="allow more tokens for the prompt, or take a model with a larger context",
    )


def ideas_of(histories: Iterable[KernelHistory], *, but: str) -> tuple[OtherIdea, ...]:
    """The best kept idea of each op of a run, except the op `but`."""
    ideas = []
    for history in histories:
        kept = [e for e in history.experiments if e.decision is Decision.KEEP and e.outcome.timing is not None]
        if kept and history.op != but:
            gain, _, best = max((e.outcome.timing.speedup.estimate, -e.number, e) for e in kept if e.outcome.timing)
            ideas.append(OtherIdea(op=history.op, idea=best.proposal.hypothesis, speedup=gain))
    return tuple(ideas)


def estimate_tokens(text: str) -> int:
    """About how many tokens `text` is, at 3.5 characters each (other scripts than Latin take more: 1 per character)."""
    wide = 0 if text.isascii() else sum(character > "\u2fff" for character in text)
    return math.ceil((len(text) - wide) / CHARS_PER_TOKEN) + wide


def system_part(context: PromptContext, room_tokens: int) -> str:
    """Playbook and oracle; the playbook without snippets, or its core alone, where more does not fit in `room_tokens`.

    Nothing else that an experiment changes has a part in it, so that it stays the same but for a kernel that outgrows
    a small budget.
    """
    text = ""
    for extent in playbook.Extent:
        text = _system(context, extent)
        if estimate_tokens(text) <= room_tokens:
            break
    return text


def user_part(history: KernelHistory, context: PromptContext, detail: _Detail) -> str:
    """Everything that changes from one experiment to the next, what changes least first."""
    parts = [
        f"# Task\n\nMake `{context.op}` faster. Backend `{context.backend}`, on {context.device}"
        + (f" ({context.arch})." if context.arch else "."),
        _calls(history, context),
        *_other_ideas(context, detail),
        f"## kernel.py now (the incumbent)\n\n{experience.fenced(history.incumbent, 'python')}",
        standing(history, context.roofline, _latencies(history, context), context.resources or ()),
        *_experiments(history, detail),
        *_numbers(history, detail),
        *_not_again(history, detail),
    ]
    if failure := experience.last_failure(history, detail.failure_chars):
        parts.append(f"## The last failure, in full\n\n{failure}")
    parts.append(context.closing)
    return "\n\n".join(parts) + "\n"


def _system(context: PromptContext, extent: playbook.Extent) -> str:
    chosen = playbook.select(
        playbook.sections(), op=context.op, backend=context.backend, arch=context.arch, extent=extent
    )
    parts = [playbook.render(chosen)]
    if context.oracle:
        parts.append(f"## The oracle of {context.op}\n\n{experience.fenced(context.oracle, 'python')}")
    if context.allowed_calls is not None:
        named = ", ".join(f"`{name}`" for name in sorted(context.allowed_calls)) or "none"
        parts.append(f"ATen calls that {context.op} may make beyond allocation and views: {named}.")
    return "\n\n".join(parts) + "\n"


def _calls(history: KernelHistory, context: PromptContext) -> str:
    cases = history.planned.cases if context.cases is None else context.cases
    lines = ["## The user's calls in one forward", ""]
    lines += [f"- {case if isinstance(case, str) else _call(case)}" for case in cases]
    latencies = _latencies(history, context)
    if latencies:
        ranked = sorted(latencies.items(), key=lambda item: item[1])
        lines += ["", "PyTorch takes for all of them: " + ", ".join(f"{n} {us:.1f} us" for n, us in ranked) + "."]
    return "\n".join(lines)


def _latencies(history: KernelHistory, context: PromptContext) -> Mapping[str, float]:
    return history.baseline.latencies_us if context.baselines_us is None else context.baselines_us


def _call(timed: TimedCase) -> str:
    tensors = []
    for name, meta in timed.case.tensors.items():
        strides = "" if meta.stride is None else f" strides {list(meta.stride)}"
        tensors.append(f"{name} {list(meta.shape)} {meta.dtype}{strides}")
    scalars = [f"{name}={value!r}" for name, value in timed.case.scalars.items()]
    return f"{timed.calls} x ({', '.join([*tensors, *scalars])})"


def _other_ideas(context: PromptContext, detail: _Detail) -> Iterator[str]:
    best = sorted(context.ideas or (), key=lambda idea: -idea.speedup)[: detail.ideas]
    if best:
        lines = [f"- {i.op}, {i.speedup:.2f}x: {experience.one_line(i.idea, experience.IDEA_CHARS)}" for i in best]
        yield "## What worked on other ops of this run\n\n" + "\n".join(lines)


def _experiments(history: KernelHistory, detail: _Detail) -> Iterator[str]:
    done = history.experiments
    if not done:
        yield "## Experiments\n\nNone yet: the incumbent is the starter."
        return
    text = f"## Experiments\n\n{len(done)} so far, {history.kept} kept; {history.reverts_in_a_row} reverted in a row."
    shown = done[-detail.rows :] if detail.rows else ()
    if shown:
        told = "" if len(shown) == len(done) else f" The newest {len(shown)}:"
        text += f"{told}\n\n{experience.table(shown, detail.reason_chars)}"
    yield text


def _numbers(history: KernelHistory, detail: _Detail) -> Iterator[str]:
    """What the newest search of an edit's configurations found."""
    found = next((each for each in reversed(history.experiments) if each.proposal.numbers), None)
    if found is not None and detail.rows:
        head = f"## What a search over the CONFIG of experiment {found.number} found"
        lines = found.proposal.numbers.splitlines()[:NUMBERS_LINES]
        yield "\n".join([head, "", *(experience.one_line(line, experience.IDEA_CHARS) for line in lines)])


def _not_again(history: KernelHistory, detail: _Detail) -> Iterator[str]:
    older = itertools.islice(reversed(history.experiments), detail.rows, None)
    ideas = experience.refuted(older, detail.avoided)
    configs = experience.judged_configs(history, detail.avoided)
    if not ideas and not configs:
        return
    lines = ["## Do not repeat"]
    if ideas:
        lines += ["", "Older ideas that were reverted:", *ideas]
    if configs:
        lines += ["", "Settings of this very kernel.py that were judged already:", *configs]
    yield "\n".join(lines)
