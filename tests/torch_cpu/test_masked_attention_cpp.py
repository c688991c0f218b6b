"""The C++ starter of masked_attention: every case of the spec, every form of a mask, hidden rows, and every knob."""

import functools
import inspect
import math

import pytest
import torch

from autokernel.judge.compare import mismatch
from autokernel.judge.trial import truth_of
from autokernel.kernelfile import parse_kernel, with_config
from autokernel.loading import get_spec
from autokernel.native import find_compiler
from autokernel.spec import DTYPES
from tests.torch_cpu.test_starters_compute import covering_configs, heads, load, starter

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]

OP = "masked_attention"
SPEC = get_spec(OP)
BOTH = ("fp32", "bf16")
INF, NAN = math.inf, math.nan
SEED = 20


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return load(starter(OP), tmp_path_factory.mktemp("starter"), OP)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


def assert_right(kernel, q, k, v, mask, scale=None):
    """By the judge's own comparison with the oracle in fp64; returns the output."""
    inputs = {"q": q, "k": k, "v": v, "mask": mask, "scale": scale}
    dtype = next(name for name in BOTH if DTYPES[name] == q.dtype)
    out, (truth, meta) = kernel(**inputs), truth_of(SPEC, inputs)
    assert (out.dtype, tuple(out.shape)) == (q.dtype, meta.shape)
    assert out.is_contiguous()
    assert mismatch(out, truth, dtype, SPEC.tolerances[dtype]) is None
    return out


def qkv(dtype, batch=2, count=4, kv_count=2, seq_q=70, seq_k=150, dim=40, *, transposed=False):
    sizes = ((count, seq_q), (kv_count, seq_k), (kv_count, seq_k))
    return [heads(batch, n, seq, dim, DTYPES[dtype], transposed=transposed) for n, seq in sizes]


def bools(*shape):
    """A third of the keys hidden."""
    return torch.rand(shape) > 1 / 3


def biases(*shape, dtype="fp32"):
    """A third of the keys hidden, half of these by -inf and half by the lowest value."""
    mask = torch.where(bools(*shape), torch.randn(shape), torch.finfo(DTYPES[dtype]).min)
    return mask.masked_fill(torch.rand(shape) < 1 / 6, -INF).to(DTYPES[dtype])


# The contract of the file, and the spec's own calls ----------------------------------------------------------------


def test_literals_and_signature_follow_the_contract(kernel):
    parsed = parse_kernel(starter(OP))
    assert (parsed.kernel_type, parsed.backend) == (OP, "cpp")
    assert set(parsed.config) == set(parsed.tunables)
    assert all(len(values) > 1 and parsed.config[knob] in values for knob, values in parsed.tunables.items())
    ours, oracle = inspect.signature(kernel).parameters.values(), SPEC.signature.parameters.values()
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in oracle]


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("case", [*SPEC.cases, *SPEC.edges], ids=lambda case: case.name)
def test_every_case_of_the_spec(case, dtype, kernel):
    assert_right(kernel, **SPEC.make_inputs(case.with_dtype(dtype), SEED))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", SPEC.adversarial)
def test_every_hard_input_of_the_spec(name, dtype, kernel):
    inputs = SPEC.make_inputs(SPEC.stress_case.with_dtype(dtype), SEED)
    assert_right(kernel, **SPEC.adversarial[name](inputs, torch.Generator().manual_seed(SEED)))


def small_calls(dtype):
    """Ragged sizes, larger than a block in every direction, with a mask of each kind."""
    for make in (bools, functools.partial(biases, dtype=dtype)):
        for shape in ((2, 1, 1, 150), (2, 4, 70, 150)):
            yield *qkv(dtype, transposed=True), make(*shape)
        yield *qkv(dtype, seq_q=1), make(2, 4, 1, 150)
    yield *qkv(dtype), biases(2, 150, 70, 4, dtype=dtype).permute(0, 3, 2, 1)


