"""Answers that need no work, or forget a part of it, must be refused: for every op, dtype and case.

Each probe is made in fp64 out of the truth or the oracle, rounded to the dtype, and compared as the judge compares.
A probe made out of the truth is left out where it is the truth (shuffled rows of a single row). One that leaves out an
argument may pass only where `EXCUSED` says why.
"""

import functools
import itertools
import math

import pytest
import torch

from autokernel.judge.compare import mismatch
from autokernel.judge.trial import truth_of
from autokernel.loading import specs
from autokernel.spec import DTYPES, upcast

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = specs()
SEED = 11
"""Fixed: an output of one element meets a wrong answer within two percent now and then."""
TILE = 16
IN_EVERY_DTYPE = [(op, dtype) for op, spec in SPECS.items() for dtype in spec.dtypes]


def calls(spec, dtype):
    """(name, inputs, whether they are ordinary ones) of all cases, edges, the stress case and its adversaries."""
    for case in (*spec.cases, *spec.edges, spec.stress_case):
        yield case.name, spec.make_inputs(case.with_dtype(dtype), SEED), True
    for name, adversary in spec.adversarial.items():
        inputs = spec.make_inputs(spec.stress_case.with_dtype(dtype), SEED)
        yield name, adversary(inputs, torch.Generator().manual_seed(SEED)), False


# Probes that look at the truth only


def by_rows(value, op):
    """[rows, columns]; what is left of a row by cross entropy or a reduction is a row of one element."""
    columns = 1 if value.dim() == 0 or (value.dim() == 1 and op in ("cross_entropy", "reduce")) else value.shape[-1]
    return value.reshape(-1, columns)


def from_the_truth(op, value):
    """(what is wrong, output) of answers that know more than a cheat could, and still are no answer."""
    finite = value.nan_to_num(0, 0, 0)
    rows = by_rows(finite, op)
    yield "zeros", torch.zeros_like(value)
    yield "NaN", torch.full_like(value, math.nan)
    yield "the mean", torch.full_like(value, finite.mean())
    yield "the median", torch.full_like(value, finite.median())
    yield "means of rows", rows.mean(1, keepdim=True).expand_as(rows).reshape(value.shape)
    yield "means of columns", rows.mean(0, keepdim=True).expand_as(rows).reshape(value.shape)
    yield "shuffled rows", by_rows(value, op).roll(1, 0).reshape(value.shape)
    yield "shuffled columns", value.roll(1, -1) if value.dim() else value
    for name, filler in (("zeros", 0.0), ("memory", 1.68e22)):
        yield f"last row is {name}", edited(op, value, lambda rows, filler=filler: rows[-1:].fill_(filler))
    yield "last tile is zeros", edited(op, value, lambda rows: rows[-TILE:, -TILE:].zero_())
    yield "last elements are zeros", edited(op, value, lambda rows: rows.view(-1)[-TILE:].zero_())


def edited(op, value, edit):
    copy = value.clone()
    edit(by_rows(copy, op))
    return copy


# Probes that leave an argument out


def typical(op, inputs, value):
    """(what is wrong, output) of what a lazy kernel would return for this op."""
    if op == "softmax":
        yield "uniform", torch.full_like(value, 1 / max(inputs["x"].shape[inputs["dim"]], 1))
    if op == "cross_entropy":
        classes = inputs["logits"].shape[1]
        counted = int((inputs["targets"] != inputs["ignore_index"]).sum())
        for extra in (0.0, 0.5):
            loss = (math.log(classes) + extra) * (counted if inputs["reduction"] == "sum" else 1)
            yield f"log(classes) + {extra}", torch.full_like(value, loss)
    if "attention" in op:
        group = inputs["q"].shape[1] // inputs["k"].shape[1]
        values = inputs["v"].repeat_interleave(group, 1).mean(2, keepdim=True)
        yield "mean of all values", values.expand_as(value)
    if op in ("rmsnorm", "layernorm"):
        yield "the weight", inputs["weight"].expand_as(value)
        yield "x times the weight", inputs["x"] * inputs["weight"]


