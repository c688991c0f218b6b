"""Constants of a captured graph are computed once, needless copies not at all, and the rest as ever."""

import pytest
import torch
import torch.nn.functional as F
from models import loaded

from autokernel.capture import capture
from autokernel.fold import fold_constants, share_repeated

LENGTH = 12


class Lambda(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


def folded(fn, *args):
    """(graph after folding, values stored, what it returns, what the model returns)."""
    (graph,) = capture(loaded(Lambda(fn), *args))
    stored = fold_constants(graph.gm)
    return graph.gm, stored, graph.gm(*graph.inputs), fn(*args)


def targets(gm):
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_a_mask_made_from_positions_is_stored():
    def fn(x):
        at = torch.arange(LENGTH)
        mask = (at[None, :] <= at[:, None])[None].expand(2, -1, -1)
        return x.masked_fill(~mask, 0.0)

    gm, stored, (got,), want = folded(fn, torch.randn(2, LENGTH, LENGTH))
    assert stored == 1
    assert targets(gm) == ["aten.masked_fill.Scalar"] or targets(gm) == ["aten.masked_fill.Tensor"]
    assert torch.equal(got, want)


def test_random_numbers_stay_random():
    gm, stored, (first,), _ = folded(lambda x: x + torch.rand(LENGTH), torch.zeros(LENGTH))
    assert stored == 0
    assert not torch.equal(first, gm(torch.zeros(LENGTH))[0])


def test_what_is_returned_may_be_written_to():
    def fn(x):
        at = torch.arange(LENGTH)
        return x * at, at

    gm, _, outputs, _ = folded(fn, torch.ones(LENGTH))
    for value in outputs:
        value.zero_()
    again = gm(torch.ones(LENGTH))
    assert all(torch.equal(value, torch.arange(LENGTH).to(value.dtype)) for value in again)


def test_what_reads_an_input_is_computed_anew():
    gm, _, (first,), _ = folded(lambda x: x * torch.arange(LENGTH) + x, torch.ones(LENGTH))
    assert torch.equal(gm(torch.zeros(LENGTH))[0], torch.zeros(LENGTH))
    assert torch.equal(first, torch.arange(LENGTH) + 1.0)


def shared(fn, *args):
    """(graph after sharing, nodes removed, what it returns, what the model returns)."""
    (graph,) = capture(loaded(Lambda(fn), *args))
    removed = share_repeated(graph.gm)
    return graph.gm, removed, graph.gm(*graph.inputs), fn(*args)


def test_equal_views_are_taken_once():
    def fn(x, table):
        return (x + table.unsqueeze(1)) * table.unsqueeze(1) - table.unsqueeze(0)

    gm, removed, (got,), want = shared(fn, torch.randn(4, 4, 3), torch.randn(4, 3))
    assert removed == 1
    assert targets(gm).count("aten.unsqueeze.default") == 2
    assert torch.equal(got, want)


def test_equal_results_with_memory_of_their_own_stay_apart():
    _, removed, outputs, want = shared(lambda x: (x + 1, x + 1), torch.ones(LENGTH))
    assert removed == 0
    outputs[0].zero_()
    assert torch.equal(outputs[1], want[1])


def copies(fn, x):
    """How many copies are left in the captured graph, which computes what the model does, in memory of its own."""
    (graph,) = capture(loaded(Lambda(fn), x))
    want, got = fn(x), graph.gm(*graph.inputs)
    want = want if isinstance(want, tuple) else (want,)
    before = x.clone()
    for result, right in zip(got, want, strict=True):
        torch.testing.assert_close(result, right)
    for result in got:
        result.add_(1)
    assert torch.equal(x, before)
    for other, right in zip(got, want, strict=True):
        torch.testing.assert_close(other, right + 1)
    return targets(graph.gm).count("aten.clone.default")


def test_a_dropout_that_is_switched_off_costs_nothing():
    assert copies(lambda x: F.dropout(torch.relu(x), 0.1, training=False) * 2, torch.randn(4, 6)) == 0
    assert (
        copies(lambda x: F.dropout(torch.relu(x).view(2, 12), 0.1, training=False).view(4, 6), torch.randn(4, 6)) == 0
    )
    assert (
        copies(lambda x: torch.relu(x).clone().T.clone(memory_format=torch.contiguous_format), torch.randn(4, 6)) == 1
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.clone(),
        lambda x: x.view(2, 12).clone().view(4, 6),
        lambda x: torch.relu(x).T.clone(memory_format=torch.contiguous_format) * 2,
        lambda x: (torch.relu(x), torch.relu(x).clone()),
        lambda x: (lambda y: (y.view(2, 12), y.clone().view(3, 8)))(torch.relu(x)),
        lambda x: (lambda parts: (parts[0].clone().view(6, 2), parts[1].view(2, 6)))(torch.relu(x).split(2)),
    ],
    ids=["of an input", "of a view of one", "for its layout", "returned", "of what is returned", "of a part"],
)
def test_other_copies_stay(fn):
    assert copies(fn, torch.randn(4, 6)) == 1
