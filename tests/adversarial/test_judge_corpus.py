"""The judge against kernels that are wrong in one way each, and against right ones that look unusual."""

import dataclasses

import pytest

from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.stages import STAGES
from autokernel.judge.worker import Worker
from autokernel.loading import get_spec
from autokernel.records import TimedCase
from tests.adversarial.corpus import base_text, entries
from tests.adversarial.table import DOC, with_table

WRONG, RIGHT = entries("wrong"), entries("right")
DEADLINE_S = 4.0
"""Instead of the judge's own, for kernels that never answer."""


def name_of(entry):
    return entry.path.stem


@pytest.fixture(scope="module")
def judge_of(tmp_path_factory):
    """A judge for an op, whose model makes one kind of call; started once for each op."""
    builds, judges = tmp_path_factory.mktemp("builds"), {}

    def get(op):
        if op not in judges:
            spec = get_spec(op)
            calls = [TimedCase(case=dataclasses.replace(spec.stress_case, name="model"), calls=3)]
            judges[op] = Judge(server=server, spec=spec, dtypes=("fp32", "bf16"), cases=calls, builds=builds / op)
        return judges[op]

    with ForkServer() as server:
        yield get


@pytest.mark.parametrize("entry", WRONG, ids=name_of)
def test_wrong_kernel_is_caught_where_it_says(judge_of, entry, monkeypatch):
    if entry.hardening:
        pytest.skip("the judge does not see it yet")
    monkeypatch.setitem(Worker.run.__kwdefaults__, "deadline_s", DEADLINE_S)
    incumbent = base_text(entry.base) if entry.stage in ("timing", "screening") else None
    outcome = judge_of(entry.base).evaluate(entry.text, incumbent)
    assert (outcome.stage, outcome.verdict) == (entry.stage, entry.verdict), outcome.reason
    assert outcome.reason
    assert outcome.timing is None or entry.stage == "screening"


@pytest.mark.parametrize("entry", RIGHT, ids=name_of)
def test_right_kernel_passes(judge_of, entry):
    outcome = judge_of(entry.base).evaluate(entry.text)
    assert outcome.verdict == "PASS", outcome.reason
    assert [stage.stage for stage in outcome.stages] == [name for name, _ in STAGES]
    assert all(stage.cases > 0 for stage in outcome.stages)


def test_every_stage_has_a_wrong_kernel_that_it_catches():
    assert {name for name, _ in STAGES} <= {entry.stage for entry in WRONG}


def test_every_file_says_what_it_is():
    bases = {path.stem for path in (WRONG[0].path.parent.parent / "bases").glob("*.py")} - {"common"}
    for entry in (*WRONG, *RIGHT):
        assert entry.kind.endswith("."), entry.path.name
        assert entry.base in bases
        assert bool(entry.stage) == bool(entry.verdict) == (entry in WRONG)


def test_the_table_in_the_docs_is_up_to_date():
    assert with_table(DOC.read_text()) == DOC.read_text(), "run python -m tests.adversarial.table"


def test_the_corpus_is_broad():
    assert len(WRONG) >= 45
    assert len({entry.base for entry in WRONG}) >= 7
    assert len(RIGHT) >= 18
