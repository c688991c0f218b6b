"""The C++ starters of the memory-bound ops are right on every case of their spec, on hard values and at every knob."""

import functools
import inspect
import itertools
import math
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autokernel.judge.compare import Truth, mismatch, native_error
from autokernel.kernelfile import parse_kernel, with_config
from autokernel.loading import get_spec, load_file, starter_path
from autokernel.native import find_compiler
from autokernel.spec import DTYPES, upcast

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

OPS = ("rmsnorm", "layernorm", "softmax", "cross_entropy", "rotary_embedding", "reduce")
BOTH = ("fp32", "bf16")
INF, NAN = math.inf, math.nan


def starter_text(op):
    path = starter_path(op, "cpp")
    assert path is not None
    return path.read_text()


@functools.cache
def starter(op, **knobs):
    """`kernel_fn` of the starter with some knobs turned."""
    text = starter_text(op)
    text = with_config(text, {**parse_kernel(text).config, **knobs})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(text)
        name = "_".join([op, *(f"{knob}_{value}" for knob, value in knobs.items())])
        return load_file(path, f"starter_{name}").kernel_fn


def big_case(op):
    """A case above the size from which the starters use threads."""
    shapes = {
        "rmsnorm": {"x": (300, 517), "weight": (517,)},
        "layernorm": {"x": (300, 517), "weight": (517,), "bias": (517,)},
        "softmax": {"x": (300, 517)},
        "cross_entropy": {"logits": (300, 517), "targets": (300,)},
        "rotary_embedding": {"x": (3, 4, 100, 66), "cos": (100, 33), "sin": (100, 33)},
        "reduce": {"x": (600000,)},
    }[op]
    case = get_spec(op).stress_case
    return replace(case, tensors={n: replace(case.tensors[n], shape=shape) for n, shape in shapes.items()})


def case_named(op, name):
    spec = get_spec(op)
    if name == "threaded":
        return big_case(op)
    return next(case for case in (spec.stress_case, *spec.cases, *spec.edges) if case.name == name)


@functools.cache
def truth_of(op, case, dtype):
    """Inputs of a case, and what they should give."""
    spec = get_spec(op)
    inputs = spec.make_inputs(case_named(op, case).with_dtype(dtype), 7)
    return inputs, truth(spec, inputs)


def truth(spec, inputs):
    want = spec.oracle(**upcast(inputs))
    native = list(spec.baselines.values())[-1](**inputs)
    return Truth(value=want, native_error=native_error(native, want))


def fault(kernel, spec, inputs, dtype, expected=None):
    """None when the kernel's output is right, fresh and laid out as the oracle's; else what is wrong."""
    kept = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    output = kernel(**inputs)
    expected = expected or truth(spec, inputs)
    want = expected.value
    for name, value in kept.items():
        if not torch.equal(inputs[name].nan_to_num(), value.nan_to_num()):
            return f"writes to {name}"
    if (output.shape, output.dtype, output.stride()) != (want.shape, DTYPES[dtype], want.contiguous().stride()):
        return f"{output.dtype} {tuple(output.shape)} {output.stride()}, not {tuple(want.shape)} {want.stride()}"
    return mismatch(output, expected, dtype, spec.tolerances[dtype])


def faults(kernel, op, names, dtype):
    found = {name: fault(kernel, get_spec(op), *_of(op, name, dtype)) for name in names}
    return {name: reason for name, reason in found.items() if reason}


def _of(op, name, dtype):
    inputs, expected = truth_of(op, name, dtype)
    return inputs, dtype, expected


