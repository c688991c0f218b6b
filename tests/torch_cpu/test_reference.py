"""The ops: oracles against independent code, every case in every dtype, and inputs that expose wrong answers."""

import dataclasses
import functools
import json
import math

import pytest
import torch
import torch.nn.functional as F

from autokernel.judge.compare import Truth, mismatch
from autokernel.judge.trial import truth_of
from autokernel.loading import specs
from autokernel.records import Case
from autokernel.spec import DTYPES, build_case, retype, upcast

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = specs()
SEED = 20
IN_EVERY_DTYPE = [(op, dtype) for op, spec in SPECS.items() for dtype in spec.dtypes]
LOOSE = {("flash_attention", "eager"): 12, ("masked_attention", "eager"): 25, ("fused_mlp", "eager"): 2}
"""Baselines that round every intermediate to bf16 are less exact than a kernel may be; still the same function."""


@functools.cache
def every_call(op, dtype):
    """(name, inputs, truth) of all cases, edges and hard inputs."""
    spec = SPECS[op]
    calls = [(case.name, spec.make_inputs(case.with_dtype(dtype), SEED)) for case in (*spec.cases, *spec.edges)]
    for name, adversary in spec.adversarial.items():
        inputs = spec.make_inputs(spec.stress_case.with_dtype(dtype), SEED)
        calls.append((name, adversary(inputs, torch.Generator().manual_seed(SEED))))
    return [(name, inputs, truth_of(spec, inputs)[0]) for name, inputs in calls]


def judged(spec, output, truth, dtype):
    return mismatch(output.to(DTYPES[dtype]), truth, dtype, spec.tolerances[dtype])


# The registry


def test_ops_have_the_promised_signatures():
    assert {op: str(spec.signature).split(" ->")[0] for op, spec in SPECS.items()} == {
        "matmul": "(a: 'Tensor', b: 'Tensor')",
        "softmax": "(x: 'Tensor', dim: 'int' = -1)",
        "layernorm": "(x: 'Tensor', weight: 'Tensor | None', bias: 'Tensor | None', eps: 'float' = 1e-05)",
        "rmsnorm": "(x: 'Tensor', weight: 'Tensor | None', eps: 'float' = 1e-06)",
        "flash_attention": "(q: 'Tensor', k: 'Tensor', v: 'Tensor', causal: 'bool' = True, "
        "scale: 'float | None' = None)",
        "masked_attention": "(q: 'Tensor', k: 'Tensor', v: 'Tensor', mask: 'Tensor', scale: 'float | None' = None)",
        "fused_mlp": "(x: 'Tensor', w_gate: 'Tensor', w_up: 'Tensor', w_down: 'Tensor', activation: 'str' = 'silu')",
        "cross_entropy": "(logits: 'Tensor', targets: 'Tensor', ignore_index: 'int' = -100, reduction: 'str' = 'mean')",
        "rotary_embedding": "(x: 'Tensor', cos: 'Tensor', sin: 'Tensor', interleaved: 'bool' = False)",
        "reduce": "(x: 'Tensor', dim: 'Dims' = -1, op: 'str' = 'sum')",
    }


@pytest.mark.parametrize("op", SPECS)
def test_spec_is_complete(op):
    spec = SPECS[op]
    assert 8 <= len(spec.cases) <= 10
    cases = (*spec.cases, *spec.edges, spec.stress_case)
    assert len({case.name for case in cases}) == len(cases)
    assert len({case.key for case in spec.cases}) == len(spec.cases)
    sizes = {size for case in spec.edges for meta in case.tensors.values() for size in meta.shape}
    assert {0, 1, 1023, 1537, 4097} <= sizes or "attention" in op
    assert len(spec.adversarial) >= 4
    assert "eager" in spec.baselines
    assert spec.spellings
    for case in cases:
        assert case.op == op
        assert set(case.tensors) <= set(spec.fills)
        assert set(case.scalars) <= set(spec.signature.parameters)
        assert Case.from_json(case.to_json()) == case


def test_a_case_with_several_dims_survives_json():
    case = next(case for case in SPECS["reduce"].cases if case.name == "several")
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


# Oracles against independent code


def loop_softmax(row):
    exponentials = [math.exp(v - max(row)) for v in row]
    return [e / sum(exponentials) for e in exponentials]


def test_matmul_oracle_is_a_sum_of_products():
    inputs = upcast(SPECS["matmul"].make_inputs(build_case("matmul", "m", a=(2, 3, 5), b=(2, 5, 4)), SEED))
    want = torch.einsum("bmk,bkn->bmn", inputs["a"], inputs["b"])
    torch.testing.assert_close(SPECS["matmul"].oracle(**inputs), want)