@pytest.mark.parametrize("config", covering_configs(OP))
def test_every_tunable_value_compiles_and_is_right(config, tmp_path):
    kernel = load(with_config(starter(OP), config), tmp_path, OP)
    for dtype in BOTH:
        for call in small_calls(dtype):
            assert_right(kernel, *call)


@pytest.mark.parametrize("dtype", BOTH)
def test_repeats_bit_for_bit_on_any_number_of_threads(dtype, kernel):
    for call in small_calls(dtype):
        before, first = [t.clone() for t in call], kernel(*call)
        try:
            torch.set_num_threads(3)
            second = kernel(*call)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()
        assert all(torch.equal(t, copy) for t, copy in zip(call, before, strict=True))


# Forms of a mask ---------------------------------------------------------------------------------------------------

FORMS = {
    "scalar": lambda make: make(1)[0],
    "per_key": lambda make: make(150),
    "matrix": lambda make: make(70, 150),
    "one_per_head": lambda make: make(4, 70, 150),
    "padding": lambda make: make(2, 1, 1, 150),
    "per_key_and_head": lambda make: make(1, 4, 1, 150),
    "per_query": lambda make: make(1, 1, 70, 1),
    "per_batch": lambda make: make(2, 1, 70, 150),
    "whole": lambda make: make(2, 4, 70, 150),
    "expanded_rows": lambda make: make(2, 4, 1, 150).expand(2, 4, 70, 150),
    "expanded_keys": lambda make: make(2, 4, 70, 1).expand(2, 4, 70, 150),
    "expanded_batch_and_heads": lambda make: make(1, 1, 70, 150).expand(2, 4, 70, 150),
    "every_second_key": lambda make: make(2, 1, 70, 300)[..., ::2],
    "every_second_key_of_padding": lambda make: make(2, 1, 1, 300)[..., ::2],
    "part_of_a_buffer": lambda make: make(2, 1, 100, 173)[:, :, 7:77, 11:161],
    "turned": lambda make: make(2, 1, 150, 70).transpose(-1, -2),
    "heads_last": lambda make: make(70, 150, 4).permute(2, 0, 1),
}


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("form", FORMS)
def test_masks_of_every_form(form, dtype, kernel):
    for make in (bools, functools.partial(biases, dtype=dtype)):
        mask = FORMS[form](make)
        assert_right(kernel, *qkv(dtype), mask)
        if mask.dim() < 3 or mask.shape[-3] == 1:  # heads that share nothing, a single head of keys
            assert_right(kernel, *qkv(dtype, 2, 3, 3), mask)
            assert_right(kernel, *qkv(dtype, 2, 3, 1), mask)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("seq_q", [1, 2, 3, 5, 20, 64, 65])
def test_few_queries_of_grouped_heads_find_their_rows(seq_q, dtype, kernel):
    for make in (bools, functools.partial(biases, dtype=dtype)):
        for shape in ((2, 8, seq_q, 77), (1, 8, 1, 77), (2, 1, seq_q, 77), (seq_q, 77), (2, 1, 1, 77), (8, seq_q, 1)):
            for kv_count in (1, 2, 8):
                assert_right(kernel, *qkv(dtype, 2, 8, kv_count, seq_q, 77, 64), make(*shape))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("seq_q", "seq_k", "dim"), [(257, 257, 33), (130, 200, 128), (100, 7, 17), (31, 64, 1)])
def test_windows_and_the_past_alone(seq_q, seq_k, dim, dtype, kernel):
    behind = torch.arange(seq_q)[:, None] - torch.arange(seq_k)
    for seen in (behind >= 0, (behind >= 0) & (behind < 20), behind.abs() < 70, behind <= 0):
        for hidden in (-INF, torch.finfo(DTYPES[dtype]).min):
            added = torch.zeros(seq_q, seq_k, dtype=DTYPES[dtype]).masked_fill(~seen, hidden)
            assert_right(kernel, *qkv(dtype, 1, 2, 1, seq_q, seq_k, dim), added)
        assert_right(kernel, *qkv(dtype, 1, 2, 1, seq_q, seq_k, dim), seen)


