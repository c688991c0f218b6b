"""The same kernel in other words is told apart from another kernel, and is not judged again."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokernel.agents.reply import Fault, Rejected, read_reply
from autokernel.agents.search import SearchAgent
from autokernel.agents.talk import Reply
from autokernel.journal import Journal
from autokernel.kernelfile import with_config
from autokernel.kerneltext import ByDigest, ShelvedText, text_digest
from autokernel.loading import toplevel
from autokernel.records import Decision, Outcome, Proposal, Verdict
from autokernel.rundir import RunDir
from autokernel.settings import Settings
from autokernel.state import replay, started_json
from autokernel.structure import bare_source, structure, twin_of
from tests.unit.sample_run import experiment, started

KERNEL = '''"""RMSNorm."""
from autokernel.native import build

KERNEL_TYPE = "rmsnorm"
BACKEND = "cpp"
TUNABLES = {"VEC": [4, 8, 16]}
CONFIG = {"VEC": 8}
SOURCE = r"""
#include <cstdint>
#define TWICE(x) ((x) * 2)
extern "C" int rmsnorm(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * 1.0f;  // one by one
  return 0;
}
"""


def kernel_fn(x, weight, eps=1e-6):
    """One pass."""
    return build(SOURCE, flags=["-O3", f"-DVEC={CONFIG['VEC']}"])
'''
SAME = {
    "comment": ("    return build", "    # built once\n    return build"),
    "docstring": ('"""One pass."""', '"""Another word."""'),
    "no docstring": ('    """One pass."""\n', ""),
    "quotes": ('"rmsnorm"\nBACKEND', "'rmsnorm'\nBACKEND"),
    "line breaks": ('["-O3", f', '[\n        "-O3",\n        f'),
    "C++ comment": ("  // one by one", ""),
    "C++ block comment": ("  return 0;", "  /* all\n went well */ return 0;"),
    "C++ white space": ("{\n  for (int64_t i = 0; ", "{ for(int64_t i=0;"),
    "C++ blank lines": ("#define", "\n\n  #  define".replace("#  d", "#d")),
}
OTHER = {
    "number": ("1.0f", "2.0f"),
    "name": ("const float* x", "const float* __restrict__ x"),
    "config": ('CONFIG = {"VEC": 8}', 'CONFIG = {"VEC": 16}'),
    "flag": ("-O3", "-O2"),
    "macro with a space": ("TWICE(x)", "TWICE (x)"),
    "directive joined": ("<cstdint>\n#define", "<cstdint> #define"),
    "word joined": ("int64_t i = 0", "int64_ti = 0"),
    "increment split": ("++i", "+ +i"),
    "code commented out": ("  return 0;", "  // return 0;"),
}


@pytest.mark.parametrize("change", SAME)
def test_comments_docstrings_and_white_space_do_not_count(change):
    text = KERNEL.replace(*SAME[change])
    assert text != KERNEL
    assert structure(text) == structure(KERNEL)


@pytest.mark.parametrize("change", OTHER)
def test_what_the_compiler_sees_does(change):
    text = KERNEL.replace(*OTHER[change])
    assert text != KERNEL
    assert structure(text) != structure(KERNEL)


def test_white_space_in_strings_counts_where_they_are_no_source():
    text = 'BACKEND = "triton"\nX = """a\n b"""\n'
    assert structure(text) != structure(text.replace("\n b", "\n  b"))
    formatted = KERNEL.replace('SOURCE = r"""', 'SOURCE = f"""').replace("{\n", "{{\n").replace("\n}", "\n}}")
    assert structure(formatted) != structure(formatted.replace("// one by one", ""))


def test_literals_of_the_source_are_left_alone():
    source = 'asm("mov  // no comment"); char c = \'"\'; auto s = R"(a  /* b */)"; int n = 1\'000;'
    assert bare_source(source).count("  ") == 2
    assert "// no comment" in bare_source(source)
    assert "/* b */" in bare_source(source)


@pytest.mark.parametrize("source", ["int x; /* never ends\n", 'auto s = "never ends\n;', "it's\n", "a \\ \n#b"])
def test_what_does_not_end_is_left_as_it_is(source):
    assert bare_source(source) == source


def test_a_text_that_is_known_is_neither_kept_nor_read_again():
    lengths = ByDigest(len, maxsize=2)
    assert [lengths("one"), lengths("three"), lengths("one")] == [3, 5, 3]
    assert lengths.of(text_digest("one"), lambda: pytest.fail("it is known")) == 3
    assert lengths("four") == 4
    assert lengths.of(text_digest("one"), lambda: "read again") == len("read again")  # the oldest made room
    assert all(len(key) == 16 for key in lengths._known)


def test_an_experiment_on_disk_is_told_apart_without_reading_it(tmp_path):
    path, before = tmp_path / "kernel.py", started()
    path.write_text(KERNEL)
    shelved = ShelvedText(path=str(path), digest=text_digest(KERNEL))
    assert structure(KERNEL)
    history = before.add(replace(experiment(1), proposal=Proposal(hypothesis="", kernel_py=shelved)))
    path.unlink()
    assert twin_of(history, KERNEL + "# the same\n").experiment.number == 1


@given(st.lists(st.sampled_from(["#", "\n", " ", "//", "/*", "*/", '"', "'", 'R"(', ')"', "\\", "a", "1", "+"])))
def test_no_source_raises_and_a_bare_one_stays(pieces):
    bare = bare_source("".join(pieces))
    assert bare_source(bare) == bare


@pytest.mark.parametrize("path", sorted(toplevel("kernels").glob("*/*.py")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_starter_is_itself_and_no_other_setting_of_it(path):
    text = path.read_text()
    assert structure(text) == structure("# a comment\n" + text)
    assert structure(text) != structure(with_config(text, {"SOMETHING": 1}))


# -- what follows for a run


def reverted(number, text):
    return replace(experiment(number), proposal=Proposal(hypothesis="h", kernel_py=text))


WIDER, COMMENTED = KERNEL.replace('": 8}', '": 16}'), KERNEL.replace('": 8}', '": 16}  # wider')


def a_history():
    history = replace(started(), incumbent=KERNEL).add(reverted(1, WIDER))
    better = replace(reverted(2, KERNEL.replace("1.0f", "3.0f")), decision=Decision.KEEP)
    return history.add(better)


def test_incumbent_experiments_and_starter_are_known():
    history = a_history()
    assert twin_of(history, history.incumbent + "# again\n").is_incumbent
    assert twin_of(history, COMMENTED).experiment.number == 1
    starter = twin_of(history, KERNEL.replace("One pass", "Two"))
    assert not starter.is_incumbent
    assert "starter" in starter.reason
    assert twin_of(history, KERNEL.replace("1.0f", "4.0f")) is None
    assert twin_of(history, "no python (") is None


@pytest.mark.parametrize(
    ("text", "fault", "word"),
    [
        (KERNEL.replace("1.0f", "3.0f /* x */"), Fault.UNCHANGED, "current kernel.py"),
        (COMMENTED, Fault.REPEATED, "experiment 1 tried exactly this: PASS, not surely faster"),
        (KERNEL.replace("// one by one", ""), Fault.REPEATED, "starter"),
    ],
)
def test_a_model_is_told_that_it_repeats(text, fault, word):
    found = read_reply(Reply(text=f"Hypothesis: new\n```python\n{text}```\n"), a_history())
    assert isinstance(found, Rejected)
    assert found.fault is fault
    assert word in found.reason


def test_search_skips_what_another_agent_has_tried_in_other_words():
    history = replace(started(), incumbent=KERNEL)
    proposed = []
    while (proposal := SearchAgent(seed=0).propose(history)) is not None:
        proposed.append(proposal.kernel_py)
        history = history.add(reverted(len(proposed), proposal.kernel_py))
    assert len(proposed) == 2
    told = replace(started(), incumbent=KERNEL).add(reverted(1, COMMENTED))
    proposal = SearchAgent(seed=0).propose(told)
    assert structure(proposal.kernel_py) == structure(KERNEL.replace('": 8}', '": 4}'))
    assert SearchAgent(seed=0).propose(told.add(reverted(2, proposal.kernel_py + "# in other words\n"))) is None


def test_a_resumed_run_remembers(tmp_path):
    run = RunDir(path=tmp_path, name="run")
    journal = Journal(run.journal_path)
    history = replace(started(), incumbent=KERNEL)
    for number, text in enumerate((KERNEL, WIDER)):
        run.kernel_path("rmsnorm", number).parent.mkdir(parents=True)
        run.kernel_path("rmsnorm", number).write_text(text)
    journal.append("run-started", settings=Settings(model="m.py", workdir=tmp_path).to_json(), version="0", sandbox="")
    digests = [Proposal(hypothesis="", kernel_py=text).digest for text in (KERNEL, WIDER)]
    journal.append("op-started", op="rmsnorm", digest=digests[0], history=started_json(history), tip="a")
    spent = {"tokens": None, "cost_usd": None, "agent": None}
    journal.append("proposed", number=1, op="rmsnorm", hypothesis="h", digest=digests[1], agent_s=0.1, **spent)
    outcome = Outcome(
        verdict=Verdict.CRASH, stage="smoke", reason="", stages=(), timing=None, peak_memory_mb=None, seconds=1.0
    )
    decided = {"outcome": outcome.to_json(), "decision": "REVERT", "reason": "a signal", "seconds": 1.0}
    journal.append("judged", number=1, op="rmsnorm", **decided)
    journal.append("recorded", number=1, op="rmsnorm", commit="b", tip="a")
    resumed = replay(Journal(run.journal_path).events(), run).histories["rmsnorm"]
    assert twin_of(resumed, COMMENTED).reason == "experiment 1 tried exactly this: CRASH, a signal"
    assert twin_of(resumed, KERNEL + "\n# again\n").is_incumbent
