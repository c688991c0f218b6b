"""The prompt: what it says in a few states, that its size is bounded, and that only what applies is in it.

Snapshots lie in tests/unit/prompts; `ACCEPT_PROMPTS=1 pytest tests/unit/test_prompt.py` writes them anew.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from autokernel import playbook
from autokernel.agents.llm import PROMPT_TOKENS
from autokernel.errors import ConfigError
from autokernel.experience import fenced, one_line
from autokernel.loading import specs, toplevel
from autokernel.prompt import (
    OtherIdea,
    PromptContext,
    build_prompt,
    estimate_tokens,
    ideas_of,
    system_part,
)
from autokernel.records import Decision, KernelResources, Proposal, Verdict
from autokernel.roofline import Bound
from autokernel.standing import RooflinePosition
from tests.unit.sample_run import experiment, started

SNAPSHOTS = Path(__file__).with_name("prompts")
KERNEL = '''"""RMSNorm."""
KERNEL_TYPE = "rmsnorm"
BACKEND = "cpp"
TUNABLES = {"VEC": [4, 8, 16], "UNROLL": [1, 2, 4]}
CONFIG = {"VEC": 8, "UNROLL": 2}


def kernel_fn(x, weight, eps=1e-6):
    return x
'''
CONTEXT = PromptContext(op="rmsnorm", backend="cpp", device="Example CPU, 2 cores", arch="cpu")
BUDGET = 30_000


def fresh():
    return replace(started(), incumbent=KERNEL)


def tried(number, config=None, **details):
    found = experiment(number, **details)
    text = KERNEL if config is None else KERNEL.replace('{"VEC": 8, "UNROLL": 2}', config)
    return replace(found, proposal=Proposal(hypothesis=found.proposal.hypothesis, kernel_py=text))


def worked_on():
    history = fresh()
    history = history.add(tried(1, '{"VEC": 16, "UNROLL": 2}', idea="VEC 8 -> 16", us=1010.0, incumbent_us=1000.0))
    kept = tried(2, idea="Two rows at once | hides the square root", decision=Decision.KEEP, us=800.0)
    history = history.add(kept)
    slow = tried(
        3, '{"VEC": 8, "UNROLL": 4}', idea="UNROLL 2 -> 4", verdict=Verdict.SCREENED, us=950.0, incumbent_us=800.0
    )
    return history.add(slow)


def crashed():
    message = "compile error:\nkernel.cpp:3:1: error: 'vff' was not declared\n  3 | vff x;\n```\nhint: vf"
    return worked_on().add(
        tried(4, idea="Wider loads", verdict=Verdict.CRASH, us=None, incumbent_us=None, reason=message)
    )


def known_context():
    return replace(
        CONTEXT,
        backend="triton",
        device="NVIDIA H200",
        arch="sm_90",
        roofline=RooflinePosition(
            latency_us=800.0,
            floor_us=400.0,
            bound=Bound.MEMORY,
            flops=3_000_000_000,
            nbytes=1_600_000_000,
            ridge=12.5,
            host_us=27.5,
            graph_us=803.0,
        ),
        resources=(
            KernelResources(
                kernel="_rows",
                registers=40,
                stack_bytes=16,
                shared_bytes=128,
                threads=256,
                blocks_per_sm=6,
                occupancy=0.75,
            ),
            KernelResources(kernel="_rows", registers=22, stack_bytes=0, shared_bytes=0, threads=32),
        ),
        ideas=(OtherIdea(op="softmax", idea="One warp per row", speedup=1.21),),
    )


def long_night(count=500, reason="x " * 2000):
    history = fresh()
    for number in range(1, count + 1):
        verdict = Verdict.CRASH if number % 7 == 0 or number == count else Verdict.PASS
        config = f'{{"VEC": 8, "UNROLL": 2, "SALT": {number}}}'
        details = {"idea": f"idea {number} " + "with many words " * 30, "reason": reason, "verdict": verdict}
        history = history.add(tried(number, config, **details))
    return history


STATES = {
    "fresh": (fresh, CONTEXT),
    "worked_on": (worked_on, CONTEXT),
    "crashed": (crashed, CONTEXT),
    "known": (worked_on, known_context()),
}


@pytest.mark.parametrize("state", STATES)
def test_user_part_is_the_snapshot(state):
    build, context = STATES[state]
    text = build_prompt(build(), context, budget_tokens=BUDGET).user
    path = SNAPSHOTS / f"{state}.txt"
    if os.environ.get("ACCEPT_PROMPTS"):
        path.write_text(text)
    assert text == path.read_text()


def headings(op, backend, arch):
    return [s.heading for s in playbook.select(playbook.sections(), op=op, backend=backend, arch=arch)]


def test_sections_of_a_few_tasks_are_the_snapshot():
    lines = []
    for op, backend, arch in (("rmsnorm", "triton", "sm_90"), ("matmul", "cuda", "sm_89"), ("softmax", "cpp", "cpu")):
        lines += [f"{op} {backend} {arch}", *(f"  {heading}" for heading in headings(op, backend, arch))]
    text = "\n".join(lines) + "\n"
    path = SNAPSHOTS / "sections.txt"
    if os.environ.get("ACCEPT_PROMPTS"):
        path.write_text(text)
    assert text == path.read_text()


def test_system_part_does_not_change_with_the_history():
    prompts = [
        build_prompt(history, CONTEXT, budget_tokens=BUDGET) for history in (fresh(), worked_on(), long_night(60))
    ]
    assert len({prompt.system for prompt in prompts}) == 1
    assert len({prompt.user for prompt in prompts}) == 3


@pytest.mark.parametrize("budget", [4_000, 9_000, 12_000, 20_000, 100_000])
def test_five_hundred_experiments_stay_within_the_budget(budget):
    prompt = build_prompt(long_night(), CONTEXT, budget_tokens=budget)
    assert prompt.tokens <= budget
    assert KERNEL in prompt.user
    assert "500 so far" in prompt.user
    assert estimate_tokens(prompt.user) < 20_000  # whatever the budget


def test_oldest_experiments_go_first_and_reasons_next():
    history = long_night(60, reason="because of the cache " * 5)
    least = estimate_tokens(system_part(CONTEXT, 0))
    full, some, few = (build_prompt(history, CONTEXT, budget_tokens=least + size).user for size in (20_000, 3000, 1200))
    assert "| 21 | idea 21 " in full
    assert "| 21 | idea 21 " not in some
    assert "| 60 | idea 60 " in some
    assert "because of the cache" in some
    assert "| reason |" not in few


def test_kernel_is_never_cut_and_what_does_not_fit_is_an_error():
    history = replace(fresh(), incumbent=KERNEL + "# " + "long " * 20_000)
    with pytest.raises(ConfigError, match=r"rmsnorm: the prompt needs about \d+ tokens .* 20000 are allowed"):
        build_prompt(history, CONTEXT, budget_tokens=20_000)
    assert history.incumbent.rstrip() in build_prompt(history, CONTEXT, budget_tokens=60_000).user


def test_small_contexts_get_less_of_the_playbook():
    whole, prose, core = (system_part(CONTEXT, room) for room in (100_000, 7500, 3000))
    assert "```cpp" in whole
    assert "```cpp" not in prose
    assert "Tier 6" in prose
    assert "Tier 6" not in core
    for needed in ("3. Form of your answer", "You may not"):
        assert needed in core
    assert estimate_tokens(core) < 2700


def test_only_what_applies_is_selected():
    text = system_part(replace(CONTEXT, backend="triton", arch="sm_90"), 100_000)
    assert "@triton.jit" in text
    assert "#### Hopper" in text
    for other in ("```cuda", "```cpp", "#### CDNA", "#### Blackwell", "#### flash_attention", "<!-- tags"):
        assert other not in text
    unknown = system_part(replace(CONTEXT, backend="triton", arch=None), 100_000)
    assert "#### Hopper" not in unknown
    assert "#### rmsnorm and layernorm" in unknown


def test_oracle_and_allowed_calls_are_in_the_stable_part():
    context = replace(CONTEXT, oracle="def rmsnorm(x): ...", allowed_calls=("aten.copy_", "aten.cat"))
    text = build_prompt(fresh(), context, budget_tokens=BUDGET).system
    assert "def rmsnorm(x): ..." in text
    assert "`aten.cat`, `aten.copy_`" in text


def test_only_the_hungriest_kernels_are_told():
    many = tuple(KernelResources(kernel=f"k{number}", registers=255 - number) for number in range(40))
    user = build_prompt(fresh(), replace(CONTEXT, resources=many), budget_tokens=BUDGET).user
    assert "Compiled `k5`: 250 registers per thread." in user
    assert "`k6`" not in user
    assert "34 that take less are left out" in user


def test_static_memory_and_the_largest_block_are_called_so_for_cuda():
    context = replace(CONTEXT, resources=(KernelResources(kernel="rows", shared_bytes=128, threads=256),))
    user = build_prompt(replace(fresh(), backend="cuda"), context, budget_tokens=BUDGET).user
    assert "Compiled `rows`: 128 bytes of static shared memory per block, 256 threads per block at most." in user


def test_launches_bind_where_the_host_takes_longer_than_the_gpu():
    context = replace(CONTEXT, roofline=RooflinePosition(latency_us=800.0, host_us=900.0))
    user = build_prompt(fresh(), context, budget_tokens=BUDGET).user
    assert "The host needs 900.0 us to start these calls, longer than the GPU works on them: launches bind." in user


def test_what_is_as_fast_and_shorter_is_said_to_be_kept():
    prompt = build_prompt(fresh(), CONTEXT, budget_tokens=BUDGET)
    assert f"makes it {int(0.9 * len(KERNEL))} or less." in prompt.user
    assert "Simple wins ties" in prompt.system


SYSTEM_TOKENS = 15_000
ARCHES = {"triton": ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942"), "cuda": ("sm_80", "sm_89", "sm_90", "sm_100")}
TASKS = [
    (path.stem, path.parent.name, arch)
    for path in sorted(toplevel("kernels").glob("*/*.py"))
    for arch in ARCHES.get(path.parent.name, ("cpu",))
]


@pytest.mark.parametrize(("op", "backend", "arch"), TASKS)
def test_every_task_has_a_prompt_of_bounded_size(op, backend, arch):
    starter = (toplevel("kernels") / backend / f"{op}.py").read_text()
    history = long_night(12, reason="because of the cache " * 50)
    history = replace(history, backend=backend, planned=replace(history.planned, op=op), incumbent=starter)
    context = replace(known_context(), op=op, backend=backend, arch=arch, oracle="oracle " * 300)
    prompt = build_prompt(history, context, budget_tokens=PROMPT_TOKENS)
    assert estimate_tokens(prompt.system) <= SYSTEM_TOKENS
    assert prompt.tokens <= PROMPT_TOKENS
    assert "```" + {"triton": "python", "cuda": "cuda"}.get(backend, "cpp") in prompt.system  # nothing had to go
    assert "12 so far" in prompt.user
    assert starter.strip() in prompt.user


def test_every_op_is_among_the_tasks():
    assert len(TASKS) == len(specs()) * (5 + 4 + 1)


def test_best_idea_of_each_other_op_is_taken():
    other = replace(worked_on(), planned=replace(worked_on().planned, op="softmax"))
    better = tried(7, idea="Wider loads", decision=Decision.KEEP, us=400.0, incumbent_us=800.0)
    assert ideas_of([worked_on(), other.add(better), fresh()], but="rmsnorm") == (
        OtherIdea(op="softmax", idea="Wider loads", speedup=2.0),
    )


def test_keys_do_not_reach_the_prompt(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a-key-of-the-environment")
    leaked = "sk-ant-api03-" + "abcDEF123" * 5
    history = worked_on().add(tried(4, idea=f"use {leaked}", verdict=Verdict.CRASH, reason=f"boom\nBearer {leaked}"))
    prompt = build_prompt(history, CONTEXT, budget_tokens=BUDGET)
    for text in (prompt.system, prompt.user):
        assert leaked not in text
        assert "a-key-of-the-environment" not in text
    assert "[key removed]" in prompt.user


def test_last_failure_is_told_in_full_only_while_it_is_the_last():
    assert "'vff' was not declared\n  3 | vff x;" in build_prompt(crashed(), CONTEXT, budget_tokens=BUDGET).user
    after = crashed().add(tried(5))
    assert "The last failure" not in build_prompt(after, CONTEXT, budget_tokens=BUDGET).user


def test_cells_and_fences_cannot_be_broken_out_of():
    assert one_line("a | b\nc", 100) == "a / b c"
    assert one_line("x" * 50, 10) == "x" * 9 + "…"
    assert fenced("```\ninner\n```", "").startswith("````\n")


def test_playbook_parser_reads_tags_and_leaves_fences_alone():
    text = "# A\n<!-- tags: backend=cuda,cpp arch=sm_10* -->\nbody\n```python\n# no heading\n```\n## B\nmore\n"
    first, second = playbook.parse(text)
    assert first.tags == {"backend": ("cuda", "cpp"), "arch": ("sm_10*",)}
    assert "# no heading" in first.body
    assert playbook.select((first, second), op="x", backend="cpp", arch="sm_103") == (first, second)
    assert playbook.select((first, second), op="x", backend="cpp", arch="sm_90") == ()
    with pytest.raises(ConfigError, match="line 2 of the playbook: 'ops=matmul' is no tag"):
        playbook.parse("# A\n<!-- tags: ops=matmul -->\n")
    with pytest.raises(ConfigError, match="never closed"):
        playbook.parse("# A\n```python\n")