@pytest.mark.parametrize("scale", [0.5, 1.0, -0.3, 0.0])
def test_scale_leaves_the_mask_alone(scale, kernel):
    assert_right(kernel, *qkv("fp32"), biases(2, 4, 70, 150), scale)
    assert_right(kernel, *qkv("fp32"), bools(2, 1, 1, 150), scale)


@pytest.mark.parametrize("dtype", BOTH)
def test_a_strided_head_dimension(dtype, kernel):
    q, k, v = (heads(1, 2, 18, 50, DTYPES[dtype]).transpose(-1, -2) for _ in range(3))
    assert_right(kernel, q, k, v, bools(50, 50))


# What is hidden ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("seq_q", [2, 70])
def test_rows_that_see_nothing_get_zeros(seq_q, dtype, kernel):
    q, k, v = qkv(dtype, seq_q=seq_q)
    for make in (bools, functools.partial(biases, dtype=dtype)):
        mask = make(2, 4, seq_q, 150)
        hidden = False if mask.dtype is torch.bool else -INF
        mask[:, :, 1] = hidden
        out = assert_right(kernel, q, k, v, mask)
        assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
        for shape in ((2, 1, 1, 150), (2, 4, seq_q, 150)):
            nothing = torch.full(shape, hidden, dtype=mask.dtype)
            assert torch.equal(kernel(q, k, v, nothing), torch.zeros_like(q))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("rows", [1, 70])
def test_the_lowest_value_everywhere_leaves_the_mean(rows, dtype, kernel):
    q, k, v = qkv(dtype)
    lowest = torch.finfo(DTYPES[dtype]).min
    out = assert_right(kernel, q, k, v, torch.full((rows, 150), lowest, dtype=q.dtype))
    mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand(out.shape)
    torch.testing.assert_close(out.double(), mean, atol=1e-6 if dtype == "fp32" else 1e-2, rtol=1e-2)
    # One row of only the lowest value holds on to keys that mean nothing to the others.
    mask = torch.full((70, 150), lowest, dtype=q.dtype)
    mask[:33, :3], mask[34:, 140:] = 0.5, -0.25
    assert_right(kernel, q, k, v, mask)
    mask[33, :100] = -INF
    assert_right(kernel, q, k, v, mask)


def test_hidden_keys_may_hold_anything(kernel):
    q, k, v = qkv("fp32")
    whole = bools(2, 1, 70, 150)
    whole[..., 90:] = False
    for mask in (whole, whole[:, :, :1]):
        expected = kernel(q, k, v, mask)
        wild_k, wild_v = k.clone(), v.clone()
        for at, value in zip((90, 91, 92, 149), (INF, -INF, NAN, 3e38), strict=True):
            wild_k[:, :, at] = value
        wild_v[:, :, 92] = 3e38
        assert torch.equal(kernel(q, wild_k, wild_v, mask), expected)


def test_nan_and_infinite_scores_stay_in_their_rows(kernel):
    q, k, v = qkv("fp32")
    for make in (bools, biases):
        mask = make(70, 150)
        mask[:, 0] = True
        wild = q.clone()
        wild[0, 1, 5, 3] = NAN
        out, expected = kernel(wild, k, v, mask), kernel(q, k, v, mask)
        assert out[0, 1, 5].isnan().all()
        out[0, 1, 5] = expected[0, 1, 5]
        assert torch.equal(out, expected)
    mask[7, 140], mask[9] = NAN, -INF
    mask[9, 5] = NAN
    out = kernel(q, k, v, mask)
    assert out[:, :, [7, 9]].isnan().all()
    assert out.isnan().sum() == 2 * out[:, :, 7].numel()


