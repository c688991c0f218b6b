"""The tuner on a GPU: CONFIG is measured while the heuristics are at work, and every trial is of a binary."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from autokernel.loading import get_spec, starter_path  # noqa: E402
from autokernel.records import TimedCase  # noqa: E402
from autokernel.sizes import sized_case  # noqa: E402
from autokernel.tuner.kernel import tuner_for  # noqa: E402
from autokernel.tuner.trials import Status  # noqa: E402
from autokernel.tuner.tuning import Budget  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(("op", "shape"), [("softmax", (2048, 4096)), ("matmul", (1024, 1024, 1024))])
def test_starter_is_tuned_from_its_own_config(op, shape, tmp_path):
    text, told = starter_path(op, "triton").read_text(), []
    case = TimedCase(case=sized_case(op, shape).with_dtype("bf16"), calls=1)
    with tuner_for(get_spec(op), [case], "triton") as tuner:
        tuning = tuner.tune(text, Budget(evaluations=8), told=told.append, journal=tmp_path / "trials.jsonl")
        again = tuner.tune(text, Budget(evaluations=8), journal=tmp_path / "trials.jsonl")
    trials = tuning.outcome.trials
    assert trials[0].point == told[0].point == tuning.space.locate(tuning.space.config)
    assert trials[0].status is Status.OK
    assert len({trial.point for trial in told}) == len(told) == tuning.outcome.evaluations == 8
    assert {trial.point for trial in told} <= {trial.point for trial in trials}  # the others are the same binaries
    assert all(trial.digest for trial in trials if trial.status is Status.OK)
    assert all(trial.status in (Status.OK, Status.CENSORED) for trial in trials)
    assert tuning.outcome.latency_us <= tuning.own_us * 1.01
    assert again.outcome.best == tuning.outcome.best  # from the journal alone