def test_softmax_oracle_by_hand():
    x = torch.tensor([[1.0, 2.0, 4.0], [0.0, -math.inf, 3.0]], dtype=torch.float64)
    want = torch.tensor([loop_softmax(row) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(SPECS["softmax"].oracle(x), want)
    torch.testing.assert_close(SPECS["softmax"].oracle(x.T, dim=0), want.T)


def test_norm_oracles_by_hand():
    row, weight, bias, eps = [1.0, -2.0, 4.0], [0.5, 2.0, -1.0], [0.1, 0.2, 0.3], 0.25
    mean = sum(row) / 3
    deviation = math.sqrt(sum((v - mean) ** 2 for v in row) / 3 + eps)
    root = math.sqrt(sum(v * v for v in row) / 3 + eps)
    layer = [(v - mean) / deviation * w + b for v, w, b in zip(row, weight, bias, strict=True)]
    rms = [v / root * w for v, w in zip(row, weight, strict=True)]
    x, weight, bias = (torch.tensor(values, dtype=torch.float64) for values in (row, weight, bias))
    torch.testing.assert_close(SPECS["layernorm"].oracle(x, weight, bias, eps).tolist(), layer)
    torch.testing.assert_close(SPECS["rmsnorm"].oracle(x, weight, eps).tolist(), rms)


def test_norm_oracles_without_parameters_and_over_two_dims():
    x = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight, bias = x[0] + 1, x[1]
    oracle = SPECS["layernorm"].oracle
    torch.testing.assert_close(oracle(x, weight, bias, 1e-3), F.layer_norm(x, (3, 5), weight, bias, 1e-3))
    torch.testing.assert_close(oracle(x, None, None), F.layer_norm(x, (5,)))
    torch.testing.assert_close(SPECS["rmsnorm"].oracle(x, None), F.rms_norm(x, (5,), eps=1e-6))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(3, 3), (2, 4), (4, 2)])
def test_attention_oracle_by_loops(causal, seq_q, seq_k):
    q, k, v = (torch.randn(1, h, s, 2, dtype=torch.float64) for h, s in ((4, seq_q), (2, seq_k), (2, seq_k)))
    got = SPECS["flash_attention"].oracle(q, k, v, causal=causal, scale=0.7)
    for head in range(4):
        for i in range(seq_q):
            visible = min(i + 1, seq_k) if causal else seq_k
            keys, values = k[0, head // 2, :visible], v[0, head // 2, :visible]
            weights = loop_softmax([0.7 * float(q[0, head, i] @ key) for key in keys])
            want = sum(w * value for w, value in zip(weights, values, strict=True))
            torch.testing.assert_close(got[0, head, i], want)
    native = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.7, enable_gqa=True)
    torch.testing.assert_close(got, native)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_mlp_oracle_by_formula(activation):
    def activate(t):
        return {
            "silu": t / (1 + math.exp(-t)),
            "gelu": t / 2 * (1 + math.erf(t / math.sqrt(2))),
            "gelu_tanh": t / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))),
            "relu": max(t, 0.0),
        }[activation]

    inputs = upcast(
        SPECS["fused_mlp"].make_inputs(
            build_case("fused_mlp", "m", x=(3, 4), w_gate=(5, 4), w_up=(5, 4), w_down=(2, 5)), SEED
        )
    )
    gate, up = inputs["x"] @ inputs["w_gate"].T, inputs["x"] @ inputs["w_up"].T
    hidden = torch.tensor([[activate(float(t)) for t in row] for row in gate], dtype=torch.float64) * up
    inputs["activation"] = activation
    torch.testing.assert_close(SPECS["fused_mlp"].oracle(**inputs), hidden @ inputs["w_down"].T)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_oracle_is_pytorchs(reduction):
    logits = torch.randn(6, 9, dtype=torch.float64)
    targets = torch.tensor([0, 8, 3, 5, 3, 1])
    got = SPECS["cross_entropy"].oracle(logits, targets, 3, reduction)
    torch.testing.assert_close(got, F.cross_entropy(logits, targets, ignore_index=3, reduction=reduction))
    nothing = SPECS["cross_entropy"].oracle(logits, torch.full_like(targets, -100), reduction=reduction)
    assert nothing.isnan().all() if reduction == "mean" else (nothing == 0).all()