@pytest.mark.parametrize("hidden", [-INF, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("key", [70, 149])
def test_a_nan_among_hidden_keys_is_not_skipped(key, hidden, kernel):
    q, k, v = qkv("fp32")
    mask = torch.full((70, 150), hidden)
    mask[:, 0], mask[:, key] = 0.0, NAN
    assert kernel(q, k, v, mask).isnan().all()
    assert kernel(q, k, v, mask[:1]).isnan().all()


@pytest.mark.parametrize("dtype", BOTH)
def test_large_scores_do_not_overflow(dtype, kernel):
    q, k, v = qkv(dtype)
    assert_right(kernel, q * 64, k, v, bools(70, 150))
    assert_right(kernel, q, k, v, (torch.randn(70, 150) * 1e4).to(q.dtype))


# Sizes and refusals ------------------------------------------------------------------------------------------------


def test_empty_sizes(kernel):
    q, none = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 0, 8)
    torch.empty(1, 2, 5, 8).fill_(7)  # so that memory handed out again is not zero by chance
    for mask in (torch.ones(5, 0, dtype=torch.bool), torch.zeros(1, 2, 5, 0), torch.zeros(())):
        assert torch.equal(kernel(q, none, none, mask), torch.zeros(1, 2, 5, 8))
    assert kernel(none, q, q, torch.ones(0, 5, dtype=torch.bool)).shape == (1, 2, 0, 8)
    assert kernel(q[:0], q[:0], q[:0], torch.zeros(0, 1, 5, 5)).shape == (0, 2, 5, 8)
    flat = kernel(q[..., :0], q[..., :0], q, torch.zeros(5))  # no head dimension: all scores are zero
    torch.testing.assert_close(flat, q.mean(2, keepdim=True).expand(q.shape))


def test_dtypes_that_do_not_belong_raise_type_error(kernel):
    q = torch.randn(1, 2, 5, 8)
    seen = torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(TypeError, match="float64"):
        kernel(q.double(), q.double(), q.double(), seen)
    with pytest.raises(TypeError, match="float16"):
        kernel(q.half(), q.half(), q.half(), seen)
    with pytest.raises(TypeError, match="bfloat16"):
        kernel(q, q.bfloat16(), q, seen)
    for mask, name in ((seen.bfloat16(), "bfloat16"), (seen.double(), "float64"), (seen.byte(), "uint8")):
        with pytest.raises(TypeError, match=f"mask.*{name}"):
            kernel(q, q, q, mask)
    with pytest.raises(TypeError, match=r"mask.*got torch\.float32"):
        kernel(q.bfloat16(), q.bfloat16(), q.bfloat16(), seen.float())


@pytest.mark.parametrize(
    ("q", "k", "v", "mask", "message"),
    [
        ((1, 3, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8), (5, 5), "do not belong together"),
        ((1, 2, 5, 8), (1, 2, 5, 7), (1, 2, 5, 8), (5, 5), r"\(1, 2, 5, 7\).* do not belong together"),
        ((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 5, 8), (5, 5), "do not belong together"),
        ((2, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8), (5, 5), "do not belong together"),
        ((1, 2, 5, 8), (1, 0, 5, 8), (1, 0, 5, 8), (5, 5), "do not belong together"),
        ((2, 5, 8), (2, 5, 8), (2, 5, 8), (5, 5), r"\[batch, heads, seq, dim\], got \(2, 5, 8\)"),
        ((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), (5, 5), r"mask \(5, 5\) does not expand to \(1, 2, 5, 6\)"),
        ((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), (2, 1, 5, 6), r"mask \(2, 1, 5, 6\) does not expand"),
        ((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), (1, 1, 1, 5, 6), "does not expand"),
    ],
)
def test_shapes_that_do_not_belong_together_raise_value_error(q, k, v, mask, message, kernel):
    with pytest.raises(ValueError, match=message):
        kernel(torch.randn(q), torch.randn(k), torch.randn(v), torch.ones(mask, dtype=torch.bool))


def test_tensors_elsewhere_raise_value_error(kernel):
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"runs on the CPU.*meta"):
        kernel(q, q, q, torch.ones(5, 5, dtype=torch.bool, device="meta"))