def copies(inputs, value):
    for name, tensor in inputs.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape == value.shape:
            yield f"copy of {name}", tensor.to(value.dtype)


def other_tensors(op, inputs):
    for name, tensor in inputs.items():
        if isinstance(tensor, torch.Tensor):
            yield f"{name} as zeros", {**inputs, name: torch.zeros_like(tensor)}
            if tensor.is_floating_point():
                yield f"{name} as ones", {**inputs, name: torch.ones_like(tensor)}
            if op == "matmul":
                yield f"{name} as identity", {**inputs, name: torch.eye(*tensor.shape[-2:]).expand_as(tensor).double()}


def other_scalars(op, inputs):
    """(what is wrong, arguments) for each scalar that the call has."""
    for name, value in inputs.items():
        for other in OTHERS.get(name, lambda value, inputs: [])(value, inputs):
            yield f"{name}={other}", {**inputs, name: other}
    if op == "cross_entropy":
        targets = torch.where(inputs["targets"] == inputs["ignore_index"], 0, inputs["targets"])
        yield "ignored targets counted", {**inputs, "targets": targets, "ignore_index": -12345}


def other_scale(value, inputs):
    scale = inputs["q"].shape[-1] ** -0.5 if value is None else value
    return [1.05 * scale, scale / 1.05, *([None] if value else [1.0])]


def other_dims(value, inputs):
    rank = inputs["x"].dim()
    usual = tuple(sorted(d % rank for d in dims_of(value, rank)))
    others = [dims for n in (1, 2) for dims in itertools.combinations(range(rank), n) if dims != usual]
    return others if "op" in inputs else [dims[0] for dims in others if len(dims) == 1]


def dims_of(value, rank):
    if value is None:
        return range(rank)
    return value if isinstance(value, tuple | list) else (value,)


OTHERS = {
    "eps": lambda value, inputs: [10 * value, 0.0],
    "scale": other_scale,
    "causal": lambda value, inputs: [not value],
    "interleaved": lambda value, inputs: [not value],
    "dim": other_dims,
    "op": lambda value, inputs: sorted({"sum", "mean", "max"} - {value}),
    "activation": lambda value, inputs: sorted({"silu", "gelu", "gelu_tanh", "relu"} - {value}),
    "reduction": lambda value, inputs: sorted({"mean", "sum", "none"} - {value}),
}


EXCUSED = {
    ("layernorm", "one_column", "x as"): "the only element is its own mean: the bias is left",
    ("layernorm", "one_column", "weight as"): "the only element is its own mean: the bias is left",
    ("layernorm", "one_column", "eps="): "the only element is its own mean: the bias is left",
    ("softmax", "single", "x as"): "the only probability is one",
    ("softmax", "single", "uniform"): "the only probability is one",
    ("flash_attention", "single", "q as"): "one key takes all the weight",
    ("flash_attention", "single", "k as"): "one key takes all the weight",
    ("flash_attention", "single", "scale="): "one key takes all the weight",
    ("flash_attention", "single", "causal="): "one key takes all the weight",
    ("flash_attention", "single", "copy of v"): "one key takes all the weight",
    ("flash_attention", "single", "mean of all values"): "one key takes all the weight",
    ("masked_attention", "single", "q as"): "one key takes all the weight",
    ("masked_attention", "single", "k as"): "one key takes all the weight",
    ("masked_attention", "single", "mask as"): "one key takes all the weight",
    ("masked_attention", "single", "scale="): "one key takes all the weight",
    ("masked_attention", "single", "copy of v"): "one key takes all the weight",
    ("masked_attention", "single", "mean of all values"): "one key takes all the weight",
    ("fused_mlp", "gelu", "activation=gelu_tanh"): "closer than fp16 and bf16 can tell; fp32 can",
    ("fused_mlp", "gelu_tanh", "activation=gelu"): "closer than fp16 and bf16 can tell; fp32 can",
    ("cross_entropy", "one_class", "logits as"): "one class is certain",
    ("cross_entropy", "one_class", "targets as"): "one class is certain",
    ("cross_entropy", "one_class", "log(classes) + 0.0"): "one class is certain",
    ("cross_entropy", "one_class", "ignored targets"): "one class is certain",
    ("cross_entropy", "one_row", "reduction="): "a mean of one loss",
    ("cross_entropy", "one_row", "ignored targets"): "the only target is not ignored",
    ("cross_entropy", "no_rows_mean", "logits as"): "a mean over nothing is NaN",
    ("cross_entropy", "no_rows_mean", "targets as"): "a mean over nothing is NaN",
    ("cross_entropy", "no_rows_mean", "ignored targets"): "a mean over nothing is NaN",
    ("rotary_embedding", "one_pair", "interleaved="): "one pair is the same either way",
    ("reduce", "one_column", "op="): "sum, mean and maximum of one element",
    ("reduce", "single", "op="): "sum, mean and maximum of one element",
    ("reduce", "sum_of_nothing", "x as"): "there are no elements",
}
"""(op, case, how the probe's name begins) that may pass, and why."""