def close(actual, expected, dtype):
    """Equal but for the rounding of `dtype`; NaN and infinity by position."""
    tolerance = {"fp32": 2e-6, "bf16": 8e-3}[dtype]
    return torch.allclose(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def random(*shape, dtype="fp32", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


@pytest.mark.parametrize("op", OPS)
def test_literals_and_signature_follow_the_contract(op):
    file = parse_kernel(starter_text(op))
    assert (file.kernel_type, file.backend) == (op, "cpp")
    assert set(file.config) == set(file.tunables)
    assert all(len(values) > 1 for values in file.tunables.values())
    ours = inspect.signature(starter(op)).parameters.values()
    oracles = get_spec(op).signature.parameters.values()
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in oracles]


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("op", OPS)
def test_starter_is_right_on_every_case(op, dtype):
    spec = get_spec(op)
    assert faults(starter(op), op, [case.name for case in (*spec.cases, *spec.edges)], dtype) == {}


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("op", OPS)
def test_starter_is_right_on_adversarial_inputs(op, dtype):
    spec = get_spec(op)
    found = {}
    for name, adversary in spec.adversarial.items():
        inputs = spec.make_inputs(spec.stress_case.with_dtype(dtype), 11)
        found[name] = fault(starter(op), spec, adversary(inputs, torch.Generator().manual_seed(5)), dtype)
    assert {name: reason for name, reason in found.items() if reason} == {}


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_knob_value_compiles_and_is_right(op):
    file, spec = parse_kernel(starter_text(op)), get_spec(op)
    turns = [{k: v} for k, values in file.tunables.items() for v in values if v != file.config[k]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler runs in processes of its own
        kernels = list(pool.map(lambda turn: starter(op, **turn), turns))
    names = ["threaded", "stress", *(case.name for case in (*spec.cases[-2:], *spec.edges))]
    wrong = {
        (str(turn), dtype): found
        for turn, kernel in zip(turns, kernels, strict=True)
        for dtype in BOTH
        if (found := faults(kernel, op, names, dtype))
    }
    assert wrong == {}


ALTERNATIVES = {
    "rmsnorm": {"CACHE_ROW": 1, "STREAM": 1},
    "layernorm": {"METHOD": "welford"},
    "softmax": {"METHOD": "online", "BLOCK": 128},
    "cross_entropy": {"BLOCK": 256},
    "rotary_embedding": {"ORDER": "heads_inner", "FIXED": 1},
    "reduce": {"UNROLL": 4, "SPLIT": 32768, "DEPTH": 64},
}


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("op", OPS)
def test_results_repeat_bit_for_bit_with_any_number_of_threads(op, dtype):
    inputs = get_spec(op).make_inputs(big_case(op).with_dtype(dtype), 3)
    threads = torch.get_num_threads()
    for kernel in (starter(op), starter(op, **ALTERNATIVES[op])):
        results = []
        try:
            for count in (1, 2, 3, 2):
                torch.set_num_threads(count)
                results.append(kernel(**inputs))
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(results[0], other) for other in results[1:])
        assert fault(kernel, get_spec(op), inputs, dtype) is None


@pytest.mark.parametrize("op", OPS)
def test_each_call_returns_memory_of_its_own(op):
    spec = get_spec(op)
    inputs = spec.make_inputs(spec.stress_case, 1)
    first = starter(op)(**inputs)
    kept = first.clone()
    second = starter(op)(**spec.make_inputs(spec.stress_case, 2))
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_another_dtype_is_named_in_a_type_error(op, dtype):
    spec = get_spec(op)
    inputs = spec.make_inputs(spec.stress_case, 1)
    bad = {n: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in inputs.items()}
    with pytest.raises(TypeError, match=f"{op} takes fp32 or bf16.*{str(dtype).removeprefix('torch.')}"):
        starter(op)(**bad)


@pytest.mark.parametrize("op", OPS)
def test_a_call_on_a_tiny_tensor_costs_microseconds(op):
    spec = get_spec(op)
    kernel, inputs = starter(op), spec.make_inputs(spec.cases[0], 1)

    def batch():
        start = time.perf_counter()
        for _ in range(20):
            kernel(**inputs)
        return (time.perf_counter() - start) / 20

    # About 10 us on an idle machine; the best of many batches, and a wide limit, as others use the machine too.
    assert min(batch() for _ in range(50)) < 60e-6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_starters_share_the_openmp_runtime_of_torch():
    starter("rmsnorm")(random(64, 1024), None)
    with Path("/proc/self/maps").open() as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}
    assert len(runtimes) <= 1


