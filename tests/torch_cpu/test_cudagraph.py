"""What can be told of CUDA graphs without a GPU: what is not recorded runs as it is; copies keep their layout."""

import pytest
import torch
from models import HIDDEN, Norm, loaded, toy
from test_match import matches

import autokernel.cudagraph as cudagraph
from autokernel.applied import Applied
from autokernel.capture import compile_call, inference_backend
from autokernel.cudagraph import conditions, unrecordable
from autokernel.loading import get_spec
from autokernel.outputs import disagreement, expect, output_leaves
from autokernel.replace import Replacer, Way
from autokernel.sites import Replacement


def kernels(item, *ops):
    return [
        Replacement(op=op, kernel_fn=get_spec(op).oracle, cases=[match.case for match in matches(item, [op])])
        for op in ops
    ]


def test_a_model_on_the_cpu_runs_as_it_is():
    item = toy()
    expected = expect(item)
    with Applied(item.model, kernels(item, "rmsnorm"), compiler="cudagraph") as applied:
        assert disagreement(output_leaves(item.model, item), expected) is None
        assert applied.calls == {"rmsnorm": 5}
        assert set(applied._replacer.unrecorded) == {"it is not on a GPU"}


def test_a_condition_is_known_by_the_inputs_that_decide_it():
    item, seen = toy(), []

    def look(gm):
        replacer._place(gm)
        replacer._tidy(gm)
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        seen.append((conditions(gm), [tuple(node.meta["val"].shape) for node in inputs], unrecordable(gm)))
        return gm.forward

    replacer = Replacer.of(kernels(item, "rotary_embedding"), Way(record=True))
    with torch.no_grad():
        compile_call(item.model, inference_backend(look))(*item.args, **item.kwargs)
    (((checks, deciding), shapes, why),) = seen
    assert len(checks) == 2
    assert {shapes[number] for number in deciding} == {tuple(item.model.cos.shape)}
    assert why == "it is not on a GPU"


def test_a_frozen_condition_answers_as_the_last_time():
    item, seen = toy(), []

    def look(gm):
        replacer._place(gm)
        seen.extend(conditions(gm)[0])
        return gm.forward

    replacer = Replacer.of(kernels(item, "rotary_embedding"))
    with torch.no_grad():
        compile_call(item.model, inference_backend(look))(*item.args, **item.kwargs)
    check, halves_differ = seen[0], item.model.cos.clone()
    halves_differ[:, 0] += 1
    assert check.holds(item.model.cos)
    with cudagraph._frozen([check]):
        assert check.holds(halves_differ)
    assert not check.holds(halves_differ)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24.0).view(4, 6),
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(24.0).view(4, 6)[1:, ::2],
        torch.arange(4.0).expand(3, 4),
        torch.arange(3.0)[1],
        torch.empty(0, 5),
    ],
    ids=["plain", "transposed", "sliced", "expanded", "scalar", "empty"],
)
def test_copies_have_the_same_values_and_strides_in_memory_of_their_own(value):
    copied = cudagraph._copied(value)
    assert torch.equal(copied, value)
    assert copied.stride() == value.stride()
    assert not value.numel() or copied.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    cudagraph._flat(copied).copy_(cudagraph._flat(value))
    assert torch.equal(copied, value)


def test_other_values_are_copied_as_they_are():
    assert cudagraph._copied(None) is None
    assert cudagraph._copied(3) == 3


def test_tensors_of_the_model_lie_still_and_inputs_do_not():
    item, found = loaded(Norm(), torch.randn(3, HIDDEN)), []

    def look(gm):
        def run(*inputs):
            found.extend((tuple(value.shape), cudagraph._lies_still(value)) for value in inputs)
            return gm.forward(*inputs)

        return run

    with torch.no_grad():
        compile_call(item.model, inference_backend(look))(*item.args)
    assert sorted(found) == [((3, HIDDEN), False), ((HIDDEN,), True)]
