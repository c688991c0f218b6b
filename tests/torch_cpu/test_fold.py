"""Constants of a captured graph are computed once, and nothing else is."""

import torch
from models import loaded

from autokernel.capture import capture
from autokernel.fold import fold_constants

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