def test_cross_entropy_refuses_another_reduction():
    with pytest.raises(ValueError, match="mean, sum or none"):
        SPECS["cross_entropy"].oracle(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), reduction="batchmean")


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_oracle_is_a_complex_product(interleaved):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    angles = torch.randn(5, 4, dtype=torch.float64)
    pairs = x.unflatten(-1, (4, 2)) if interleaved else x.unflatten(-1, (2, 4)).transpose(-1, -2)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    want = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(SPECS["rotary_embedding"].oracle(x, angles.cos(), angles.sin(), interleaved), want)


@pytest.mark.parametrize(("dim", "shape"), [(-1, (2, 3)), (0, (3, 4)), ((0, 2), (3,)), (None, ()), ([1], (2, 4))])
def test_reduce_oracle_by_loops(dim, shape):
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    gone = {0, 1, 2} if dim is None else {d % 3 for d in ([dim] if isinstance(dim, int) else dim)}
    groups = {}
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).tolist():
        groups.setdefault(tuple(j for i, j in enumerate(index) if i not in gone), []).append(float(x[tuple(index)]))
    kinds = {"sum": sum, "max": max, "mean": lambda values: sum(values) / len(values)}
    for op, kind in kinds.items():
        got = SPECS["reduce"].oracle(x, dim, op)
        assert got.shape == shape
        for index, values in groups.items():
            assert float(got[index]) == pytest.approx(kind(values))
    with pytest.raises(ValueError, match="sum, mean or max"):
        SPECS["reduce"].oracle(x, op="prod")


# Every case in every dtype


@pytest.mark.parametrize(("op", "dtype"), IN_EVERY_DTYPE)
def test_inputs_have_the_cases_shapes_dtypes_and_strides(op, dtype):
    spec = SPECS[op]
    for case in (*spec.cases, *spec.edges, spec.stress_case):
        typed = case.with_dtype(dtype)
        inputs = spec.make_inputs(typed, SEED)
        assert list(inputs) == list(spec.signature.parameters)
        for name, meta in typed.tensors.items():
            assert inputs[name].shape == meta.shape
            assert inputs[name].dtype == DTYPES[meta.dtype]
            assert meta.stride is None or inputs[name].stride() == meta.stride
            assert inputs[name].double().isfinite().all()
    for adversary in spec.adversarial.values():
        ordinary = spec.make_inputs(spec.stress_case.with_dtype(dtype), SEED)
        before = {name: value.clone() for name, value in ordinary.items() if isinstance(value, torch.Tensor)}
        hard = adversary(ordinary, torch.Generator().manual_seed(SEED))
        assert list(hard) == list(ordinary)
        assert all(torch.equal(ordinary[name], value) for name, value in before.items())
        assert any(not torch.equal(hard[name], before[name]) for name in before)
        for name, value in before.items():
            assert (hard[name].shape, hard[name].dtype, hard[name].stride()) == (
                value.shape,
                value.dtype,
                value.stride(),
            )


@pytest.mark.parametrize(("op", "dtype"), IN_EVERY_DTYPE)
def test_output_keeps_the_dtype_and_meta_tensors_tell_its_shape(op, dtype):
    spec = SPECS[op]
    for _, inputs, truth in every_call(op, dtype):
        on_meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
        predicted = spec.oracle(**on_meta)
        assert predicted.shape == truth.value.shape
        assert predicted.dtype == DTYPES[dtype]
        assert predicted.is_contiguous()


@pytest.mark.parametrize(("op", "dtype"), IN_EVERY_DTYPE)
def test_a_kernel_that_computes_in_fp32_passes_everywhere(op, dtype):
    spec = SPECS[op]
    for name, inputs, truth in every_call(op, dtype):
        output = spec.oracle(**upcast(inputs, torch.float32))
        assert judged(spec, output, truth, dtype) is None, name


@pytest.mark.parametrize(("op", "dtype"), IN_EVERY_DTYPE)
def test_baselines_compute_the_same_function(op, dtype):
    spec = SPECS[op]
    for name, inputs, truth in every_call(op, dtype):
        for baseline, fn in spec.baselines.items():
            output = fn(**inputs)
            assert output.dtype == DTYPES[dtype]
            assert output.shape == truth.value.shape
            tolerance, slack = spec.tolerances[dtype], LOOSE.get((op, baseline), 1)
            tolerance = dataclasses.replace(tolerance, atol=slack * tolerance.atol, rtol=slack * tolerance.rtol)
            own = dataclasses.replace(truth, native_error=(output.double() - truth.value).abs().nan_to_num(0, 0))
            assert mismatch(output, own, dtype, tolerance) is None, f"{name} {baseline}"