# rmsnorm and layernorm --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_norm_refuses_a_weight_that_does_not_fit(op):
    bias = {"bias": None} if op == "layernorm" else {}
    with pytest.raises(ValueError, match="weight has shape"):
        starter(op)(random(3, 8), random(7), **bias)
    with pytest.raises(TypeError, match="bfloat16"):
        starter(op)(random(3, 8), random(8, dtype="bf16"), **bias)


@pytest.mark.parametrize("dtype", BOTH)
def test_norms_without_parameters_over_two_dimensions_and_of_nothing(dtype):
    x = random(5, 6, 7, dtype=dtype)
    rms, layer = get_spec("rmsnorm").oracle, get_spec("layernorm").oracle
    assert close(starter("rmsnorm")(x, None, 1e-3), rms(x.double(), None, 1e-3), dtype)
    assert close(starter("layernorm")(x, None, None), layer(x.double(), None, None), dtype)
    assert close(starter("layernorm")(x, x[0], None), layer(x.double(), x[0].double(), None), dtype)
    assert close(starter("rmsnorm")(x, x[1]), rms(x.double(), x[1].double()), dtype)
    empty = random(3, 0, dtype=dtype)
    assert starter("rmsnorm")(empty, empty[0]).shape == (3, 0)
    assert starter("layernorm")(empty, empty[0], empty[0]).shape == (3, 0)


@pytest.mark.parametrize("knobs", [{}, {"METHOD": "welford"}, {"CACHE_ROW": 1}])
def test_layernorm_of_equal_values_is_the_bias_however_large_they_are(knobs):
    x, bias = torch.full((3, 1000), 12345.0), random(1000)
    assert torch.equal(starter("layernorm", **knobs)(x, torch.ones(1000), bias), bias.expand(3, 1000))


def test_layernorm_keeps_a_small_spread_on_a_large_mean():
    x = random(4, 777) * 3 + 1e4
    want = get_spec("layernorm").oracle(x.double(), None, None)
    assert (starter("layernorm")(x, None, None) - want).abs().max() < 1e-5


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", BOTH)
def test_norms_of_rows_that_are_not_finite_are_those_of_pytorch(value, dtype):
    x = random(4, 300, dtype=dtype)
    x[1, 5], x[2, 299] = value, value
    one = torch.ones(300, dtype=x.dtype)
    norm = torch.nn.functional.layer_norm(x.double(), (300,), one.double(), one.double())
    assert close(starter("layernorm")(x, one, one), norm, dtype)
    assert close(
        starter("rmsnorm")(x, one), torch.nn.functional.rms_norm(x.double(), (300,), one.double(), 1e-6), dtype
    )


# softmax ----------------------------------------------------------------------------------------------------------

METHODS = [{}, {"METHOD": "recompute"}, {"METHOD": "online", "BLOCK": 128}]


@pytest.mark.parametrize("knobs", METHODS)
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("shape", "dim"), [((6, 300), -1), ((6, 300), 0), ((6, 5), 1), ((6, 7, 9), -2)])
def test_softmax_of_infinities_and_nan_is_that_of_pytorch(shape, dim, dtype, knobs):
    x = random(*shape, dtype=dtype)
    x[0], x[1, 3], x[2, 1], x[3, 2] = -INF, -INF, NAN, INF
    x[4] = -INF
    x[4, -1] = 3.0
    for values in (x, torch.full_like(x, -INF), torch.full_like(x, INF)):
        assert close(starter("softmax", **knobs)(values, dim), values.double().softmax(dim), dtype)


