"""The judge against kernels that are wrong in one way each, and against right ones that look unusual."""

import dataclasses
import os
import shutil
from unittest import mock

import pytest

from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.margin import KEEP_MARGIN
from autokernel.judge.stages import STAGES
from autokernel.judge.worker import Worker
from autokernel.kerneltext import text_digest
from autokernel.loading import get_spec
from autokernel.records import TimedCase
from tests.adversarial.corpus import base_text, entries
from tests.adversarial.table import DOC, with_table

WRONG, RIGHT = entries("wrong"), entries("right")
DEADLINE_S = 3.0
"""Instead of the judge's own, for kernels that never answer."""


def name_of(entry):
    return entry.path.stem


def is_timed(entry):
    return entry.stage in ("timing", "screening")


def parameters(entries):
    """One for each; those that are timed beside an incumbent run alone."""
    return [pytest.param(each, id=name_of(each), marks=[pytest.mark.alone] * is_timed(each)) for each in entries]


class Judges:
    """A judge for each op, whose model makes one kind of call; every fragment finds its base compiled already."""

    def __init__(self, server, builds):
        self._server, self._builds = server, builds
        self._judges = {}

    def evaluate(self, entry, incumbent=None):
        if entry.base not in self._judges:
            self._judges[entry.base] = self._judge(entry.base)
        scratch = self._builds / entry.base / text_digest(entry.text)
        shutil.copytree(self._compiled(entry.base), scratch / "build")
        return self._judges[entry.base].evaluate(entry.text, incumbent)

    def _judge(self, op):
        spec = get_spec(op)
        calls = [TimedCase(case=dataclasses.replace(spec.stress_case, name="model"), calls=3)]
        return Judge(server=self._server, spec=spec, dtypes=("fp32", "bf16"), cases=calls, builds=self._builds / op)

    def _compiled(self, op):
        """A folder with the base's library: most fragments change only Python."""
        folder, names = self._builds / f"{op}_base", {}
        if not folder.exists():
            with mock.patch.dict(os.environ, AUTOKERNEL_BUILD_DIR=str(folder)):
                exec(base_text(op), names)
                names["library"]()
        return folder


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    with ForkServer() as server:
        yield Judges(server, tmp_path_factory.mktemp("builds"))


@pytest.mark.parametrize("entry", parameters(WRONG))
def test_wrong_kernel_is_caught_where_it_says(judges, entry, monkeypatch):
    if entry.verdict == "TIMEOUT":
        monkeypatch.setitem(Worker.run.__kwdefaults__, "deadline_s", DEADLINE_S)
    incumbent = base_text(entry.base) if is_timed(entry) else None
    outcome = judges.evaluate(entry, incumbent)
    if entry.or_no_gain and outcome.verdict in ("PASS", "SCREENED"):
        assert not outcome.timing.speedup.low > 1 + KEEP_MARGIN
        return
    assert (outcome.stage, outcome.verdict) == (entry.stage, entry.verdict), outcome.reason
    assert outcome.reason
    assert outcome.timing is None or outcome.verdict == "SCREENED"


@pytest.mark.parametrize("entry", parameters(RIGHT))
def test_right_kernel_passes(judges, entry):
    outcome = judges.evaluate(entry)
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
