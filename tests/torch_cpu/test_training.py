"""Kernels in forwards that need gradients: called there, and the gradients are those of the model's own nodes."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from models import HIDDEN, SEQUENCE, VOCABULARY, Norm, ToyLlama, loaded, tokens, toy
from test_match import matches
from test_replace import export
from torch import nn
from torch.utils.checkpoint import checkpoint

import autokernel
from autokernel.errors import ConfigError

OPS = ("flash_attention", "fused_mlp", "matmul", "rmsnorm", "rotary_embedding")
CALLS = {"flash_attention": 2, "fused_mlp": 2, "matmul": 5, "rmsnorm": 5, "rotary_embedding": 4}
ORACLE = """
from autokernel.loading import get_spec

KERNEL_TYPE = "{op}"
BACKEND = "cpp"

def kernel_fn(*arguments):
    return get_spec("{op}").oracle(*arguments).detach()  # autograd sees through no kernel
"""


def export_kernels(folder, item, ops=OPS):
    found = matches(item, list(ops))
    for op in ops:
        cases = {match.case.key: match.case for match in found if match.op == op}
        export(folder, op, ORACLE.format(op=op), list(cases.values()))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with a kernel for each op of the toy model."""
    return export_kernels(tmp_path_factory.mktemp("run"), toy())


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    """A run directory with an RMSNorm kernel alone."""
    return export_kernels(tmp_path_factory.mktemp("norms"), toy(), ["rmsnorm"])


def gradients(model, *args, loss=lambda output: output.float().sin().mean()):
    """The gradient of each parameter, by name, after one backward of a forward with fixed random numbers."""
    model.zero_grad()
    torch.manual_seed(0)
    loss(model(*args)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(got, want, rtol=2e-5):
    """Each gradient agrees within `rtol` of its own largest element, and is there where it should be."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            assert float((got[name] - value).abs().max()) <= rtol * float(value.abs().max()), name


def test_gradients_are_those_of_the_unchanged_model(run):
    """Grouped heads, tied weights, checked arguments, all ops at once."""
    model, plain = ToyLlama(), ToyLlama()
    with autokernel.apply(model, run) as applied:
        got = gradients(model, tokens())
        assert applied.calls == CALLS
        assert applied.fallbacks == dict.fromkeys(CALLS, 0)
        assert applied.training_graphs == 0
        assert_same(got, gradients(plain, tokens()))
        assert model.lm_head.weight is model.embed.weight
    assert_same(gradients(model, tokens()), got)
    assert applied.calls == CALLS


def curve(model, steps):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        batch = torch.randint(VOCABULARY, (1, SEQUENCE))
        loss = F.cross_entropy(model(batch)[0, :-1], batch[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_goes_as_without_kernels(run):
    steps = 12
    model, plain = ToyLlama(), ToyLlama()
    applied = autokernel.apply(model, run)
    got, want = curve(model, steps), curve(plain, steps)
    assert got == pytest.approx(want, rel=1e-3)
    assert want[-1] != pytest.approx(want[0], rel=1e-2)
    assert applied.calls == {op: steps * count for op, count in CALLS.items()}
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=1e-2, atol=1e-2)
    assert applied.calls["rmsnorm"] == 5 * (steps + 1)


class Around(nn.Module):
    """A norm with what surrounds it in a training step."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.batch = Norm(), nn.BatchNorm1d(HIDDEN)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def pair(body, run):
    """A model with the kernel for its norm, the same without, and what was applied."""
    model = Around(body)
    plain = copy.deepcopy(model)
    return model, plain, autokernel.apply(model, run)


def rows(**options):
    return torch.randn(1, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(2), **options)


BODIES = {
    "dropout": lambda self, x: F.dropout(self.norm(F.dropout(x, 0.3)), 0.3),
    "detached": lambda self, x: self.norm(x) * self.norm.weight.detach(),
    "batch_norm": lambda self, x: self.batch(self.norm(x)[0]),
    "checkpoint": lambda self, x: checkpoint(lambda y: self.norm(F.dropout(y, 0.3)).relu(), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_surrounds_a_kernel_means_what_it_meant(name, norms):
    """Random numbers, statistics, detached values; a checkpoint runs the kernel again."""
    model, plain, applied = pair(BODIES[name], norms)
    got, want = gradients(model, rows()), gradients(plain, rows())
    assert_same({k: v for k, v in got.items() if want[k] is not None}, {k: v for k, v in want.items() if v is not None})
    assert applied.calls["rmsnorm"] == (2 if name == "checkpoint" else 1)
    for buffer, expected in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected)
    assert int(model.batch.num_batches_tracked) == (name == "batch_norm")


def test_training_mode_without_gradients(norms):
    model, plain, applied = pair(lambda self, x: self.batch(F.dropout(self.norm(x)[0], 0.3)), norms)
    results = []
    for item in (model, plain):
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(item(rows()))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(list(model.buffers()), list(plain.buffers()))
    assert applied.calls["rmsnorm"] == 1


def test_a_checkpoint_without_a_kernel_draws_the_same_random_numbers(norms):
    model, plain, applied = pair(BODIES["checkpoint"], norms)
    got, want = gradients(model, rows()[:, :9]), gradients(plain, rows()[:, :9])
    assert_same({"": got["norm.weight"]}, {"": want["norm.weight"]})
    assert applied.training_graphs == 1


def test_a_part_without_gradients_has_none(norms):
    def body(self, x):
        with torch.no_grad():
            still = self.norm(x)
        return self.norm(x) * still

    model, plain, applied = pair(body, norms)
    x, own = rows(requires_grad=True), rows(requires_grad=True)
    assert_same({"": gradients(model, x)["norm.weight"]}, {"": gradients(plain, own)["norm.weight"]})
    torch.testing.assert_close(x.grad, own.grad)
    assert applied.calls["rmsnorm"] == 2


def test_a_forward_that_turns_gradients_off_itself_has_kernels(norms):
    def body(self, x):
        with torch.no_grad():
            return F.scaled_dot_product_attention(*3 * [self.norm(x)[None]])

    model, plain, applied = pair(body, norms)
    got = model(rows())
    torch.testing.assert_close(got, plain(rows()))
    assert not got.requires_grad
    assert applied.calls["rmsnorm"] == 1


def test_frozen_weights_get_no_gradient(norms):
    model, plain, applied = pair(lambda self, x: self.batch(self.norm(x)[0]), norms)
    for item in (model, plain):
        item.norm.weight.requires_grad_(False)
    assert_same(gradients(model, rows()), gradients(plain, rows()))
    assert model.norm.weight.grad is None
    assert applied.calls["rmsnorm"] == 1


def test_autocast(norms):
    """The norm runs in fp32, as verified; the product in bf16."""
    model, plain, applied = pair(lambda self, x: self.norm(x) @ self.norm(x).mT, norms)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(
            {"": gradients(model, rows())["norm.weight"]}, {"": gradients(plain, rows())["norm.weight"]}, rtol=0.02
        )
        assert model(rows()).dtype is torch.bfloat16
    assert applied.calls["rmsnorm"] == 4


def hooked_gradients(model):
    """What a parameter's hook and a module's hook see in one backward."""
    seen = []
    model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    model.register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0].clone()))
    gradients(model, rows(requires_grad=True))
    return seen