@pytest.mark.parametrize("knobs", METHODS)
def test_softmax_keeps_subnormal_probabilities(knobs):
    x = torch.tensor([[0.0, -88.0, -100.0, -103.5, -200.0]])
    want = x.double().softmax(-1)
    error = (starter("softmax", **knobs)(x) - want).abs()
    assert bool((error <= 2e-7 * want + 2.0**-149).all())


def test_softmax_of_scalar_empty_and_wrong_dimension():
    assert starter("softmax")(torch.tensor(5.0)).item() == 1.0
    assert starter("softmax")(random(0, 4), 0).shape == (0, 4)
    assert starter("softmax")(random(4, 0), 1).shape == (4, 0)
    with pytest.raises(IndexError, match="dimension 2"):
        starter("softmax")(random(3, 4), 2)


# cross_entropy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{}, {"BLOCK": 256}])
@pytest.mark.parametrize("dtype", BOTH)
def test_cross_entropy_of_infinities_and_nan_is_that_of_pytorch(dtype, knobs):
    logits = random(6, 600, dtype=dtype)
    logits[0], logits[1, :590], logits[2, 5], logits[3, 3], logits[4, 7] = -INF, -INF, INF, NAN, INF
    targets = torch.tensor([3, 2, 4, 1, 7, 599])
    want = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    assert close(starter("cross_entropy", **knobs)(logits, targets, reduction="none"), want, dtype)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(9,), (3, 17, 5), (2, 4, 3, 3), (0, 5), (3, 1)])
def test_cross_entropy_takes_every_rank_that_pytorch_does(shape, reduction):
    logits = random(*shape) * 4
    targets = torch.zeros(shape[:1] + shape[2:] if len(shape) > 1 else (), dtype=torch.int64)
    want = torch.nn.functional.cross_entropy(logits.double(), targets, reduction=reduction)
    got = starter("cross_entropy")(logits, targets, reduction=reduction)
    assert got.shape == want.shape
    assert close(got, want, "fp32")


@pytest.mark.parametrize("target", [5, -1, -101, 2**40, -(2**40)])
def test_cross_entropy_refuses_a_target_that_is_no_class(target):
    with pytest.raises(IndexError, match=r"neither in \[0, 5\) nor -100"):
        starter("cross_entropy")(random(3, 5), torch.tensor([0, target, -100]))


def test_cross_entropy_refuses_what_it_cannot_read():
    logits, targets = random(3, 5), torch.tensor([0, 1, 2])
    with pytest.raises(TypeError, match="int64"):
        starter("cross_entropy")(logits, targets.int())
    with pytest.raises(ValueError, match="do not fit"):
        starter("cross_entropy")(logits, targets[:2])
    with pytest.raises(ValueError, match="reduction is 'max'"):
        starter("cross_entropy")(logits, targets, reduction="max")


# rotary_embedding -------------------------------------------------------------------------------------------------

LAYOUTS = {
    "rows": lambda: random(7, 12),
    "heads": lambda: random(3, 7, 12),
    "transposed": lambda: random(2, 7, 3, 12).transpose(1, 2),
    "of_a_joint_projection": lambda: random(2, 7, 9, 12)[:, :, 3:6].transpose(1, 2),
    "every_other_column": lambda: random(2, 3, 7, 24)[..., ::2],
    "broadcast_batch": lambda: random(1, 3, 7, 12).expand(4, 3, 7, 12),
    "rank_5": lambda: random(2, 2, 3, 7, 12),
    "rank_5_transposed": lambda: random(2, 7, 2, 3, 12).permute(0, 2, 3, 1, 4),
    "odd_offset": lambda: random(2 * 3 * 7 * 12 + 1)[1:].view(2, 3, 7, 12),
}


