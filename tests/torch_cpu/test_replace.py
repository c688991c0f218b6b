"""Kernels in the place of matched ops: called, right, guarded, and gone after undo."""

import copy
import json

import pytest
import torch
from models import HIDDEN, SEQUENCE, Norm, loaded, tokens, toy
from test_match import matches

import autokernel
from autokernel.errors import ConfigError
from autokernel.loading import starter_path
from autokernel.outputs import disagreement, expect, output_leaves

CPP_NORM = """
import torch
from autokernel.native import build

KERNEL_TYPE = "rmsnorm"
BACKEND = "cpp"
SOURCE = r'''
#include <cmath>
#include <cstdint>
extern "C" int rmsnorm(const float* x, const float* w, float* y, int64_t rows, int64_t cols, double eps) {
    for (int64_t i = 0; i < rows; i++) {
        double sum = 0;
        for (int64_t j = 0; j < cols; j++) sum += double(x[i * cols + j]) * x[i * cols + j];
        float scale = float(1 / std::sqrt(sum / cols + eps));
        for (int64_t j = 0; j < cols; j++) y[i * cols + j] = x[i * cols + j] * scale * w[j];
    }
    return 0;
}
'''
lib = build(SOURCE, flags=["-O2"])

def kernel_fn(x, weight, eps=1e-6):
    x = x.contiguous()
    y = torch.empty_like(x)
    lib.rmsnorm(x, weight, y, x.numel() // x.shape[-1], x.shape[-1], eps)
    return y
"""


def export(run, name, text, cases, used=True, op=None):
    """A kernel as a run exports it, in a folder of this name, which is the op's if none is given."""
    op = op or name
    folder = run / "optimized" / name
    folder.mkdir(parents=True)
    (folder / "kernel.py").write_text(text)
    meta = {"op": op, "backend": "cpp", "cases": [case.to_json() for case in cases], "used": used}
    (folder / "meta.json").write_text(json.dumps(meta))


