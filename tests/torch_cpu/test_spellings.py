"""Ops as other people's models spell them, found; what only looks like them, refused by the recorded values."""

import pytest
import torch
import torch.nn.functional as F
from models import HIDDEN, loaded
from test_match import Lambda, heads, matches
from test_replace import cases_of
from torch import nn
from torch.profiler import ProfilerActivity

from autokernel.applied import Applied
from autokernel.biases import join_biases
from autokernel.capture import capture
from autokernel.loading import get_spec
from autokernel.match import Matcher
from autokernel.outputs import output_leaves
from autokernel.plan import true_matches
from autokernel.sites import Replacement

pytestmark = pytest.mark.usefixtures("one_thread")


def true(item, op):
    """(matches of the op whose adapters hold, why others do not)."""
    (graph,) = capture(item)
    return true_matches(Matcher(ops=(op,)), graph)


class GemmaNorm(nn.Module):
    """`offset` 1.0 is Gemma's."""

    def __init__(self, offset=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))
        self.offset = offset

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * (self.offset + self.weight.float())).type_as(x)


def test_a_weight_stored_as_its_distance_from_one():
    (match,) = matches(loaded(GemmaNorm(), torch.randn(4, HIDDEN)), ["rmsnorm"])
    assert "weight" in match.case.tensors
    (match,) = matches(loaded(GemmaNorm(0.5), torch.randn(4, HIDDEN)), ["rmsnorm"])
    assert match.scalars["weight"] is None  # what is scaled afterwards is another matter


def test_in_16_bits_one_plus_weight_must_be_exact():
    item = loaded(GemmaNorm(), torch.randn(4, HIDDEN, dtype=torch.bfloat16), dtype=torch.bfloat16)
    found, refused = true(item, "rmsnorm")
    assert not found
    assert "weight" in refused[0]
    item.model.weight.data.fill_(0.25)
    assert len(true(item, "rmsnorm")[0]) == 1


@pytest.mark.parametrize(
    ("model", "op", "missing"),
    [
        (nn.LayerNorm(HIDDEN, bias=False), "layernorm", {"bias"}),
        (nn.LayerNorm(HIDDEN, elementwise_affine=False), "layernorm", {"weight", "bias"}),
        (nn.RMSNorm(HIDDEN, eps=1e-5, elementwise_affine=False), "rmsnorm", {"weight"}),
        (Lambda(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), "rmsnorm", {"weight"}),
    ],
)
def test_norms_without_weight_or_bias(model, op, missing):
    (match,) = matches(loaded(model, torch.randn(3, 5, HIDDEN)), [op])
    assert {name for name, value in match.scalars.items() if value is None} == missing
    assert match.scalars["eps"] == pytest.approx(1e-5)