@pytest.mark.parametrize("knobs", [{}, {"ORDER": "heads_inner", "FIXED": 1}, {"STREAM": 1}])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_reads_any_layout(layout, interleaved, knobs):
    x, angles = LAYOUTS[layout](), random(7, 6)
    got = starter("rotary_embedding", **knobs)(x, angles.cos(), angles.sin(), interleaved)
    want = get_spec("rotary_embedding").oracle(x.double(), angles.cos().double(), angles.sin().double(), interleaved)
    assert got.is_contiguous()
    assert close(got, want, "fp32")


def test_rotary_refuses_angles_that_do_not_fit():
    angles = random(7, 6)
    for x in (random(2, 3, 7, 10), random(2, 3, 6, 12), random(2, 3, 7, 13)):
        with pytest.raises(ValueError, match="expected"):
            starter("rotary_embedding")(x, angles, angles)
    with pytest.raises(ValueError, match="expected"):
        starter("rotary_embedding")(random(12), angles, angles)


# reduce -----------------------------------------------------------------------------------------------------------

TORCH = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}
SHAPES = [(), (7,), (33, 1000), (2000, 3), (300, 130), (300000,), (2, 70000), (3, 4, 5, 6), (0, 3), (4, 0), (2, 0, 3)]
DIMS = {0: [0, -1, None], 1: [0, None, ()], 2: [0, 1, (0, 1), (-1,)], 3: [1, 2], 4: [(0, 2), (1, 2), (-1, 0), 3, None]}


@pytest.mark.parametrize("knobs", [{}, {"SPLIT": 32768, "DEPTH": 64, "UNROLL": 4}])
@pytest.mark.parametrize("op", TORCH)
@pytest.mark.parametrize("dtype", BOTH)
def test_reduce_over_any_dimensions(dtype, op, knobs):
    for shape in SHAPES:
        for dim in DIMS[len(shape)]:
            x = random(*shape, dtype=dtype) + 1
            dims = tuple(range(len(shape))) if dim is None else dim
            try:
                want = TORCH[op](x.double(), dims)
            except IndexError:
                with pytest.raises(IndexError):
                    starter("reduce", **knobs)(x, dim, op)
                continue
            got = starter("reduce", **knobs)(x, dim, op)
            assert got.shape == want.shape
            assert close(got, want, dtype), (shape, dim)


@pytest.mark.parametrize(("op", "dim", "dtype"), list(itertools.product(TORCH, (0, 1, None), BOTH)))
def test_reduce_of_infinities_and_nan_is_that_of_pytorch(op, dim, dtype):
    for at in itertools.product((0, 16, 39), (0, 40, 76)):
        for value in (NAN, INF, -INF):
            x = random(40, 77, dtype=dtype)
            x[at] = value
            want = TORCH[op](x.double(), (0, 1) if dim is None else dim)
            got = starter("reduce")(x, dim, op).double()
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.isinf() * got.sign().nan_to_num(), want.isinf() * want.sign().nan_to_num())


def test_reduce_adds_millions_of_equal_values_without_drift():
    x = torch.full((1, 3_000_000), 0.1)  # one fp32 accumulator is off by 3 % here, sixteen by 0.2 %
    assert starter("reduce")(x).item() == pytest.approx(x.double().sum().item(), rel=2e-6)
    assert starter("reduce")(x.t(), 0).item() == pytest.approx(x.double().sum().item(), rel=2e-6)
    columns = x.reshape(-1, 3).contiguous()
    assert close(starter("reduce")(columns, 0) / 1e5, columns.double().sum(0) / 1e5, "fp32")


def test_reduce_refuses_unknown_ops_and_dimensions():
    with pytest.raises(ValueError, match="op is 'prod'"):
        starter("reduce")(random(3, 4), -1, "prod")
    with pytest.raises(ValueError, match="twice"):
        starter("reduce")(random(3, 4), (1, -1))
    with pytest.raises(IndexError, match="rank 2"):
        starter("reduce")(random(3, 4), 2)