def cases_of(item, op):
    return list({match.case.key: match.case for match in matches(item, [op])}.values())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with an RMSNorm kernel for the toy model."""
    folder = tmp_path_factory.mktemp("run")
    export(folder, "rmsnorm", CPP_NORM, cases_of(toy(), "rmsnorm"))
    return folder


def test_kernels_are_called_and_the_numbers_agree(run):
    item = toy()
    expected = expect(item)
    with autokernel.apply(item.model, run) as applied:
        assert disagreement(output_leaves(item.model, item), expected) is None
        assert applied.calls == {"rmsnorm": 5}
        assert applied.fallbacks == {"rmsnorm": 0}
        applied.check()


STARTERS = ("rmsnorm", "rotary_embedding", "flash_attention", "fused_mlp", "matmul")


def test_every_starter_at_once(tmp_path):
    item = toy()
    expected = expect(item)
    for op in STARTERS:
        cases = list({m.case.key: m.case for m in matches(toy()) if m.op == op}.values())
        export(tmp_path, op, starter_path(op, "cpp").read_text(), cases)
    applied = autokernel.apply(item.model, tmp_path)
    assert disagreement(output_leaves(item.model, item), expected) is None
    counts = {"rmsnorm": 5, "rotary_embedding": 4, "flash_attention": 2, "fused_mlp": 2, "matmul": 5}
    assert applied.calls == counts


def test_wrong_kernel_shows_in_the_comparison(tmp_path):
    item = toy()
    expected = expect(item)
    export(tmp_path, "rmsnorm", CPP_NORM.replace("* w[j]", ""), cases_of(toy(), "rmsnorm"))
    autokernel.apply(item.model, tmp_path)
    assert "output tensor 0" in disagreement(output_leaves(item.model, item), expected)


def test_another_shape_runs_the_original(run):
    item = toy()
    other = tokens(sequence=17)
    with torch.no_grad():
        expected = item.model(other)
        applied = autokernel.apply(item.model, run)
        assert torch.equal(item.model(other), expected)
    assert applied.calls == {"rmsnorm": 0}
    assert applied.fallbacks == {"rmsnorm": 5}
    with pytest.raises(ConfigError, match="never called"):
        applied.check()


def test_another_epsilon_runs_the_original(run):
    item = toy()
    item.model.norm.eps = 1e-2
    applied = autokernel.apply(item.model, run)
    output_leaves(item.model, item)
    assert (applied.calls["rmsnorm"], applied.fallbacks["rmsnorm"]) == (4, 1)


def test_rotary_tables_are_checked_once_for_all_layers(tmp_path):
    item = toy()
    cases = cases_of(toy(), "rotary_embedding")
    export(tmp_path, "rotary_embedding", starter_path("rotary_embedding", "cpp").read_text(), cases)
    applied = autokernel.apply(item.model, tmp_path)
    output_leaves(item.model, item)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output_leaves(item.model, item)
    assert applied.calls["rotary_embedding"] == 8
    # Each comparison has a GPU finish all work before it.
    assert sum(event.name == "aten::equal" for event in profile.events()) == 2


def test_rotary_tables_that_change_are_noticed(tmp_path):
    item = toy()
    export(
        tmp_path,
        "rotary_embedding",
        starter_path("rotary_embedding", "cpp").read_text(),
        cases_of(toy(), "rotary_embedding"),
    )
    applied = autokernel.apply(item.model, tmp_path)
    output_leaves(item.model, item)
    assert applied.calls["rotary_embedding"] == 4
    item.model.cos[:, 0] += 0.5
    changed = output_leaves(item.model, item)
    assert (applied.calls["rotary_embedding"], applied.fallbacks["rotary_embedding"]) == (4, 4)
    applied.undo()
    assert torch.equal(changed[0], output_leaves(item.model, item)[0])


def test_the_model_object_stays_as_it_is(run):
    item = toy()
    keys, modules = list(item.model.state_dict()), [type(m) for m in item.model.modules()]
    seen = []
    item.model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    autokernel.apply(item.model, run)
    output_leaves(item.model, item)
    assert list(item.model.state_dict()) == keys
    assert [type(m) for m in item.model.modules()] == modules
    assert item.model.lm_head.weight is item.model.embed.weight
    assert seen
    assert item.model.blocks[0].gate.in_features == HIDDEN


def test_new_weights_are_used(run):
    item = toy()
    applied = autokernel.apply(item.model, run)
    output_leaves(item.model, item)
    item.model.load_state_dict({k: v * 1.5 for k, v in copy.deepcopy(item.model.state_dict()).items()})
    got = output_leaves(item.model, item)
    applied.undo()
    assert disagreement(got, expect(item)) is None


def test_undo_restores_the_call(run):
    item = toy()
    before = item.model._compiled_call_impl
    with pytest.raises(KeyboardInterrupt), autokernel.apply(item.model, run) as applied:
        raise KeyboardInterrupt
    assert item.model._compiled_call_impl is before
    output_leaves(item.model, item)
    assert applied.calls == {"rmsnorm": 0}
    applied.undo()
    assert item.model._compiled_call_impl is before


def test_two_models_do_not_disturb_one_another(run):
    first, second, plain = toy(), toy(), toy()
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.mul_(1.1)
    one, two = autokernel.apply(first.model, run), autokernel.apply(second.model, run)
    expected = [expect(LoadedCopy(item)) for item in (first, second)]
    for item, wanted in zip((first, second), expected, strict=True):
        assert disagreement(output_leaves(item.model, item), wanted) is None
    output_leaves(plain.model, plain)
    assert (one.calls["rmsnorm"], two.calls["rmsnorm"]) == (5, 5)
    one.undo()
    output_leaves(second.model, second)
    assert two.calls["rmsnorm"] == 10


def LoadedCopy(item):
    """The same model without kernels: a copy does not take them along."""
    return loaded(copy.deepcopy(item.model), *item.args)


def test_inference_mode_uses_the_kernels(run):
    item = toy()
    applied = autokernel.apply(item.model, run)
    with torch.inference_mode():
        item.model(*item.args)
    assert applied.calls == {"rmsnorm": 5}


def test_torch_compile_around_an_applied_model(run):
    """It runs the graph with kernels; a larger model takes the applied one in as its author wrote it."""
    item = toy()
    around = torch.nn.Sequential(item.model, torch.nn.ReLU())
    applied = autokernel.apply(item.model, run)
    with torch.no_grad():
        torch.compile(item.model, backend="eager")(*item.args)
        assert applied.calls == {"rmsnorm": 5}
        torch.compile(around, backend="eager")(*item.args)
        assert applied.calls == {"rmsnorm": 5}


def test_a_graph_break_leaves_pieces_with_kernels(run):
    """And calls of the pieces are no reason to capture anything anew."""

    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Norm(), Norm()

        def forward(self, x):
            y = self.first(x)
            torch._dynamo.graph_break()
            return self.second(y)

    model = Broken()
    x = torch.randn(1, SEQUENCE, HIDDEN)
    applied = autokernel.apply(model, run)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            model(x)
    assert applied.calls == {"rmsnorm": 8}
    assert applied.uncaptured == 0


def test_a_model_never_called_fails_the_check(run):
    applied = autokernel.apply(toy().model, run)
    with pytest.raises(ConfigError) as failure:
        applied.check()
    assert "not called" in failure.value.hint


def test_a_kernel_that_returns_another_shape_raises(tmp_path):
    item = loaded(Norm(), torch.randn(4, HIDDEN))
    export(tmp_path, "rmsnorm", CPP_NORM.replace("return y", "return y[0]"), cases_of(item, "rmsnorm"))
    autokernel.apply(item.model, tmp_path)
    with pytest.raises(RuntimeError, match="returned"):
        output_leaves(item.model, item)


def test_run_by_name_and_latest(run, tmp_path, monkeypatch):
    home = tmp_path / ".autokernel" / "20260101-0000-toy"
    home.mkdir(parents=True)
    (home / "run.json").write_text(json.dumps({"run": home.name, "created": "2026-01-01T00:00:00+00:00", "count": 1}))
    export(home, "rmsnorm", CPP_NORM, cases_of(toy(), "rmsnorm"))
    monkeypatch.chdir(tmp_path)
    for name in (home.name, "latest", str(home), home):
        item = toy()
        with autokernel.apply(item.model, name) as applied:
            output_leaves(item.model, item)
        assert applied.calls == {"rmsnorm": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CPP_NORM.replace('"rmsnorm"', '"softmax"', 1), "for softmax"),
        (CPP_NORM.replace("int64_t rows,", "int64_t rows"), "does not build"),
        (CPP_NORM + "\nraise ValueError('wrong machine')\n", "wrong machine"),
        ("def kernel_fn(:", "not valid Python"),
    ],
)
def test_kernels_that_cannot_be_loaded(tmp_path, text, message):
    export(tmp_path, "rmsnorm", text, [])
    with pytest.raises(ConfigError, match=message):
        autokernel.apply(toy().model, tmp_path)


def test_ops_are_chosen_by_use_or_by_name(tmp_path):
    export(tmp_path, "rmsnorm", CPP_NORM, cases_of(toy(), "rmsnorm"), used=False)
    with pytest.raises(ConfigError, match="no kernel that makes"):
        autokernel.apply(toy().model, tmp_path)
    with pytest.raises(ConfigError, match="no kernel for softmax"):
        autokernel.apply(toy().model, tmp_path, ops=["softmax"])
    assert autokernel.apply(toy().model, tmp_path, ops=["rmsnorm"]).calls == {"rmsnorm": 0}


def test_no_such_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("20260101-nothing", "latest", tmp_path / "nowhere"):
        with pytest.raises(ConfigError):
            autokernel.apply(toy().model, name)


def test_a_mask_that_the_model_makes_itself_is_checked_once(tmp_path, monkeypatch):
    class Masked(torch.nn.Module):
        def forward(self, q, k, v):
            at = torch.arange(q.shape[2])
            mask = (at[None, :] <= at[:, None])[None, None]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    item = loaded(Masked(), *(torch.randn(1, 2, SEQUENCE, 16) for _ in range(3)))
    cases = cases_of(item, "flash_attention")
    export(tmp_path, "flash_attention", starter_path("flash_attention", "cpp").read_text(), cases)
    applied = autokernel.apply(item.model, tmp_path)
    output_leaves(item.model, item)
    checks = []
    monkeypatch.setattr(torch, "equal", lambda *args: checks.append(args) or True)
    output_leaves(item.model, item)
    monkeypatch.undo()
    assert applied.calls["flash_attention"] == 2
    assert applied.fallbacks["flash_attention"] == 0
    assert not checks
