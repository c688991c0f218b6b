"""The C++ starters of the compute-bound ops against fp64, in their own configuration and in every listed variant."""

import inspect
from pathlib import Path

import pytest
import torch

from autokernel.kernelfile import parse_kernel, with_config
from autokernel.loading import get_spec, load_file, starter_path
from autokernel.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

OPS = ("matmul", "flash_attention", "fused_mlp")
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DTYPES = list(LIMITS)
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]


def starter(op: str) -> str:
    path = starter_path(op, "cpp")
    assert path is not None
    return path.read_text()


def load(text: str, folder: Path, name: str):
    path = folder / f"{name}.py"
    path.write_text(text)
    return load_file(path, f"starter_under_test_{name}").kernel_fn


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starters")
    return {op: load(starter(op), folder, op) for op in OPS}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


def assert_close(out: torch.Tensor, truth: torch.Tensor) -> None:
    """Within the dtype's limit of the fp64 truth, absolute (scaled to the output's magnitude) plus relative."""
    assert out.shape == truth.shape
    assert out.is_contiguous()
    if truth.numel() == 0:
        return
    limit = LIMITS[out.dtype]
    scale = truth.abs().mean().clamp(max=1.0)
    error = (out.double() - truth).abs()
    worst = (error / (limit * (scale + truth.abs()))).max().item()
    assert worst <= 1, f"{worst:.3g} times the limit"


def truth_of(op: str, *inputs, **scalars) -> torch.Tensor:
    """The oracle's answer in fp64."""
    return get_spec(op).oracle(*(t.double() for t in inputs), **scalars)


def heads(batch, count, seq, dim, dtype, *, transposed=False):
    if transposed:  # as a projection gives them: [batch, seq, heads, dim] seen from the heads
        return torch.randn(batch, seq, count, dim).to(dtype).transpose(1, 2)
    return torch.randn(batch, count, seq, dim).to(dtype)


def mlp_inputs(shape, hidden, out, dtype, *, transposed=False):
    sizes = ((hidden, shape[-1]), (hidden, shape[-1]), (out, hidden))
    weights = []
    for size in sizes:
        weight = torch.randn(size) / max(size[1], 1) ** 0.5
        weights.append((weight.t().contiguous().t() if transposed else weight).to(dtype))
    return (torch.randn(shape).to(dtype), *weights)


# The contract of the file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_literals_and_signature_follow_the_contract(op, kernels):
    kernel = parse_kernel(starter(op))
    assert (kernel.kernel_type, kernel.backend) == (op, "cpp")
    assert set(kernel.config) == set(kernel.tunables)
    assert all(len(values) > 1 for values in kernel.tunables.values())
    ours = inspect.signature(kernels[op]).parameters.values()
    oracle = get_spec(op).signature.parameters.values()
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in oracle]


def small_inputs(op, dtype):
    """Ragged, and larger than one register tile and one block in every direction; truth beside them."""
    if op == "matmul":
        a, b = torch.randn(2, 67, 301).to(dtype), torch.randn(75, 301).to(dtype).t()
        return (a, b), truth_of("matmul", a, b)
    if op == "flash_attention":
        q, k, v = (heads(1, n, 70, 36, dtype, transposed=True) for n in (4, 2, 2))
        return (q, k, v), truth_of("flash_attention", q, k, v)
    inputs = mlp_inputs((3, 47, 70), 83, 37, dtype)
    return inputs, truth_of("fused_mlp", *inputs)


def covering_configs(op):
    """Configurations in which every value of every knob occurs; the knobs are turned together to save builds."""
    kernel = parse_kernel(starter(op))
    count = max(len(values) for values in kernel.tunables.values())
    return [{knob: values[i % len(values)] for knob, values in kernel.tunables.items()} for i in range(count)]


