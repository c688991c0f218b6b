"""What a model is shown: a pure function from an op's history to the text of the next call; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from autokernel.history import KernelHistory
from autokernel.records import Experiment

CHARACTERS_PER_TOKEN = 3

SYSTEM = """\
You make one GPU or CPU kernel faster. You are given kernel.py and what was tried so far; propose one change with a
clear idea behind it. A judge that you cannot see checks the result against the oracle and times it against the current
kernel. Keep KERNEL_TYPE, BACKEND and the signature of kernel_fn. TUNABLES and CONFIG are literals.

Answer with the tool propose_kernel: a hypothesis in one line, and either kernel_py (the whole file) or edits (each
`search` must occur exactly once in kernel.py). Without tools, write a line `Hypothesis: ...`, then one fenced block
with the whole file, or edits of this form:

<<<<<<< SEARCH
lines of kernel.py
=======
lines in their place
>>>>>>> REPLACE
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContext:
    """What the prompt may tell beside the op's own history."""

    op: str
    backend: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`system` is the same for every call of an op and can be cached; `user` is the state of now."""

    system: str
    user: str


def build_prompt(history: KernelHistory, context: PromptContext, *, budget_tokens: int) -> Prompt:
    """The prompt for the next proposal, of `budget_tokens` at most where the kernel itself leaves room for that."""
    head = [
        f"Op {context.op}, backend {context.backend}, on {context.device}. The kernel takes {history.incumbent_us:.2f} "
        f"us, {history.speedup_vs_baseline:.2f}x against PyTorch ({history.baseline.fastest}).",
        f"kernel.py:\n\n```python\n{history.incumbent.rstrip()}\n```\n",
    ]
    room = budget_tokens * CHARACTERS_PER_TOKEN - len(SYSTEM) - sum(map(len, head))
    tried: list[str] = []
    for experiment in reversed(history.experiments):
        line = _line(experiment)
        room -= len(line) + 1
        if room < 0:
            break
        tried.insert(0, line)
    if tried:
        head.append("Tried so far:\n" + "\n".join(tried))
    return Prompt(system=SYSTEM, user="\n".join(head))


def _line(experiment: Experiment) -> str:
    idea, reason = (" ".join(text.split())[:200] for text in (experiment.proposal.hypothesis, experiment.reason))
    return f"{experiment.number}. {idea}: {experiment.outcome.verdict} {experiment.decision} ({reason})"
