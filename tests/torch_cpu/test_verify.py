"""`autokernel verify`: outputs that agree, a kernel at fault that is named, kernels never called, bad input."""

import dataclasses
import json
from datetime import UTC, datetime

import pytest
import torch
from models import HIDDEN, Norm, loaded
from test_match import Lambda, matches
from test_replace import CPP_NORM, cases_of, export
from torch import nn

from autokernel.cli import main
from autokernel.errors import ConfigError
from autokernel.journal import Journal
from autokernel.outputs import expect, named_tensors
from autokernel.rundir import create_run
from autokernel.settings import Settings
from autokernel.sites import Replacement
from autokernel.verify import verify

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x):
        y = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return {"normed": y, "mean": x.mean(-1)}

def get_inputs():
    return [torch.randn(4, 64)]
"""


def rms_norm(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def replacement(item, op, fn):
    return Replacement(op=op, kernel_fn=fn, cases=cases_of(item, op))


def begun(folder, text=CPP_NORM, used=True):
    """A run in `folder` of a model with a norm, with `text` as its kernel."""
    (folder / "norm_model.py").write_text(MODEL)
    run = create_run(folder, "norm_model", datetime.now(UTC))
    settings = Settings(model="norm_model.py", workdir=folder, backend="cpp")
    with Journal(run.journal_path) as journal:
        journal.append("run-started", settings=settings.to_json(), version="0", sandbox="")
    like = Lambda(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))
    found = matches(loaded(like, torch.randn(4, HIDDEN), torch.randn(HIDDEN)), ["rmsnorm"])
    export(run.path, "rmsnorm", text, [match.case for match in found], used=used)
    return run.name


def exit_code(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    return ended.value.code


def test_a_run_that_agrees(tmp_path, monkeypatch, capsys):
    name = begun(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert exit_code("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["agrees"], found["truth"], found["tensors"]) == (name, True, "fp64", 2)
    assert (found["calls"], found["fallbacks"]) == ({"rmsnorm": 1}, {"rmsnorm": 0})
    assert found["worst"]["error"] < found["worst"]["accepted"]


def test_the_model_runs_as_the_run_found_it_fastest(tmp_path, monkeypatch, capsys):
    name = begun(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert exit_code("--json") == 0
    assert json.loads(capsys.readouterr().out)["compiler"] == "graph"
    meta = tmp_path / ".autokernel" / name / "optimized" / "rmsnorm" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "compiler": "inductor"}))
    assert exit_code("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["compiler"], found["agrees"]) == ("inductor", True)
    assert (found["calls"], found["fallbacks"]) == ({"rmsnorm": 1}, {"rmsnorm": 0})


def test_a_run_with_a_wrong_kernel_is_told_in_words(tmp_path, monkeypatch, capsys):
    name = begun(tmp_path, CPP_NORM.replace("* w[j]", ""))
    monkeypatch.chdir(tmp_path)
    assert exit_code(name) == 1
    out = capsys.readouterr().out
    assert "DIFFERS from a run in fp64: output['normed'] (4, 64): an error of" in out
    assert "rmsnorm alone: output['normed']" in out
    assert "AGREES" not in out


def test_a_run_that_is_not_there_or_has_no_kernel_in_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code() == 2
    begun(tmp_path, used=False)
    for arguments, message in ((("20200101-none",), "no run '20200101-none'"), ((), "no kernel that makes")):
        assert exit_code(*arguments) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "Traceback" not in said


class Normed(nn.Module):
    """A softmax of two norms."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Norm(), Norm()

    def forward(self, x):
        return torch.softmax(self.second(self.first(x)), -1)


def normed(rows=4):
    torch.manual_seed(0)
    return loaded(Normed(), torch.randn(rows, HIDDEN))


def test_the_kernel_at_fault_is_the_one_that_is_named():
    right = replacement(normed(), "rmsnorm", rms_norm)
    wrong = replacement(normed(), "softmax", lambda x, dim: torch.zeros_like(x))
    found = verify(normed(), [right, wrong])
    assert not found.agrees
    assert list(found.alone) == ["softmax"]
    assert found.worst.error > found.worst.accepted > found.worst.eager_error
    assert found.calls == {"rmsnorm": 2, "softmax": 1}
    assert right.enabled
    assert wrong.enabled


def test_a_kernel_that_raises_is_at_fault():
    def broken(x, weight, eps):
        raise ValueError("no such size")

    found = verify(normed(), [replacement(normed(), "rmsnorm", broken)])
    assert "ValueError: no such size" in found.alone["rmsnorm"]


def test_a_kernel_that_is_never_called_is_a_failure():
    found = verify(normed(), [replacement(normed(rows=7), "rmsnorm", rms_norm)])
    assert found.problem is None
    assert not found.agrees
    assert "rmsnorm" in found.idle
    assert found.fallbacks == {"rmsnorm": 2}


@dataclasses.dataclass
class Answer:
    normed: torch.Tensor
    others: tuple = ()


class Keyed(nn.Module):
    """A keyword input, a dataclass out, a graph break, and one weight in two places."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Norm(), Norm()
        self.second.weight = self.first.weight

    def forward(self, x, *, scale):
        x = self.first(x * scale)
        torch._dynamo.graph_break()
        return Answer(normed=self.second(x), others=(x, None))


def test_keywords_dataclasses_tied_weights_and_several_graphs():
    item = dataclasses.replace(loaded(Keyed(), torch.randn(4, HIDDEN)), kwargs={"scale": torch.tensor(2.0)})
    found = verify(item, [replacement(item, "rmsnorm", rms_norm)])
    assert found.agrees
    assert (found.tensors, found.calls) == (2, {"rmsnorm": 2})
    assert found.worst.name in ("output.normed", "output.others[0]")


def test_output_without_a_tensor_cannot_be_compared():
    with pytest.raises(ConfigError, match="holds no tensor"):
        expect(loaded(Lambda(lambda x: None), torch.randn(2)))


def test_places_in_the_output_tree():
    x = torch.zeros(1)
    tree = {"a": [x, (x, 3)], "b": Answer(normed=x)}
    assert [name for name, _ in named_tensors(tree, "out")] == [
        "out['a'][0]",
        "out['a'][1][0]",
        "out['b'].normed",
    ]
