"""Kernels in a graph that Inductor compiles: called, right, guarded, and gone after undo."""

import gc
import json
import logging
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from models import HIDDEN, SEQUENCE, Norm, loaded, tokens, toy
from test_replace import CPP_NORM, cases_of, export
from torch._dynamo.backends.registry import lookup_backend

import autokernel
from autokernel import customop
from autokernel.errors import ConfigError
from autokernel.loading import starter_path
from autokernel.outputs import disagreement, expect, output_leaves

pytestmark = pytest.mark.alone

OPS = ("rmsnorm", "rotary_embedding")
ROOT = Path(__file__).resolve().parents[2]
CALLS = {"rmsnorm": 5, "rotary_embedding": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with kernels for the toy model, one of which has checked arguments."""
    folder = tmp_path_factory.mktemp("run")
    export(folder, "rmsnorm", CPP_NORM, cases_of(toy(), "rmsnorm"))
    text = starter_path("rotary_embedding", "cpp").read_text()
    export(folder, "rotary_embedding", text, cases_of(toy(), "rotary_embedding"))
    return folder


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_kernels_are_called_and_go_again(run):
    item = toy()
    expected = expect(item)
    before, others = item.model._compiled_call_impl, set(customop._named)  # another test's graph may still live
    applied = autokernel.apply(item.model, run, compiler="inductor")
    assert disagreement(output_leaves(item.model, item), expected) is None
    assert applied.calls == CALLS
    assert applied.fallbacks == dict.fromkeys(OPS, 0)
    names = set(customop._named) - others
    assert len(names) == 2 + sum(CALLS.values())  # and two tables to check

    item.model.cos[:, 0] += 0.5
    changed = output_leaves(item.model, item)
    assert applied.calls == {"rmsnorm": 10, "rotary_embedding": 4}
    assert applied.fallbacks == {"rmsnorm": 0, "rotary_embedding": 4}

    with torch.no_grad():
        other = item.model(tokens(sequence=17))
    assert applied.fallbacks == {"rmsnorm": 5, "rotary_embedding": 8}
    applied.undo()
    assert item.model._compiled_call_impl is before
    assert disagreement(changed, expect(item)) is None
    with torch.no_grad():
        torch.testing.assert_close(other, item.model(tokens(sequence=17)))
    gc.collect()
    assert not set(customop._named) & names


class Masked(torch.nn.Module):
    """Attention under a mask that it makes itself; only `ahead` 0 is the causal one."""

    def __init__(self, ahead):
        super().__init__()
        self.ahead = ahead

    def forward(self, q, k, v):
        at = torch.arange(q.shape[2])
        mask = (at[None, :] <= at[:, None] + self.ahead)[None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_constant_that_fails_its_check_runs_the_original(tmp_path):
    inputs = [torch.randn(1, 2, 24, 16) for _ in range(3)]
    cases = cases_of(loaded(Masked(0), *inputs), "flash_attention")
    export(tmp_path, "flash_attention", starter_path("flash_attention", "cpp").read_text(), cases)
    item = loaded(Masked(1), *inputs)
    expected = expect(item)
    applied = autokernel.apply(item.model, tmp_path, compiler="inductor")
    assert disagreement(output_leaves(item.model, item), expected) is None
    assert (applied.calls, applied.fallbacks) == ({"flash_attention": 0}, {"flash_attention": 1})


def test_torch_compile_by_object_and_by_name(run):
    """Each one full graph, with other weights in one process."""
    first, second = toy(), toy()
    expected = expect(first)
    by_object = autokernel.backend(run, ops=["rmsnorm"])
    compiled = torch.compile(first.model, backend=by_object, fullgraph=True, dynamic=False)
    assert disagreement(output_leaves(compiled, first), expected) is None
    assert by_object.calls == {"rmsnorm": 5}
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.mul_(1.1)
    options = {"run": str(run), "ops": ["rmsnorm"]}
    named = torch.compile(second.model, backend="autokernel", fullgraph=True, dynamic=False, options=options)
    assert disagreement(output_leaves(named, second), expect(second)) is None
    assert disagreement(output_leaves(compiled, first), expected) is None
    assert by_object.calls == {"rmsnorm": 10}


def trained():
    """A model to train with one place for the kernel, an input, and the gradients of a forward that runs some way."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), Norm(), torch.nn.GELU())
    x = torch.randn(1, SEQUENCE, HIDDEN)

    def gradients(run):
        model.zero_grad()
        run(x).sin().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    return model, x, gradients


def test_kernels_are_called_in_training_and_the_backward_is_compiled(run):
    model, x, gradients = trained()
    want = gradients(model)
    with autokernel.apply(model, run, ops=["rmsnorm"], compiler="inductor") as applied:
        torch.testing.assert_close(gradients(model), want)
        torch.testing.assert_close(gradients(model), want)
        assert applied.calls == {"rmsnorm": 2}
        assert applied.training_graphs == 0
        late = model(x).sin().mean()
    model.zero_grad()
    late.backward()  # after the kernel was taken out
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], want)


def test_torch_compile_trains_with_kernels(run):
    model, _, gradients = trained()
    want = gradients(model)
    backend = autokernel.backend(run, ops=["rmsnorm"])
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    torch.testing.assert_close(gradients(compiled), want)
    assert backend.calls == {"rmsnorm": 1}


def test_what_needs_gradients_and_has_no_place_is_compiled_without_kernels(run, caplog):
    item = loaded(torch.nn.Linear(4, 4), torch.randn(2, 4))
    backend = autokernel.backend(run, ops=["rmsnorm"])
    with caplog.at_level(logging.WARNING, logger="autokernel"):
        torch.compile(item.model, backend=backend)(*item.args).sum().backward()
    assert item.model.weight.grad is not None
    assert "no kernel has a place" in caplog.text


def test_the_way_that_the_run_measured_is_the_default(tmp_path):
    export(tmp_path, "rmsnorm", CPP_NORM, cases_of(toy(), "rmsnorm"))
    assert autokernel.apply(toy().model, tmp_path).compiler == "graph"
    path = tmp_path / "optimized" / "rmsnorm" / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "compiler": "inductor"}))
    assert autokernel.apply(toy().model, tmp_path).compiler == "inductor"
    assert autokernel.apply(toy().model, tmp_path, compiler="graph").compiler == "graph"


def test_the_entry_point_is_the_backend():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (name, value), *others = declared["torch_dynamo_backends"].items()
    assert not others
    found = EntryPoint(name=name, value=value, group="torch_dynamo_backends").load()
    autokernel.backend  # noqa: B018  # registers it
    autokernel.backend  # noqa: B018  # and may be asked again
    assert lookup_backend("autokernel") is found


def test_unknown_compiler(run):
    with pytest.raises(ConfigError, match="nvcc"):
        autokernel.apply(toy().model, run, compiler="nvcc")
