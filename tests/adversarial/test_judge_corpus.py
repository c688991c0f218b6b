"""The judge against kernels that are wrong in one way each, and against right ones that look unusual."""

import ast
from pathlib import Path

import pytest

from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.stages import STAGES
from autokernel.loading import get_spec
from autokernel.records import TimedCase
from autokernel.spec import build_case

FOLDER = Path(__file__).parent
HONEST = (FOLDER / "honest.py").read_text()
WRONG = sorted((FOLDER / "wrong").glob("*.py"))
RIGHT = sorted((FOLDER / "right").glob("*.py"))
USER_CASE = TimedCase(case=build_case("rmsnorm", "model", x=(1, 64, 512), weight=(512,)), calls=3)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    with ForkServer() as server:
        builds = tmp_path_factory.mktemp("builds")
        spec = get_spec("rmsnorm")
        yield Judge(server=server, spec=spec, dtypes=("fp32", "bf16"), cases=[USER_CASE], builds=builds / "rmsnorm")


def expectation(path):
    """The literals CAUGHT_BY and VERDICT of a wrong kernel."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path.name} does not say what catches it")


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_wrong_kernel_is_caught_where_it_says(judge, path):
    stage, verdict = expectation(path)
    incumbent = HONEST if stage == "timing" else None
    outcome = judge.evaluate(HONEST + path.read_text(), incumbent)
    assert (outcome.stage, outcome.verdict) == (stage, verdict), outcome.reason
    assert outcome.reason
    assert outcome.timing is None


@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_right_kernel_passes(judge, path):
    outcome = judge.evaluate(HONEST + path.read_text())
    assert outcome.verdict == "PASS", outcome.reason
    assert [stage.stage for stage in outcome.stages] == [name for name, _ in STAGES]
    assert all(stage.cases > 0 for stage in outcome.stages)


def test_every_stage_has_a_wrong_kernel_that_it_catches():
    assert {name for name, _ in STAGES} <= {expectation(path)[0] for path in WRONG}