def additive(seen):
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def attend(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_an_additive_mask_counts_as_causal_only_by_its_values():
    causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    args = (heads(), heads(), heads())
    for mask in (causal, additive(causal)):
        found, refused = true(loaded(Lambda(attend), *args, mask), "flash_attention")
        assert [match.scalars["causal"] for match in found] == [True]
        assert not refused
    for mask in (additive(causal & ~causal.tril(-4)), torch.randn(1, 2, 12, 12)):  # a window; T5's bias
        found, refused = true(loaded(Lambda(attend), *args, mask), "flash_attention")
        assert not found
        assert "mask" in refused[0]


BOTH = ("flash_attention", "masked_attention")


def found_of(item, ops=BOTH):
    (graph,) = capture(item)
    found, refused = true_matches(Matcher(ops=ops), graph)
    return [match.op for match in found], refused


def test_a_mask_that_is_more_than_causal_is_an_argument():
    causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    padding = (torch.arange(12) < 9).expand(1, 1, 1, 12)
    args = (heads(), heads(), heads())
    for mask in (padding, causal & padding, additive(causal & padding), torch.randn(1, 2, 12, 12)):
        assert found_of(loaded(Lambda(attend), *args, mask)) == (["masked_attention"], [])
    for mask in (causal, additive(causal)):  # what needs no mask is better off without
        assert found_of(loaded(Lambda(attend), *args, mask)) == (["flash_attention"], [])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_eager_attention_with_a_mask(grouped, seen):
    mask = (torch.arange(12) < 9).expand(1, 1, 1, 12)
    k = heads()[:, :1] if grouped else heads()

    def with_sdpa(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    def decomposed(q, k, v, mask):
        k, v = (x.repeat_interleave(2, 1) if grouped else x for x in (k, v))
        return F.softmax(q @ k.transpose(-2, -1) * 0.3 + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    assert found_of(loaded(Lambda(with_sdpa), heads(), k, k, mask if seen else additive(mask)))[0] == [
        "masked_attention"
    ]
    if not seen and not grouped:
        assert found_of(loaded(Lambda(decomposed), heads(), k, k, additive(mask)))[0] == ["masked_attention"]


def test_the_attention_of_t5_without_a_scale():
    def fn(q, k, v, bias):
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += bias
        return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)

    (match,) = matches(loaded(Lambda(fn), heads(), heads(), heads(), torch.randn(1, 2, 12, 12)), BOTH)
    assert (match.op, match.scalars["scale"]) == ("masked_attention", 1.0)


def test_the_op_that_has_a_kernel_for_the_call_is_put_in():
    """By its looks a causal mask may be either op's; a run's kernels tell which one it was."""
    causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    item = loaded(Lambda(attend), heads(), heads(), heads(), causal)
    (graph,) = capture(item)
    for op in BOTH:
        (match,) = true_matches(Matcher(ops=(op,)), graph)[0]
        spec = get_spec(op)
        replacement = Replacement(op=op, kernel_fn=spec.oracle, cases=[match.case])
        other = Replacement(op=next(iter({*BOTH} - {op})), kernel_fn=get_spec("softmax").oracle, cases=[])
        with Applied(item.model, [replacement, other]) as applied, torch.no_grad():
            got = item.model(*item.args)
        assert applied.calls == {op: 1, other.op: 0}
        torch.testing.assert_close(got, attend(*item.args))


def test_attention_of_one_tensor_with_itself():
    fn = Lambda(lambda x: F.scaled_dot_product_attention(x, x, x))
    (match,) = matches(loaded(fn, heads()), ["flash_attention"])
    assert len(set(match.inputs.values())) == 1


class Biased(nn.Module):
    """A Linear with a bias, GPT-2's Conv1D, and two tensors added to a product that are no bias."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 48)
        self.weight, self.bias = nn.Parameter(torch.randn(48, 32)), nn.Parameter(torch.randn(32))

    def forward(self, x, whole):
        x = torch.addmm(self.bias, self.linear(x), self.weight)
        return torch.addmm(whole, x, x.T), torch.addmm(self.bias, x, x.T[:, :32], beta=2.0)


def test_products_with_a_bias_are_found_and_put_back_where_nobody_takes_them():
    item = loaded(Biased(), torch.randn(32, HIDDEN), torch.randn(32, 32))
    (graph,) = capture(item)
    found = Matcher(ops=("matmul",)).find(graph.gm)
    assert [match.case.tensors["b"].shape for match in found] == [(HIDDEN, 48), (48, 32)]
    before = graph.gm(*graph.inputs)
    targets = [node.target for node in graph.gm.graph.nodes]
    assert targets.count(torch.ops.aten.addmm.default) == 2
    assert join_biases(graph.gm) == 2
    targets = [node.target for node in graph.gm.graph.nodes]
    assert targets.count(torch.ops.aten.addmm.default) == 4
    assert torch.ops.aten.mm.default not in targets
    for got, wanted in zip(graph.gm(*graph.inputs), before, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_kernel_switched_off_leaves_the_bias_within_the_product():
    item = loaded(nn.Sequential(nn.Linear(HIDDEN, 48), nn.ReLU(), nn.Linear(48, 32)), torch.randn(32, HIDDEN))
    kernel = Replacement(op="matmul", kernel_fn=lambda a, b: a @ b, cases=cases_of(item, "matmul"))
    (eager,) = output_leaves(item.model, item)
    with Applied(item.model, [kernel]):
        torch.testing.assert_close(output_leaves(item.model, item)[0], eager)
        kernel.enabled = False
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
            torch.testing.assert_close(output_leaves(item.model, item)[0], eager, rtol=0, atol=0)
    assert kernel.calls == 2
    assert sum(event.name == "aten::addmm" for event in profile.events()) == 2