def test_seeds_change_the_values_and_repeat():
    for spec in SPECS.values():
        one, again, other = (spec.make_inputs(spec.cases[0], seed) for seed in (1, 1, 2))
        for name in spec.cases[0].tensors:
            assert torch.equal(one[name], again[name])
            assert not torch.equal(one[name], other[name])


# Wrong answers must be seen


def wrong_arguments(spec, inputs):
    """(what is wrong, arguments) of kernels that ignore or mistake one argument."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            yield f"{name} as zeros", {**inputs, name: torch.zeros_like(value)}
            if value.is_floating_point():
                yield f"{name} as ones", {**inputs, name: torch.ones_like(value)}
            if value.is_floating_point() and spec.op != "reduce":  # a sum has no order
                yield f"{name} reversed", {**inputs, name: value.flip(-1)}
    for name, others in WRONG_SCALARS.items():
        if name in inputs:
            for other in others(inputs):
                yield f"{name}={other}", {**inputs, name: other}
    if spec.op == "cross_entropy":
        counted = torch.where(inputs["targets"] == inputs["ignore_index"], 0, inputs["targets"])
        yield "ignored targets counted", {**inputs, "targets": counted, "ignore_index": -12345}


def other_scales(inputs):
    scale = inputs["scale"] or inputs["q"].shape[-1] ** -0.5
    return [1.5 * scale, scale / 1.5, *([None] if inputs["scale"] else [])]


WRONG_SCALARS = {
    "eps": lambda inputs: [10 * inputs["eps"], inputs["eps"] / 10, 0.0],
    "dim": lambda inputs: [dim for dim in range(inputs["x"].dim())],
    "causal": lambda inputs: [not inputs["causal"]],
    "scale": other_scales,
    # The two kinds of gelu differ by less than fp16 and bf16 can tell.
    "activation": lambda inputs: {"silu", "relu", "gelu"} - {inputs["activation"].removesuffix("_tanh")},
    "reduction": lambda inputs: {"mean", "sum", "none"} - {inputs["reduction"]},
    "interleaved": lambda inputs: [not inputs["interleaved"]],
    "op": lambda inputs: {"sum", "mean", "max"} - {inputs["op"]},
}


def same_call(spec, wrong, inputs):
    """Whether the changed arguments mean the same (a dim counted from the other end)."""
    return (
        spec.op in ("softmax", "reduce")
        and isinstance(inputs["dim"], int)
        and all(
            (wrong[n] % inputs["x"].dim() == inputs[n] % inputs["x"].dim()) if n == "dim" else wrong[n] is inputs[n]
            for n in inputs
        )
    )


@pytest.mark.parametrize(("op", "dtype"), IN_EVERY_DTYPE)
def test_wrong_answers_are_outside_the_tolerance(op, dtype):
    spec = SPECS[op]
    accepted = []
    for case_name, inputs, truth in every_call(op, dtype)[: len(spec.cases)]:
        value = truth.value
        wide = upcast(inputs)
        wrong = {"zeros": torch.zeros_like(value)}
        if value.numel() > 1:
            wrong["the mean"] = torch.full_like(value, value.mean())
        wrong |= {f"copy of {n}": v for n, v in wide.items() if isinstance(v, torch.Tensor) and v.shape == value.shape}
        for label, arguments in wrong_arguments(spec, wide):
            if not same_call(spec, arguments, wide):
                output = spec.oracle(**arguments)
                if output.shape == value.shape:
                    wrong[label] = output
        accepted += [
            f"{case_name}: {label}" for label, output in wrong.items() if not judged(spec, output, truth, dtype)
        ]
    assert accepted == []


def test_mean_loss_cannot_be_guessed():
    """The best constant, the median over other seeds, is mostly wrong even in the coarsest dtype."""
    spec = SPECS["cross_entropy"]
    for case in (case for case in spec.cases if case.scalars.get("reduction", "mean") == "mean"):
        losses = [spec.oracle(**spec.make_inputs(case, seed)).double() for seed in range(30)]
        guess = sorted(losses)[15]
        judgements = [judged(spec, guess, truth_with_value(loss), "bf16") for loss in losses]
        assert sum(judgement is None for judgement in judgements) <= 12, case.name


def truth_with_value(value):
    return Truth(value=value, native_error=2**-8 * value.abs())


# Work


def work(op, scalars=None, dtype="bf16", **shapes):
    case = build_case(op, "work", dtype, scalars=scalars, **shapes)
    return SPECS[op].flops(case), SPECS[op].bytes_moved(case)


def test_flops_and_bytes_of_hand_computed_calls():
    assert work("matmul", a=(4, 8), b=(8, 16)) == (2 * 4 * 8 * 16, 2 * (32 + 128 + 64))
    assert work("matmul", a=(3, 4, 8), b=(8, 16)) == (2 * 3 * 4 * 8 * 16, 2 * (96 + 128 + 192))
    assert work("softmax", x=(4, 8), dtype="fp32") == (5 * 32, 4 * 64)
    assert work("layernorm", x=(4, 8), weight=(8,), bias=(8,)) == (7 * 32, 2 * (64 + 16))
    assert work("rmsnorm", x=(4, 8), weight=(8,)) == (4 * 32, 2 * (64 + 8))
    assert work("fused_mlp", x=(2, 4), w_gate=(6, 4), w_up=(6, 4), w_down=(3, 6)) == (
        2 * 2 * 6 * (4 + 4 + 3),
        2 * (8 + 24 + 24 + 18 + 6),
    )
    assert work("rotary_embedding", x=(1, 2, 3, 4), cos=(3, 2), sin=(3, 2)) == (72, 2 * (24 + 6 + 6 + 24))
    assert work("reduce", {"dim": (0, -1)}, x=(4, 5, 8)) == (160, 2 * (160 + 5))
    assert work("reduce", {"dim": None}, x=(4, 5)) == (20, 2 * 21)
    assert work("reduce", x=(4, 5)) == (20, 2 * 24)


def test_causal_attention_counts_the_visible_half():
    shapes = {"q": (1, 2, 4, 8), "k": (1, 1, 4, 8), "v": (1, 1, 4, 8)}
    assert work("flash_attention", **shapes) == (4 * 2 * 8 * 10, 2 * (64 + 32 + 32 + 64))
    assert work("flash_attention", {"causal": False}, **shapes)[0] == 4 * 2 * 8 * 16
    longer = {"q": (1, 1, 2, 8), "k": (1, 1, 5, 8), "v": (1, 1, 5, 8)}
    assert work("flash_attention", **longer) == (4 * 8 * 3, 2 * (16 + 2 * 16 + 16))
    assert work("flash_attention", q=(1, 1, 5, 8), k=(1, 1, 2, 8), v=(1, 1, 2, 8))[0] == 4 * 8 * 9


def test_cross_entropy_reads_int64_targets():
    case = retype(build_case("cross_entropy", "w", "bf16", logits=(4, 10), targets=(4,)), targets="int64")
    counted = 10 * 3  # logits of the rows that are not ignored, as a kernel need not read the others
    assert SPECS["cross_entropy"].bytes_moved(case) == 2 * counted + 8 * 4 + 2
    none = dataclasses.replace(case, scalars={"reduction": "none"})
    assert SPECS["cross_entropy"].bytes_moved(none) == 2 * counted + 8 * 4 + 2 * 4
    assert SPECS["cross_entropy"].flops(case) == 112


# Spellings


def spelled_arguments(spelling, inputs, shapes):
    """Arguments of a spelling: the op's tensors, in the spelling's own form where it has one, and captured scalars."""
    tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor)}
    tensors |= {name: adapter.spell(inputs, shapes[name]) for name, adapter in spelling.adapters.items()}
    return tensors | {n: inputs[n] for n in spelling.captured}


@pytest.mark.parametrize(
    ("op", "spelling"),
    [(op, s) for op, spec in SPECS.items() for s in spec.spellings],
    ids=lambda v: getattr(v, "name", v),
)
def test_spelling_means_the_op(op, spelling):
    spec = SPECS[op]
    first = spec.cases[0]
    shapes = {name: meta.shape for name, meta in first.tensors.items()} | dict(spelling.shapes)
    tensors = {
        name: meta
        if name in spelling.adapters
        else dataclasses.replace(meta, shape=shapes[name], dtype=spelling.dtypes.get(name, meta.dtype))
        for name, meta in first.tensors.items()
    }
    inputs = {**spec.make_inputs(dataclasses.replace(first, tensors=tensors), SEED), **spelling.scalars}
    if "scale" in spelling.captured:
        inputs["scale"] = 0.3
    got = spelling.fn(**spelled_arguments(spelling, inputs, shapes))
    torch.testing.assert_close(got, spec.oracle(**inputs), rtol=1e-4, atol=1e-5)