@pytest.mark.parametrize(("op", "config"), [(op, config) for op in OPS for config in covering_configs(op)])
def test_every_tunable_value_compiles_and_is_right(op, config, tmp_path):
    kernel = load(with_config(starter(op), config), tmp_path, op)
    for dtype in DTYPES:
        inputs, truth = small_inputs(op, dtype)
        assert_close(kernel(*inputs), truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_repeats_bit_for_bit_into_fresh_outputs(op, dtype, kernels):
    inputs, _ = small_inputs(op, dtype)
    before = [t.clone() for t in inputs]
    first, second = kernels[op](*inputs), kernels[op](*inputs)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    assert all(torch.equal(t, copy) for t, copy in zip(inputs, before, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_result_does_not_depend_on_the_number_of_threads(op, kernels):
    inputs, _ = small_inputs(op, torch.float32)
    together = kernels[op](*inputs)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(kernels[op](*inputs), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("op", OPS)
def test_other_dtypes_raise_type_error(op, kernels):
    inputs, _ = small_inputs(op, torch.float32)
    with pytest.raises(TypeError, match="float64"):
        kernels[op](*(t.double() for t in inputs))
    with pytest.raises(TypeError, match="bfloat16"):
        kernels[op](inputs[0], *(t.bfloat16() for t in inputs[1:]))


# matmul -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(64, 64, 64), (1, 512, 300), (3, 5, 7), (17, 1023, 33), (100, 1537, 65), (30, 4097, 129), (300, 7, 2), (9, 1, 1)],
)
def test_matmul_takes_any_strides_and_ragged_sizes(rows, inner, columns, dtype, kernels):
    def make(*shape):
        return torch.randn(shape).to(dtype)

    for a in (make(rows, inner), make(inner, rows).t(), make(rows, 2 * inner)[:, ::2]):
        for b in (make(inner, columns), make(columns, inner).t()):
            assert_close(kernels["matmul"](a, b), truth_of("matmul", a, b))


def test_matmul_more_rows_than_one_chunk(kernels):
    a, b = torch.randn(2100, 40), torch.randn(40, 33)
    assert_close(kernels["matmul"](a, b), truth_of("matmul", a, b))
    assert_close(kernels["matmul"](b.t(), a.t()), truth_of("matmul", b.t(), a.t()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 33, 20), (20, 50)),
        ((5, 1, 33, 20), (7, 20, 50)),
        ((6, 12, 17, 20), (6, 12, 20, 9)),
        ((2, 1, 20), (20, 30)),
        ((20,), (20, 9)),
        ((4, 9, 20), (20,)),
        ((20,), (20,)),
    ],
)
def test_matmul_broadcasts_batches_as_torch(a, b, dtype, kernels):
    a, b = torch.randn(a).to(dtype), torch.randn(b).to(dtype)
    assert_close(kernels["matmul"](a, b), truth_of("matmul", a, b))


def test_matmul_expanded_and_permuted_batches(kernels):
    a = torch.randn(3, 1, 21, 30).expand(3, 4, 21, 30)
    b = torch.randn(30, 4, 3, 18).permute(2, 1, 0, 3)
    assert_close(kernels["matmul"](a, b), truth_of("matmul", a, b))


@pytest.mark.parametrize(("rows", "inner", "columns"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_matmul_of_empty_sizes(rows, inner, columns, kernels):
    torch.empty(rows, columns).fill_(7)  # so that memory handed out again is not zero by chance
    out = kernels["matmul"](torch.randn(2, rows, inner), torch.randn(2, inner, columns))
    assert torch.equal(out, torch.zeros(2, rows, columns))


def test_matmul_refuses_inner_sizes_that_differ(kernels):
    with pytest.raises(ValueError, match="inner sizes differ"):
        kernels["matmul"](torch.randn(3, 4), torch.randn(5, 6))


def test_matmul_keeps_nan_and_infinity_in_their_rows(kernels):
    a, b = torch.randn(20, 30), torch.rand(30, 40) + 0.1
    a[3, 4], a[5, 6] = float("nan"), float("inf")
    out = kernels["matmul"](a, b)
    assert out[3].isnan().all()
    assert (out[5] == float("inf")).all()
    assert out.isfinite().sum() == 18 * 40


# flash_attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("batch", "count", "kv_count", "seq_q", "seq_k", "dim"),
    [
        (1, 8, 8, 64, 64, 64),
        (2, 8, 2, 33, 70, 64),
        (1, 4, 1, 1, 77, 64),
        (2, 2, 2, 130, 200, 40),
        (1, 2, 2, 100, 7, 17),
        (1, 3, 3, 257, 257, 128),
        (1, 1, 1, 1, 1, 1),
    ],
)
def test_attention_shapes(batch, count, kv_count, seq_q, seq_k, dim, causal, dtype, kernels):
    for transposed in (False, True):
        q = heads(batch, count, seq_q, dim, dtype, transposed=transposed)
        k, v = (heads(batch, kv_count, seq_k, dim, dtype, transposed=transposed) for _ in range(2))
        assert_close(kernels["flash_attention"](q, k, v, causal), truth_of("flash_attention", q, k, v, causal=causal))


@pytest.mark.parametrize("scale", [0.5, 1.0, -0.3, 0.0])
def test_attention_scale(scale, kernels):
    q, k, v = (heads(1, 2, 40, 24, torch.float32) for _ in range(3))
    assert_close(kernels["flash_attention"](q, k, v, scale=scale), truth_of("flash_attention", q, k, v, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_reads_a_strided_head_dimension(dtype, kernels):
    q, k, v = (heads(1, 2, 18, 50, dtype).transpose(-1, -2) for _ in range(3))
    assert_close(kernels["flash_attention"](q, k, v, False), truth_of("flash_attention", q, k, v, causal=False))


def test_attention_large_scores_do_not_overflow(kernels):
    q, k, v = (heads(1, 2, 70, 32, torch.float32) for _ in range(3))
    out = kernels["flash_attention"](q * 100, k, v, False)
    assert_close(out, truth_of("flash_attention", q * 100, k, v, causal=False))


def test_attention_masked_infinity_stays_unseen(kernels):
    q, k, v = (heads(1, 1, 90, 32, torch.float32) for _ in range(3))
    expected = kernels["flash_attention"](q, k, v)[:, :, :60]
    k[:, :, 60:], v[:, :, 60:] = float("inf"), 3e38
    assert torch.equal(kernels["flash_attention"](q, k, v)[:, :, :60], expected)


def test_attention_empty_sizes(kernels):
    q, none = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 0, 8)
    assert torch.equal(kernels["flash_attention"](q, none, none), torch.zeros(1, 2, 5, 8))
    assert kernels["flash_attention"](none, q, q).shape == (1, 2, 0, 8)


def test_attention_refuses_heads_that_do_not_divide(kernels):
    with pytest.raises(ValueError, match="do not belong together"):
        kernels["flash_attention"](torch.randn(1, 3, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))


# fused_mlp --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("shape", "hidden", "out"),
    [
        ((64, 64), 172, 64),
        ((3, 7, 33), 29, 5),
        ((2, 1, 16), 48, 16),
        ((5, 64), 64, 3),
        ((600, 40), 33, 40),
        ((8,), 3, 2),
    ],
)
def test_mlp_shapes(shape, hidden, out, activation, dtype, kernels):
    for transposed in (False, True):
        inputs = mlp_inputs(shape, hidden, out, dtype, transposed=transposed)
        assert_close(kernels["fused_mlp"](*inputs, activation), truth_of("fused_mlp", *inputs, activation=activation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlp_decode_and_strided_rows(dtype, kernels):
    inputs = mlp_inputs((1, 512), 1376, 512, dtype)
    assert_close(kernels["fused_mlp"](*inputs), truth_of("fused_mlp", *inputs))
    x = torch.randn(4, 5, 6, 24).to(dtype).permute(2, 0, 1, 3)
    inputs = (x, *mlp_inputs((1, 24), 50, 24, dtype)[1:])
    assert_close(kernels["fused_mlp"](*inputs), truth_of("fused_mlp", *inputs))


@pytest.mark.parametrize(("shape", "hidden"), [((0, 4), 3), ((2, 0), 3), ((20, 4), 0), ((3, 4), 0)])
def test_mlp_empty_sizes(shape, hidden, kernels):
    inputs = mlp_inputs(shape, hidden, 2, torch.float32)
    assert torch.equal(kernels["fused_mlp"](*inputs), torch.zeros(*shape[:-1], 2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_activations_over_their_range(activation, kernels):
    x, one = torch.linspace(-30, 30, 4001)[:, None], torch.ones(1, 1)
    assert_close(
        kernels["fused_mlp"](x, one, one, one, activation),
        truth_of("fused_mlp", x, one, one, one, activation=activation),
    )
    extreme = torch.tensor([[float("nan")], [-100.0], [100.0], [-1e18]])
    out = kernels["fused_mlp"](extreme, one, one, one, activation).flatten()
    assert out[0].isnan()
    assert out[2] == 10000
    assert out[1].abs() < 1e-30
    assert out[3].abs() == 0


def test_mlp_refuses_unknown_activation_and_shapes(kernels):
    inputs = mlp_inputs((4, 8), 6, 8, torch.float32)
    with pytest.raises(ValueError, match="silu"):
        kernels["fused_mlp"](*inputs, "swish")
    with pytest.raises(ValueError, match="do not belong together"):
        kernels["fused_mlp"](inputs[0][:, :5], *inputs[1:])