# The test


def probes(op, inputs, truth, ordinary):
    """(what is wrong, output) of everything that must be refused; other shapes are, before anything is compared."""
    wide, value = upcast(inputs), truth.value
    yield from from_the_truth(op, value)
    yield from typical(op, wide, value)
    yield from copies(wide, value)
    if not ordinary:
        return  # hard values hide arguments on purpose: an eps beside values of 10^4
    for label, arguments in (*other_tensors(op, wide), *other_scalars(op, wide)):
        try:
            output = SPECS[op].oracle(**arguments)
        except (ValueError, IndexError, RuntimeError):
            continue
        if output.shape == value.shape:
            yield label, output.double()


@functools.cache
def accepted(op, dtype):
    """(case, probe) of all that the comparison lets through, but for outputs that are the truth."""
    spec, found = SPECS[op], []
    for name, inputs, ordinary in calls(spec, dtype):
        truth = truth_of(spec, inputs)[0]
        if not truth.value.numel():
            continue  # an empty output holds nothing that could be wrong
        made_of_truth = {label for label, _ in from_the_truth(op, truth.value)}
        for label, output in probes(op, inputs, truth, ordinary):
            if label in made_of_truth and torch.allclose(output, truth.value, rtol=1e-9, atol=1e-12, equal_nan=True):
                continue
            if mismatch(output.to(DTYPES[dtype]), truth, dtype, spec.tolerances[dtype]) is None:
                found.append((name, label))
    return found


def excuse(op, case, probe):
    return next((key for key in EXCUSED if key[:2] == (op, case) and probe.startswith(key[2])), None)


@pytest.mark.parametrize(("op", "dtype"), IN_EVERY_DTYPE)
def test_answers_without_the_work_are_refused(op, dtype):
    assert [(case, probe) for case, probe in accepted(op, dtype) if excuse(op, case, probe) is None] == []


def test_every_excuse_is_needed():
    used = {excuse(op, case, probe) for op, dtype in IN_EVERY_DTYPE for case, probe in accepted(op, dtype)}
    assert set(EXCUSED) <= used


def test_gelu_and_gelu_tanh_differ_in_fp32():
    assert not [probe for _, probe in accepted("fused_mlp", "fp32") if probe.startswith("activation=")]


def test_every_call_of_an_op_meets_the_probes_that_its_arguments_allow():
    """No probe vanishes silently: each tensor and each scalar of each op is left out somewhere."""
    for op, spec in SPECS.items():
        labels = set()
        for _, inputs, ordinary in calls(spec, "fp32"):
            truth = truth_of(spec, inputs)[0]
            labels |= {label for label, _ in probes(op, inputs, truth, ordinary)} if truth.value.numel() else set()
        for name in set(spec.signature.parameters) - {"ignore_index"}:
            assert any(label.startswith((f"{name} as", f"{name}=")) for label in labels), (op, name)
        assert op != "cross_entropy" or "ignored targets counted" in labels
