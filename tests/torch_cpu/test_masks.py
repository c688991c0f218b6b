"""Constant masks of attention that say nothing are left out of a captured graph, and no other mask is."""

import pytest
import torch
import torch.nn.functional as F
from models import loaded

from autokernel.capture import capture

HEADS, LENGTH, WIDTH = 2, 12, 8
LOWEST = torch.finfo(torch.float32).min
attention = torch.ops.aten.scaled_dot_product_attention.default


class Attention(torch.nn.Module):
    """Attention whose mask is made from sizes alone, or from an input."""

    def __init__(self, make_mask):
        super().__init__()
        self.make_mask = make_mask

    def forward(self, q, k, *more):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=self.make_mask(*more), scale=0.3)


def captured(make_mask, *more, keys=LENGTH, queries=LENGTH):
    """(arguments of attention in the captured graph behind q, k and v; what it returns; what the model returns)."""
    inputs = torch.randn(2, HEADS, queries, WIDTH), torch.randn(2, HEADS, keys, WIDTH), *more
    model = loaded(Attention(make_mask), *inputs)
    (graph,) = capture(model)
    (node,) = (node for node in graph.gm.graph.nodes if node.target is attention)
    return node, graph.gm(*graph.inputs)[0], model.model(*inputs)


def seen(rows=LENGTH, columns=LENGTH):
    return torch.arange(columns)[None, :] <= torch.arange(rows)[:, None]


def additive(lowest):
    return torch.zeros(LENGTH, LENGTH).masked_fill(~seen(), lowest)


@pytest.mark.parametrize(
    "make_mask",
    [
        lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool),
        lambda: (torch.arange(LENGTH)[:, None] >= 0).expand(2, 1, LENGTH, LENGTH),
        lambda: torch.zeros(1, 1, 1, LENGTH),
    ],
    ids=["bool", "a row for all keys", "zeros to add"],
)
def test_a_mask_that_hides_nothing_is_left_out(make_mask):
    node, got, want = captured(make_mask)
    assert len(node.args) == 3
    assert node.kwargs["scale"] == 0.3
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "make_mask",
    [seen, lambda: seen().expand(2, HEADS, LENGTH, LENGTH), lambda: additive(LOWEST), lambda: additive(-torch.inf)],
    ids=["bool", "expanded", "lowest to add", "-inf to add"],
)
def test_a_mask_that_hides_the_future_becomes_a_flag(make_mask):
    node, got, want = captured(make_mask)
    assert node.args[3:] == (None, 0.0, True)
    assert node.kwargs["scale"] == 0.3
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "make_mask",
    [
        lambda: torch.arange(LENGTH)[None, :] < LENGTH - 2,
        lambda: seen() & ~seen().roll(-4, 0),
        lambda: additive(LOWEST) + 0.5,
        lambda: additive(-1.0),
        lambda: torch.stack([seen(), torch.ones(LENGTH, LENGTH, dtype=torch.bool)])[:, None],
    ],
    ids=["padding", "window", "bias", "hidden softly", "batches differ"],
)
def test_any_other_mask_stays(make_mask):
    node, got, want = captured(make_mask)
    assert len(node.args) == 4
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("queries", "keys", "stays"), [(LENGTH, 20, True), (20, LENGTH, True), (1, 1, False), (1, LENGTH, True)]
)
def test_the_future_of_fewer_queries_than_keys_is_another_mask(queries, keys, stays):
    node, got, want = captured(lambda: seen(queries, keys), queries=queries, keys=keys)
    assert (len(node.args) == 4) == stays
    torch.testing.assert_close(got, want)


def test_a_mask_that_depends_on_an_input_stays():
    mask = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
    node, got, want = captured(lambda given: given & True, mask)
    assert len(node.args) == 4
    torch.testing.assert_close(got, want)


def test_what_made_the_mask_goes_with_it():
    node, _, _ = captured(seen)
    graph = node.graph
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [attention]