def test_hooks_see_what_they_saw(norms):
    model, plain, applied = pair(lambda self, x: self.norm(x), norms)
    got, want = hooked_gradients(model), hooked_gradients(plain)
    assert applied.calls["rmsnorm"] == 1
    assert len(want) == 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_weights_changed_before_the_backward_are_noticed(norms):
    model, _, _ = pair(lambda self, x: self.norm(x), norms)
    loss = model(rows(requires_grad=True)).sum()
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused(norms):
    model, _, _ = pair(lambda self, x: self.norm(x), norms)
    (grad,) = torch.autograd.grad(model(rows()).square().sum(), [model.norm.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_the_backward_may_come_after_undo(norms):
    model, plain, applied = pair(lambda self, x: self.norm(x), norms)
    with applied:
        loss = model(rows()).sin().mean()
    loss.backward()
    assert applied.calls["rmsnorm"] == 1
    assert_same({"": model.norm.weight.grad}, {"": gradients(plain, rows())["norm.weight"]})


class Widths(nn.Module):
    """Two norms of one kind, for which there are two kernels, and a third for which there is none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for width in (16, 32, 8))

    def forward(self, x):
        return torch.cat([norm(part) for norm, part in zip(self.norms, x.split((16, 32, 8), -1), strict=True)], -1)


def test_two_kernels_of_one_op_are_called_each_for_its_shape(tmp_path):
    """Both halve the weight, one of them twice, so that it can be seen which was called."""
    x = torch.randn(4, 56)
    cases = {match.case.tensors["x"].shape[-1]: match.case for match in matches(loaded(Widths(), x), ["rmsnorm"])}
    for width, factor in ((16, 2), (32, 4)):
        text = ORACLE.format(op="rmsnorm").replace(".detach()", f".detach() / {factor}")
        export(tmp_path, f"rmsnorm_{width}", text, [cases[width]], op="rmsnorm")
    model, plain = Widths(), Widths()
    with autokernel.apply(model, tmp_path) as applied:
        got = model(x)
        with torch.no_grad():
            torch.testing.assert_close(model(x), got)
    factors = torch.tensor([2.0] * 16 + [4.0] * 32 + [1.0] * 8)
    torch.testing.assert_close(got * factors, plain(x))
    assert applied.calls == {"rmsnorm": 4}
    assert applied.fallbacks == {"rmsnorm": 2}
    torch.testing.assert_close(model(x), plain(x))


def kept_bytes(model):
    """What a forward keeps for its backward, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), value)  # alive, or its address would be another's
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        model(tokens()).sum()
    return sum(size for size, _ in kept.values())


def test_values_inside_an_op_are_not_kept_for_the_backward(run):
    model, plain = ToyLlama(), ToyLlama()
    autokernel.apply(model, run)
    assert kept_bytes(model) < 0.6 * kept_bytes(plain)


def test_attention_that_no_kernel_takes_is_computed_once(norms):
    model, _, applied = pair(lambda self, x: F.scaled_dot_product_attention(*3 * [self.norm(x)[None]]), norms)
    gradients(model, rows())  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(model, rows())
    forwards = [e.name for e in profile.events() if e.name == "aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert len(forwards) == 1
    assert applied.calls["rmsnorm"] == 2


def test_without_a_place_the_model_trains_as_before_and_says_so_once(norms, caplog):
    model, plain, applied = pair(lambda self, x: self.norm(x), norms)
    with caplog.at_level(logging.WARNING, logger="autokernel"):
        got = gradients(model, rows()[:, :9])
        gradients(model, rows()[:, :11])
    assert_same(got, gradients(plain, rows()[:, :9]), rtol=0)
    assert applied.calls == {"rmsnorm": 0}
    assert applied.fallbacks == {"rmsnorm": 2}
    assert applied.training_graphs == 2
    assert [record.getMessage() for record in caplog.records] == [
        "a graph that needs gradients runs without kernels: no kernel has a place in it"
    ]
    with pytest.raises(ConfigError) as failure:
        applied.check()
    assert "other shapes" in failure.value.hint
