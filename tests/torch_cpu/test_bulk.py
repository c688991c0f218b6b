"""Inputs for timed calls: changed in place, copied and moved, and what a bulk keeps of its calls."""

import random
import statistics

import pytest
import torch

from autokernel.judge import refresh
from autokernel.judge.bulk import Bulk
from autokernel.judge.walltime import ColdCopy


def strided():
    """A transposed, an expanded and an empty tensor."""
    return [torch.randn(6, 4).t(), torch.randn(3, 1, 5).expand(3, 7, 5), torch.empty(0, 4)]


@pytest.mark.parametrize("value", strided(), ids=["transposed", "expanded", "empty"])
def test_a_private_copy_has_the_strides_and_none_of_the_memory(value):
    copy = refresh.private_copy(value)
    assert copy.stride() == value.stride()
    assert torch.equal(copy, value)
    assert value.numel() == 0 or copy.data_ptr() != value.data_ptr()


@pytest.mark.parametrize("value", strided()[:2], ids=["transposed", "expanded"])
def test_moved_copies_hold_the_same_numbers_elsewhere(value):
    first, second = (refresh.private_copy(value, steps) for steps in (1, 2))
    assert not torch.equal(first, second)
    assert torch.equal(first.reshape(-1).sort().values, value.reshape(-1).sort().values)


@pytest.mark.parametrize("outputs", [1, 1000])
def test_every_drawn_change_makes_the_first_argument_new(outputs):
    x, weight = torch.randn(8, 16), torch.randn(16)
    refresher = refresh.Refresher([x, weight], outputs, random.Random(3))
    seen = [x.clone()]
    for _ in range(20):
        before = x._version
        refresh.apply([x, weight], refresher.draw())
        assert x._version == before
        assert not torch.equal(x, seen[-1])
        seen.append(x.clone())
    assert weight._version > 0


def test_a_bulk_reuses_its_memory_and_survives_a_failed_capture():
    bulk, x = Bulk(), torch.randn(5, 8)
    bulk.load([x, 2.0], [1, 2])
    addresses = []
    bulk.run(lambda value, factor: addresses.append(value.data_ptr()) or value * factor)
    kept = [output.clone() for output in bulk.outputs]
    assert torch.equal(kept[1], refresh.private_copy(x, 2) * 2)

    bulk.load([x, 2.0], [3, 4])

    def fails(*_):
        raise RuntimeError("not captured")

    with pytest.raises(RuntimeError):  # there is no CUDA here, or this kernel does not like it
        bulk.capture(fails)
    assert all(torch.equal(output, before) for output, before in zip(bulk.outputs, kept, strict=True))
    bulk.run(lambda value, factor: addresses.append(value.data_ptr()) or value * factor)
    assert addresses[:2] == addresses[2:]


def test_a_copy_costs_more_out_of_the_memory_than_out_of_a_cache():
    """What fits into the first cache together costs next to nothing to find there."""
    small = ColdCopy(4 << 10, 4000.0)
    large = ColdCopy(16 << 20, 4000.0)
    cheap, dear = (statistics.median(copy.extra_us() for _ in range(7)) for copy in (small, large))
    assert 0 <= cheap < 20
    assert dear > 40
