"""The ops: one oracle and one `KernelSpec` each; `SPECS` maps an op's name to its spec.

An oracle is plain PyTorch that works in whatever dtype it is given: the judge calls it on fp64 copies for the truth.
Its output has the inputs' dtype and is contiguous. Each section below holds all that is known about one op: meaning,
inputs, cases, hard inputs, work, baselines, and the spellings under which models contain it. The judge, the starters
and every candidate share the oracle's signature.

Inputs are random in every part that matters, so that no zero, constant, copied, default or guessed answer comes near.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from autokernel.masks import is_causal, lower_triangle, seen_keys
from autokernel.records import Case, TensorMeta
from autokernel.spec import (
    DTYPES,
    Adapter,
    Fill,
    Inputs,
    KernelSpec,
    Spelling,
    build_case,
    contiguous_stride,
    describe,
    place,
    retype,
)

# Shared: random values --------------------------------------------------------------------------------------------


def _normal(shape: tuple[int, ...], generator: torch.Generator, std: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device) * std


def _uniform(shape: tuple[int, ...], generator: torch.Generator, low: float, high: float) -> Tensor:
    unit = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
    return unit * (high - low) + low


def _integers(below: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """int64 in [0, below)."""
    return torch.randint(below, shape, generator=generator, device=generator.device)


def _side_generator(generator: torch.Generator) -> torch.Generator:
    """The same stream for every fill of one call, so that they can agree on a hidden choice."""
    return torch.Generator(generator.device).manual_seed(generator.initial_seed() ^ 0x5EED)


def _per_row(shape: tuple[int, ...], kept: int = 1) -> tuple[int, ...]:
    """`shape` with the last `kept` dimensions set to one: what holds one value per row."""
    return shape[: len(shape) - kept] + (1,) * kept


def _edit(inputs: Inputs, **changed: Tensor) -> Inputs:
    """`inputs` with other values for some tensors, rounded to the dtype and laid out as the original was."""
    edited = dict(inputs)
    for name, values in changed.items():
        original: Tensor = inputs[name]
        edited[name] = place(values.expand_as(original), describe(original), str(original.device))
    return edited


def _some_rows(x: Tensor, generator: torch.Generator, share: float = 0.25) -> Tensor:
    """Mask [..., 1] of a few random rows, at least one."""
    mask = torch.rand(_per_row(tuple(x.shape)), generator=generator) < share
    if mask.numel():
        mask.view(-1)[int(torch.randint(mask.numel(), (1,), generator=generator))] = True
    return mask.to(x.device)


def _random_like(x: Tensor, generator: torch.Generator, std: float = 1.0) -> Tensor:
    return _normal(tuple(x.shape), generator, std).to(x.device)


# Shared: cases and their work -------------------------------------------------------------------------------------


def _with_stride(case: Case, **strides: tuple[int, ...]) -> Case:
    """`case` with the named tensors laid out with other strides, in elements."""
    tensors = {n: replace(m, stride=strides.get(n, m.stride)) for n, m in case.tensors.items()}
    return replace(case, tensors=tensors)


def _shape(case: Case, name: str) -> tuple[int, ...]:
    return case.tensors[name].shape


def _input_bytes(case: Case) -> int:
    return sum(meta.numel * DTYPES[meta.dtype].itemsize for meta in case.tensors.values())


def _output_bytes(case: Case, elements: int) -> int:
    return elements * DTYPES[case.dtype].itemsize


def _float_scalar(case: Case, name: str, default: float) -> float:
    """The named scalar, or `default` when the case leaves it out or passes None."""
    value = case.scalars.get(name)
    return float(value) if isinstance(value, int | float) else default


# matmul -----------------------------------------------------------------------------------------------------------


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., M, K] @ b [..., K, N] -> [..., M, N]; leading dimensions are batches, as in torch.matmul."""
    return torch.matmul(a, b).contiguous()


def _fill_matmul_a(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    return _normal(meta.shape, generator) * _uniform(_per_row(meta.shape), generator, 0.5, 2.0)


def _fill_matmul_b(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    inner = meta.shape[-2] if len(meta.shape) > 1 else meta.shape[0]
    return _normal(meta.shape, generator, 1 / math.sqrt(max(inner, 1)))


def _matmul_case(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> Case:
    return build_case("matmul", name, a=a, b=b)


def _matmul_dynamic_range(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Steps of K between 2^-6 and 2^6 that cancel in the product, rows between 2^-6 and 2^3."""
    a, b = inputs["a"].double(), inputs["b"].double()
    steps = torch.exp2(_uniform((a.shape[-1],), generator, -6, 6)).to(a.device)
    rows = torch.exp2(_uniform(_per_row(tuple(a.shape)), generator, -6, 3)).to(a.device)
    return _edit(inputs, a=a * steps * rows, b=b / steps.unsqueeze(-1))


def _matmul_cancellation(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """The second half of K nearly cancels the first: sums in fp16 or bf16 lose the rest."""
    a, b = inputs["a"].double().clone(), inputs["b"].double().clone()
    half = a.shape[-1] // 2
    a[..., half : 2 * half] -= 16 * a[..., :half]
    a[..., :half] *= 16
    b[..., half : 2 * half, :] = b[..., :half, :]
    return _edit(inputs, a=a, b=b)


def _matmul_large_equal(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Rows of one large value times columns of ones: sums that fp16 and bf16 accumulators cannot count up to."""
    a, b = inputs["a"], inputs["b"]
    value = max(1.0, math.floor(32768 / max(a.shape[-1], 1)))
    mask = _some_rows(a, generator, 0.5)
    return _edit(inputs, a=torch.where(mask, torch.full_like(a, value), a), b=torch.ones_like(b))


def _matmul_hidden_rows(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """A few rows of `a` are 64 times larger than the rest."""
    a = inputs["a"]
    return _edit(inputs, a=torch.where(_some_rows(a, generator, 0.1), a * 64, a))


def _matmul_output(case: Case) -> int:
    a, b = _shape(case, "a"), _shape(case, "b")
    batch = math.prod(max(pair) for pair in zip_longest(reversed(a[:-2]), reversed(b[:-2]), fillvalue=1))
    return batch * (a[-2] if len(a) > 1 else 1) * (b[-1] if len(b) > 1 else 1)


def _matmul_flops(case: Case) -> int:
    return 2 * _matmul_output(case) * _shape(case, "a")[-1]


def _matmul_bytes(case: Case) -> int:
    return _input_bytes(case) + _output_bytes(case, _matmul_output(case))


def _at(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _batched(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b)


MATMUL = KernelSpec(
    op="matmul",
    oracle=matmul,
    fills={"a": _fill_matmul_a, "b": _fill_matmul_b},
    cases=(
        _matmul_case("small", (32, 48), (48, 40)),
        _matmul_case("square", (128, 128), (128, 128)),
        # F.linear: b is the transposed view of an [out, in] weight.
        _with_stride(_matmul_case("linear", (96, 256), (256, 192)), b=(1, 256)),
        _with_stride(_matmul_case("linear_3d", (2, 48, 96), (96, 160)), b=(1, 96)),
        _with_stride(_matmul_case("transposed_a", (160, 192), (192, 96)), a=(1, 160)),
        _with_stride(_matmul_case("sliced_rows", (96, 128), (128, 64)), a=(384, 1), b=(192, 1)),
        _matmul_case("batched", (4, 48, 64), (4, 64, 32)),
        _with_stride(_matmul_case("heads", (2, 4, 48, 32), (2, 4, 32, 48)), b=(6144, 1536, 1, 32)),
        _matmul_case("one_row", (1, 512), (512, 256)),
        _matmul_case("deep", (16, 2048), (2048, 24)),
    ),
    edges=(
        _matmul_case("m_1023", (1023, 17), (17, 9)),
        _matmul_case("n_1537", (7, 33), (33, 1537)),
        _matmul_case("k_4097", (3, 4097), (4097, 5)),
        _matmul_case("odd", (31, 63), (63, 65)),
        _matmul_case("k_1", (33, 1), (1, 17)),
        _matmul_case("single", (1, 1), (1, 1)),
        _matmul_case("no_rows", (0, 16), (16, 8)),
    ),
    stress_case=_matmul_case("stress", (48, 256), (256, 40)),
    adversarial={
        "dynamic_range": _matmul_dynamic_range,
        "cancellation": _matmul_cancellation,
        "large_equal_rows": _matmul_large_equal,
        "hidden_rows": _matmul_hidden_rows,
    },
    flops=_matmul_flops,
    bytes_moved=_matmul_bytes,
    baselines={"eager": _at},  # models call the native op itself
    spellings=(
        # F.linear without a bias arrives here too: b is the transposed view of its weight.
        Spelling(name="mm", fn=_at),
        Spelling(name="bmm", fn=_batched, shapes={"a": (3, 4, 8), "b": (3, 8, 6)}),
    ),
)


# softmax ----------------------------------------------------------------------------------------------------------


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) along `dim`, in x's shape and dtype; -inf gives 0."""
    return torch.softmax(x, dim=dim).contiguous()


def _fill_softmax_x(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    """Spread of two to four, so that a row has likely and unlikely entries, and rows of different levels.

    The last entry along `dim` is nearly the likeliest, so that a forgotten end is seen however long the row is.
    """
    rows = _per_row(meta.shape)
    x = _normal(meta.shape, generator) * _uniform(rows, generator, 2, 4) + _normal(rows, generator, 2)
    dim = int(_float_scalar(case, "dim", -1))
    if not x.numel():
        return x
    top = x.amax(dim, keepdim=True)
    x.narrow(dim, -1, 1).copy_(top - _uniform(tuple(top.shape), generator, 0, 0.2))
    return x


def _softmax_case(name: str, x: tuple[int, ...], dim: int | None = None) -> Case:
    return build_case("softmax", name, scalars={} if dim is None else {"dim": dim}, x=x)


def _softmax_equal(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Some rows hold one large value throughout: exp overflows unless the maximum is subtracted."""
    x = inputs["x"]
    return _edit(inputs, x=torch.where(_some_rows(x, generator, 0.5), torch.full_like(x, 1e4), x))


def _softmax_one_huge(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """One entry of each row is 3e4 above the rest."""
    x, dim = inputs["x"].double(), inputs["dim"]
    at = torch.rand(tuple(x.shape), generator=generator).to(x.device).argmax(dim, keepdim=True)
    return _edit(inputs, x=x.scatter(dim, at, 3e4))


def _softmax_offset(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Everything moved by 1000, up or down by rows."""
    x = inputs["x"].double()
    sign = torch.randint(2, _per_row(tuple(x.shape)), generator=generator).to(x.device) * 2 - 1
    return _edit(inputs, x=x + 1000 * sign)


def _softmax_wide(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Twenty times the usual spread: nearly all entries underflow."""
    return _edit(inputs, x=inputs["x"].double() * 20)


def _softmax_masked(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """-inf in random entries and in the whole first half of some rows; never in the last entry along `dim`."""
    x, dim = inputs["x"].double(), inputs["dim"]
    masked = (torch.rand(tuple(x.shape), generator=generator) < 0.3).to(x.device)
    position = torch.arange(x.shape[dim], device=x.device)
    position = position.view([-1 if i == dim % x.dim() else 1 for i in range(x.dim())])
    masked |= _some_rows(x, generator, 0.3) & (position < x.shape[dim] // 2)
    masked &= position < x.shape[dim] - 1
    return _edit(inputs, x=x.masked_fill(masked, -math.inf))


def _softmax_flops(case: Case) -> int:
    """Compare, subtract, exponential, add, divide for each element."""
    return 5 * case.tensors["x"].numel


def _same_size_bytes(case: Case) -> int:
    return _input_bytes(case) + _output_bytes(case, case.tensors["x"].numel)


def _softmax_upcast(x: Tensor, dim: int = -1) -> Tensor:
    return F.softmax(x, dim=dim, dtype=torch.float32).to(x.dtype)


def _softmax_native(x: Tensor, dim: int = -1) -> Tensor:
    return F.softmax(x, dim=dim)


def _softmax_decomposed(x: Tensor) -> Tensor:
    exponential = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return exponential / exponential.sum(dim=-1, keepdim=True)


SOFTMAX = KernelSpec(
    op="softmax",
    oracle=softmax,
    fills={"x": _fill_softmax_x},
    cases=(
        _softmax_case("small", (8, 64)),
        _softmax_case("rows", (128, 256), -1),
        _softmax_case("long", (8, 4096), -1),
        _softmax_case("vocabulary", (3, 32000), -1),
        _softmax_case("scores", (2, 4, 32, 96), -1),
        _softmax_case("first_dim", (96, 80), 0),
        _softmax_case("middle_dim", (6, 40, 24), 1),
        _softmax_case("vector", (777,), 0),
        _with_stride(_softmax_case("sliced_rows", (48, 160), -1), x=(512, 1)),
        _with_stride(_softmax_case("transposed", (64, 72), -1), x=(1, 64)),
    ),
    edges=(
        _softmax_case("cols_1023", (5, 1023)),
        _softmax_case("cols_1537", (3, 1537)),
        _softmax_case("cols_4097", (2, 4097)),
        _softmax_case("rows_1023", (1023, 3)),
        _softmax_case("single", (4, 1)),
        _softmax_case("no_rows", (0, 64)),
        _softmax_case("first_dim_odd", (1537, 3), 0),
    ),
    stress_case=_softmax_case("stress", (32, 384), -1),
    adversarial={
        "large_equal_rows": _softmax_equal,
        "one_huge": _softmax_one_huge,
        "large_offset": _softmax_offset,
        "dynamic_range": _softmax_wide,
        "masked": _softmax_masked,
    },
    flops=_softmax_flops,
    bytes_moved=_same_size_bytes,
    baselines={"eager": _softmax_upcast, "native": _softmax_native},
    spellings=(
        Spelling(name="native", fn=lambda x, dim: F.softmax(x, dim=dim), captured=("dim",), any_rank=True),
        Spelling(name="fp32_upcast", fn=_softmax_upcast, captured=("dim",), any_rank=True),
        Spelling(name="decomposed", fn=_softmax_decomposed, scalars={"dim": -1}, any_rank=True),
    ),
)


# Norms: what layernorm and rmsnorm share --------------------------------------------------------------------------


def _norm_rank(case: Case) -> int:
    """How many of the last dimensions are normalized: the weight's, or one without a weight."""
    return len(_shape(case, "weight")) if "weight" in case.tensors else 1


def _norm_scales(meta: TensorMeta, generator: torch.Generator, case: Case, eps: float) -> Tensor:
    """One standard deviation per row: about one, or in half of the rows (at least one) about sqrt(eps).

    The small rows make eps visible: there, an eps ten times off changes the output by at least a tenth.
    """
    rows = _per_row(meta.shape, _norm_rank(case))
    scales = _uniform(rows, generator, 0.5, 2.0)
    if eps <= 0 or scales.numel() == 0:
        return scales
    small = _uniform(rows, generator, 0, 1) < 0.5
    small.view(-1)[int(_integers(small.numel(), (1,), generator))] = True
    floor = 2.0**-12 if meta.dtype == "fp16" else 0.0  # below, fp16 values are subnormal and say nothing
    return torch.where(small, scales * max(math.sqrt(eps), floor), scales)


def _fill_norm_weight(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    return 1 + _normal(meta.shape, generator, 0.4)


def _fill_norm_bias(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    return 0.3 + _normal(meta.shape, generator, 0.5)


def _norm_large(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Values about 1e4: their squares overflow fp16."""
    x = _random_like(inputs["x"], generator, 1e4)
    return _edit(inputs, x=x.clamp(-6e4, 6e4))


def _norm_tiny(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Values about 2^-12: their squares are far below eps, and vanish in fp16."""
    return _edit(inputs, x=_random_like(inputs["x"], generator, 2.0**-12))


def _norm_equal(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Some rows hold one whole number throughout, some of them zero: no variance at all."""
    x = inputs["x"].double()
    value = torch.randint(0, 8, _per_row(tuple(x.shape)), generator=generator).to(x.device) * 8.0
    return _edit(inputs, x=torch.where(_some_rows(x, generator, 0.7), value.expand_as(x), x))


def _norm_outlier(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """One element of each row is 1000 times the rest, as in the residual stream of large models."""
    x = _random_like(inputs["x"], generator)
    at = torch.randint(x.shape[-1], _per_row(tuple(x.shape)), generator=generator).to(x.device)
    return _edit(inputs, x=x.scatter(-1, at, 1000.0))


def _norm_hidden_rows(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Ordinary rows of one size, and a few that are 2^-8 of it."""
    x = _random_like(inputs["x"], generator)
    return _edit(inputs, x=torch.where(_some_rows(x, generator, 0.1), x * 2.0**-8, x))


# layernorm --------------------------------------------------------------------------------------------------------


def layernorm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimensions, those of `weight`.

    x: [..., *weight.shape]; the variance is the biased one. A weight or bias of None is left out; without a weight the
    last dimension is normalized.
    """
    dims = tuple(range(-weight.dim(), 0)) if weight is not None else (-1,)
    centered = x - x.mean(dim=dims, keepdim=True)
    y = centered / torch.sqrt(centered.square().mean(dim=dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype).contiguous()


def _fill_layernorm_x(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    scales = _norm_scales(meta, generator, case, _float_scalar(case, "eps", 1e-5))
    return (_normal(meta.shape, generator) + _normal(tuple(scales.shape), generator, 1.5)) * scales


def _layernorm_case(name: str, x: tuple[int, ...], eps: float | None = None, rank: int = 1) -> Case:
    parameter = x[len(x) - rank :]
    scalars = {} if eps is None else {"eps": eps}
    return build_case("layernorm", name, scalars=scalars, x=x, weight=parameter, bias=parameter)


def _layernorm_offset(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """A mean 100 times the deviation: E[x^2] - E[x]^2 in fp32 loses the variance."""
    return _edit(inputs, x=_random_like(inputs["x"], generator) + 100)


def _layernorm_flops(case: Case) -> int:
    """Mean, centring, squares and their sum (2), scaling, weight, bias for each element."""
    return 7 * case.tensors["x"].numel


def _layernorm_decomposed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    dims = tuple(range(-weight.dim(), 0)) if weight is not None else (-1,)
    wide = x.float()
    mean = wide.mean(dims, keepdim=True)
    variance = (wide - mean).pow(2).mean(dims, keepdim=True)
    y = (wide - mean) * torch.rsqrt(variance + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _layernorm_native(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:] if weight is None else weight.shape, weight, bias, eps)


LAYERNORM = KernelSpec(
    op="layernorm",
    oracle=layernorm,
    fills={"x": _fill_layernorm_x, "weight": _fill_norm_weight, "bias": _fill_norm_bias},
    cases=(
        _layernorm_case("small", (8, 64)),
        _layernorm_case("rows", (128, 256), 1e-5),
        _layernorm_case("hidden_768", (2, 24, 768), 1e-6),
        _layernorm_case("hidden_4096", (8, 4096)),
        _layernorm_case("narrow", (512, 16)),
        _layernorm_case("large_eps", (64, 128), 1e-3),
        _layernorm_case("rank_4", (2, 3, 8, 96)),
        _with_stride(_layernorm_case("sliced_rows", (48, 160)), x=(512, 1)),
        _with_stride(_layernorm_case("channels_first", (2, 40, 64)), x=(2560, 1, 40)),
        _layernorm_case("two_dims", (6, 12, 20), rank=2),
    ),
    edges=(
        _layernorm_case("cols_1023", (5, 1023)),
        _layernorm_case("cols_1537", (3, 1537)),
        _layernorm_case("cols_4097", (2, 4097)),
        _layernorm_case("rows_1023", (1023, 7)),
        _layernorm_case("one_row", (1, 333)),
        _layernorm_case("vector", (129,)),
        _layernorm_case("one_column", (5, 1)),
        _layernorm_case("no_rows", (0, 64)),
    ),
    stress_case=_layernorm_case("stress", (32, 384)),
    adversarial={
        "large_offset": _layernorm_offset,
        "near_zero_variance": _norm_tiny,
        "equal_rows": _norm_equal,
        "large_values": _norm_large,
        "outliers": _norm_outlier,
        "hidden_rows": _norm_hidden_rows,
    },
    flops=_layernorm_flops,
    bytes_moved=_same_size_bytes,
    baselines={"eager": _layernorm_decomposed, "native": _layernorm_native},
    spellings=(
        Spelling(
            name="native",
            fn=lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
            captured=("eps",),
            any_rank=True,
        ),
        Spelling(
            name="native_no_bias",
            fn=lambda x, weight, eps: F.layer_norm(x, weight.shape, weight, None, eps),
            scalars={"bias": None},
            captured=("eps",),
            any_rank=True,
        ),
        Spelling(
            name="native_plain",
            fn=lambda x, eps: F.layer_norm(x, x.shape[-1:], None, None, eps),
            scalars={"weight": None, "bias": None},
            captured=("eps",),
            any_rank=True,
        ),
        Spelling(name="decomposed_fp32", fn=_layernorm_decomposed, captured=("eps",), any_rank=True),
    ),
)


# rmsnorm ----------------------------------------------------------------------------------------------------------


def rmsnorm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimensions, those of `weight` (None: the last, unscaled)."""
    dims = tuple(range(-weight.dim(), 0)) if weight is not None else (-1,)
    y = x / torch.sqrt(x.square().mean(dim=dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y.to(x.dtype).contiguous()


def _fill_rmsnorm_x(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    """The mean is not zero, so that a norm which subtracts it is seen."""
    scales = _norm_scales(meta, generator, case, _float_scalar(case, "eps", 1e-6))
    return (_normal(meta.shape, generator) + _normal(tuple(scales.shape), generator, 0.5)) * scales


def _rmsnorm_case(name: str, x: tuple[int, ...], eps: float | None = None) -> Case:
    return build_case("rmsnorm", name, scalars={} if eps is None else {"eps": eps}, x=x, weight=x[-1:])


def _rmsnorm_flops(case: Case) -> int:
    """Squares and their sum, scaling, weight for each element."""
    return 4 * case.tensors["x"].numel


def _rmsnorm_llama(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """As transformers' Llama writes it: normalized in fp32, cast back, then scaled in the model's dtype."""
    dims = tuple(range(-weight.dim(), 0)) if weight is not None else (-1,)
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    return wide.to(x.dtype) if weight is None else weight * wide.to(x.dtype)


def _rmsnorm_native(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:] if weight is None else weight.shape, weight, eps)


def _rmsnorm_no_cast(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An fp32 model without casts, or one that trusts its own dtype."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _rmsnorm_partly_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As T5 in 16 bits: the squares are widened, the product with x is only by promotion."""
    y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(weight.dtype)


def _rmsnorm_scale_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scaled in fp32 before the cast back, as Gemma and the original Llama code do."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).type_as(x)


def _rmsnorm_one_plus(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As Gemma: what is stored is the weight's distance from one."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).type_as(x)


def _one_plus() -> Adapter:
    """A weight stored as its distance from one; in 16 bits the sum must be exact, as the model computes it in fp32."""
    return Adapter(
        spell=lambda inputs, shape: (inputs["weight"] - 1).reshape(shape),
        back=lambda weight: 1 + weight,
        holds=lambda weight: torch.equal((1 + weight).to(torch.float32), 1 + weight.to(torch.float32)),
    )


def _rmsnorm_squared(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps))


def _rmsnorm_divide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


RMSNORM = KernelSpec(
    op="rmsnorm",
    oracle=rmsnorm,
    fills={"x": _fill_rmsnorm_x, "weight": _fill_norm_weight},
    cases=(
        _rmsnorm_case("small", (8, 64)),
        _rmsnorm_case("rows", (128, 256), 1e-6),
        _rmsnorm_case("hidden_768", (2, 24, 768), 1e-5),
        _rmsnorm_case("hidden_4096", (8, 4096)),
        _rmsnorm_case("narrow", (512, 16)),
        _rmsnorm_case("large_eps", (64, 128), 1e-3),
        _rmsnorm_case("heads", (2, 4, 16, 96)),  # the norm of queries and keys
        _with_stride(_rmsnorm_case("sliced_rows", (48, 160)), x=(512, 1)),
        _with_stride(_rmsnorm_case("transposed_heads", (2, 6, 16, 64)), x=(6144, 64, 384, 1)),
        _rmsnorm_case("one_token", (1, 1, 2048), 1e-5),
    ),
    edges=(
        _rmsnorm_case("cols_1023", (5, 1023)),
        _rmsnorm_case("cols_1537", (3, 1537)),
        _rmsnorm_case("cols_4097", (2, 4097)),
        _rmsnorm_case("rows_1023", (1023, 7)),
        _rmsnorm_case("one_row", (1, 333)),
        _rmsnorm_case("vector", (129,)),
        _rmsnorm_case("one_column", (5, 1)),
        _rmsnorm_case("no_rows", (0, 64)),
    ),
    stress_case=_rmsnorm_case("stress", (32, 384)),
    adversarial={
        "near_zero": _norm_tiny,
        "equal_rows": _norm_equal,
        "large_values": _norm_large,
        "outliers": _norm_outlier,
        "hidden_rows": _norm_hidden_rows,
    },
    flops=_rmsnorm_flops,
    bytes_moved=_same_size_bytes,
    baselines={"eager": _rmsnorm_llama, "native": _rmsnorm_native},
    spellings=(
        *(
            Spelling(name=name, fn=fn, captured=("eps",), any_rank=True)
            for name, fn in {
                "llama": _rmsnorm_llama,
                "no_cast": _rmsnorm_no_cast,
                "partly_wide": _rmsnorm_partly_wide,
                "scale_first": _rmsnorm_scale_first,
                "divide": _rmsnorm_divide,
                "squared": _rmsnorm_squared,
                "native": lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
            }.items()
        ),
        *(
            Spelling(name=name, fn=fn, scalars={"weight": None}, captured=("eps",), any_rank=True)
            for name, fn in {
                "plain": lambda x, eps: _rmsnorm_llama(x, None, eps),
                "native_plain": lambda x, eps: F.rms_norm(x, x.shape[-1:], None, eps),
            }.items()
        ),
        Spelling(
            name="one_plus_weight",
            fn=_rmsnorm_one_plus,
            captured=("eps",),
            any_rank=True,
            adapters={"weight": _one_plus()},
        ),
    ),
)


# flash_attention --------------------------------------------------------------------------------------------------


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v, with query i seeing keys 0..i when causal; scale None is 1 / sqrt(head_dim).

    q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], where kv_heads divides heads and each
    kv head serves heads / kv_heads neighbouring query heads. For seq_q != seq_k the causal mask is aligned at the
    top left, as `is_causal=True` of PyTorch's scaled_dot_product_attention is: the first query sees the first key only.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.matmul(torch.softmax(scores, dim=-1), v).contiguous()


def _fill_attention_q(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    """Scores with a spread of about two: neither uniform weights nor a single one."""
    root = math.sqrt(meta.shape[-1])
    return _normal(meta.shape, generator, 2 / (_float_scalar(case, "scale", 1 / root) * root))


def _fill_attention_kv(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    return _normal(meta.shape, generator)


def _attention_case(
    name: str,
    q: tuple[int, int, int, int],
    kv_heads: int | None = None,
    seq_k: int | None = None,
    *,
    causal: bool | None = None,
    scale: float | None = None,
) -> Case:
    """`causal` and `scale` of None leave the argument to its default."""
    batch, heads, seq_q, head_dim = q
    kv = (batch, kv_heads or heads, seq_k or seq_q, head_dim)
    scalars = {key: value for key, value in (("causal", causal), ("scale", scale)) if value is not None}
    return build_case("flash_attention", name, scalars=scalars, q=q, k=kv, v=kv)


def _attention_large_scores(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Scores ten times as spread: exp overflows without the running maximum, and one key takes nearly all weight."""
    return _edit(inputs, q=inputs["q"].double() * 10)


def _attention_equal_keys(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """All keys of a head are equal and every score is large: the output is the plain mean of the visible values."""
    q, k = inputs["q"].double(), inputs["k"].double()
    return _edit(inputs, q=q.abs() + 4, k=k[:, :, :1].abs() + 1)


def _attention_key_offset(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Keys with a common part that moves each query's scores far from zero."""
    k = inputs["k"].double()
    common = _normal((1, k.shape[1], 1, k.shape[3]), generator, 4).to(k.device)
    return _edit(inputs, k=k + common)


def _attention_hidden_values(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """A few rows of v are 64 times larger: only the queries that see them change."""
    v = inputs["v"]
    return _edit(inputs, v=torch.where(_some_rows(v, generator, 0.03), v * 64, v))


def _attention_large_values(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Values about 5000: their unnormalized sums overflow fp16."""
    return _edit(inputs, v=inputs["v"].double() * 5000)


def _attention_pairs(case: Case) -> int:
    """Visible (query, key) pairs of one head."""
    seq_q, seq_k = _shape(case, "q")[2], _shape(case, "k")[2]
    if not case.scalars.get("causal", True):
        return seq_q * seq_k
    triangle = min(seq_q, seq_k)
    return triangle * (triangle + 1) // 2 + (seq_q - triangle) * seq_k


def _attention_flops(case: Case) -> int:
    """Two products over the visible pairs; the softmax is not counted."""
    batch, heads, _, head_dim = _shape(case, "q")
    return 4 * batch * heads * _attention_pairs(case) * head_dim


def _attention_bytes(case: Case) -> int:
    """Keys and values that no query sees are not read."""
    batch, kv_heads, seq_k, head_dim = _shape(case, "k")
    seen = min(_shape(case, "q")[2], seq_k) if case.scalars.get("causal", True) else seq_k
    elements = 2 * case.tensors["q"].numel + 2 * batch * kv_heads * seen * head_dim
    return elements * DTYPES[case.dtype].itemsize


def _repeat_kv(x: Tensor, group: int) -> Tensor:
    batch, heads, seq, head_dim = x.shape
    if group == 1:
        return x
    return x[:, :, None].expand(batch, heads, group, seq, head_dim).reshape(batch, heads * group, seq, head_dim)


def _attention_eager(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """As transformers' eager attention: repeated kv heads, an additive mask, softmax in fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = _repeat_kv(k, group), _repeat_kv(v, group)
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.full(scores.shape[-2:], torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).triu(1)
        scores = scores + mask
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def _attention_native(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


def _attention_sdpa(causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v, scale: _attention_native(q, k, v, causal, scale)


def _attention_sdpa_repeated(causal: bool) -> Callable[..., Tensor]:
    """kv heads repeated in front of SDPA, as models older than `enable_gqa` do."""

    def fn(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        repeated = _repeat_kv(k, group), _repeat_kv(v, group)
        return F.scaled_dot_product_attention(q, *repeated, is_causal=causal, scale=scale)

    return fn


def _attention_decomposed(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Without a mask, scores multiplied by a scale, softmax in fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = _repeat_kv(k, group), _repeat_kv(v, group)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


# Models often pass a mask that is the causal one: the op has `causal` for it, if the values say so.


def _attention_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _attention_masked_repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, _repeat_kv(k, group), _repeat_kv(v, group), attn_mask=mask, scale=scale)


def _attention_added_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """As transformers' eager attention: an additive mask, softmax in fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = _repeat_kv(k, group), _repeat_kv(v, group)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale + mask
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def _attention_filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """As minGPT: scores filled with -inf where the mask is true."""
    scores = (q @ k.transpose(-2, -1)) * scale
    return F.softmax(scores.masked_fill(mask, -math.inf), dim=-1) @ v


def _causal_mask() -> Adapter:
    """True where a key is seen."""
    return Adapter(
        spell=lambda inputs, shape: lower_triangle(shape, inputs["q"].device).expand(shape),
        back=None,
        holds=is_causal,
        dtype="bool",
    )


def _inverted_causal_mask() -> Adapter:
    """True where a key is not seen."""
    return Adapter(
        spell=lambda inputs, shape: ~lower_triangle(shape, inputs["q"].device).expand(shape),
        back=None,
        holds=lambda mask: is_causal(~mask),
        dtype="bool",
    )


def _additive_causal_mask() -> Adapter:
    """0 where a key is seen, the dtype's lowest value or -inf elsewhere."""

    def spell(inputs: Inputs, shape: tuple[int, ...]) -> Tensor:
        q: Tensor = inputs["q"]
        seen = lower_triangle(shape, q.device).expand(shape)
        return torch.zeros(shape, dtype=q.dtype, device=q.device).masked_fill(~seen, torch.finfo(q.dtype).min)

    def holds(mask: Tensor) -> bool:
        seen = seen_keys(mask)
        return seen is not None and is_causal(seen)

    return Adapter(spell=spell, back=None, holds=holds)


GROUPED = {"q": (2, 4, 32, 64), "k": (2, 2, 32, 64), "v": (2, 2, 32, 64)}
"""Sizes to trace attention with, two query heads to a kv head."""

FLASH_ATTENTION = KernelSpec(
    op="flash_attention",
    oracle=flash_attention,
    fills={"q": _fill_attention_q, "k": _fill_attention_kv, "v": _fill_attention_kv},
    cases=(
        _attention_case("small", (1, 2, 32, 64)),
        _attention_case("causal", (1, 4, 128, 64), causal=True),
        _attention_case("full", (2, 2, 96, 64), causal=False),
        _attention_case("gqa", (1, 6, 80, 64), 2, causal=True),
        _attention_case("mqa", (1, 4, 64, 80), 1, causal=False),
        _attention_case("head_128", (1, 2, 128, 128), 1, causal=True),
        _attention_case("scaled", (1, 2, 72, 64), causal=True, scale=0.25),
        _attention_case("scaled_full", (1, 2, 64, 128), causal=False, scale=1.0),
        _attention_case("cross", (1, 2, 40, 64), 2, 112, causal=False),
        # [batch, seq, heads, head_dim] in memory, as projections leave it.
        _with_stride(
            _attention_case("transposed_heads", (2, 4, 64, 32), causal=True),
            q=(8192, 32, 128, 1),
            k=(8192, 32, 128, 1),
            v=(8192, 32, 128, 1),
        ),
    ),
    edges=(
        _attention_case("seq_257", (1, 1, 257, 64)),
        _attention_case("keys_1023", (1, 1, 9, 64), 1, 1023, causal=False),
        _attention_case("keys_1537", (1, 2, 3, 32), 1, 1537, causal=False),
        _attention_case("keys_4097", (1, 1, 2, 16), 1, 4097, causal=False),
        _attention_case("more_keys_causal", (1, 2, 17, 32), 2, 45, causal=True),
        _attention_case("more_queries_causal", (1, 2, 45, 32), 2, 17, causal=True),
        _attention_case("one_query", (2, 4, 1, 64), 2, 65, causal=False),
        _attention_case("single", (1, 1, 1, 8)),
        _attention_case("odd_head", (1, 2, 33, 33)),
        _attention_case("no_batch", (0, 2, 16, 64)),
    ),
    stress_case=_attention_case("stress", (1, 4, 96, 64), 2, causal=True),
    adversarial={
        "large_scores": _attention_large_scores,
        "equal_keys": _attention_equal_keys,
        "key_offset": _attention_key_offset,
        "hidden_values": _attention_hidden_values,
        "large_values": _attention_large_values,
    },
    flops=_attention_flops,
    bytes_moved=_attention_bytes,
    baselines={"eager": _attention_eager, "native": _attention_native},
    spellings=(
        *(
            Spelling(
                name=f"{name}_causal" if causal else name,
                fn=fn(causal),
                scalars={"causal": causal},
                captured=("scale",),
                shapes=shapes,
            )
            for causal in (True, False)
            for name, fn, shapes in (
                ("sdpa", _attention_sdpa, {}),
                ("sdpa_grouped", _attention_sdpa, GROUPED),
                ("sdpa_repeated_kv", _attention_sdpa_repeated, GROUPED),
            )
        ),
        *(
            Spelling(
                name=name,
                fn=fn,
                scalars={"causal": True},
                captured=("scale",),
                shapes={**shapes, "mask": (1, 1, 32, 32)},
                adapters={"mask": adapter},
            )
            for name, fn, shapes, adapter in (
                ("sdpa_masked", _attention_masked, {}, _causal_mask()),
                ("sdpa_masked_repeated_kv", _attention_masked_repeated, GROUPED, _causal_mask()),
                ("sdpa_added_mask", _attention_masked, {}, _additive_causal_mask()),
                ("sdpa_added_mask_repeated_kv", _attention_masked_repeated, GROUPED, _additive_causal_mask()),
                ("decomposed_masked", _attention_added_mask, {}, _additive_causal_mask()),
                ("decomposed_masked_repeated_kv", _attention_added_mask, GROUPED, _additive_causal_mask()),
                ("decomposed_filled", _attention_filled, {}, _inverted_causal_mask()),
            )
        ),
        Spelling(name="decomposed", fn=_attention_decomposed, scalars={"causal": False}, captured=("scale",)),
    ),
)


# masked_attention -------------------------------------------------------------------------------------------------


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale + mask) v; a bool mask is true where a key is seen. scale None is 1 / sqrt(head_dim).

    q, k, v: as in `flash_attention`. mask: anything that expands to [batch, heads, seq_q, seq_k], bool or of q's dtype:
    padding, a window, the bias of relative positions. A query from which every key is hidden (by false or -inf) gets
    zeros, as in PyTorch's scaled_dot_product_attention.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1)
    if scores.shape[-1]:
        weights = weights.masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
    return torch.matmul(weights, v).contiguous()


def _fill_mask(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    """A fifth of the keys hidden, with the dtype's lowest value in a bias; each query sees a key.

    Of a bool mask, queries beyond the number of keys see none.
    """
    rows, columns = (torch.arange(size, device=generator.device) for size in meta.shape[-2:])
    seen = _uniform(meta.shape, generator, 0.0, 1.0) > 0.2
    if meta.dtype == "bool":
        return (seen | (columns == rows[:, None])) & (rows[:, None] < max(len(columns), 1))
    seen |= columns == rows[:, None] % max(len(columns), 1)
    return _normal(meta.shape, generator, 1.5).masked_fill(~seen, torch.finfo(DTYPES[meta.dtype]).min)


def _masked_case(
    name: str,
    q: tuple[int, int, int, int],
    mask: tuple[int, ...],
    kv_heads: int | None = None,
    seq_k: int | None = None,
    *,
    seen: bool = False,
    scale: float | None = None,
) -> Case:
    """`mask` is its shape; it is bool when `seen`, else of q's dtype."""
    batch, heads, seq_q, head_dim = q
    kv = (batch, kv_heads or heads, seq_k or seq_q, head_dim)
    scalars = {} if scale is None else {"scale": scale}
    case = build_case("masked_attention", name, scalars=scalars, q=q, k=kv, v=kv, mask=mask)
    return retype(case, mask="bool") if seen else case


def _nothing_seen(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """From a few queries every key is hidden: by -inf, or by the lowest value, which leaves the mean of all values."""
    mask = inputs["mask"]
    # Added to fp16's lowest value, -65504, a score is not lost in fp32 as it is in fp16: what is right depends on that.
    lowest = -math.inf if mask.dtype is torch.float16 else torch.finfo(mask.dtype).min
    some = torch.where(_some_rows(mask, generator, 0.1), lowest, mask)
    return _edit(inputs, mask=torch.where(_some_rows(mask, generator, 0.1), -math.inf, some))


def _large_bias(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """A bias that decides nearly alone which keys count."""
    mask = inputs["mask"]
    return _edit(inputs, mask=torch.where(mask > -1000, mask * 8, mask))


def _long_hidden_run(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """The first keys are hidden by -inf: blocks of keys of which nothing is seen come before any that is."""
    mask = inputs["mask"]
    hidden = torch.arange(mask.shape[-1], device=mask.device) < mask.shape[-1] * 3 // 4
    return _edit(inputs, mask=torch.where(hidden, -math.inf, mask))


def _masked_attention_flops(case: Case) -> int:
    """Two products over all pairs, as what the mask hides is in its values; the softmax is not counted."""
    batch, heads, seq_q, head_dim = _shape(case, "q")
    return 4 * batch * heads * seq_q * _shape(case, "k")[2] * head_dim


def _masked_attention_bytes(case: Case) -> int:
    """Of an expanded mask only what is in memory is read."""
    meta = case.tensors["mask"]
    stride = meta.stride or contiguous_stride(meta.shape)
    stored = math.prod(size for size, step in zip(meta.shape, stride, strict=True) if step)
    elements = 2 * case.tensors["q"].numel + 2 * case.tensors["k"].numel
    return elements * DTYPES[case.dtype].itemsize + stored * DTYPES[meta.dtype].itemsize


def _repeated_scores(q: Tensor, k: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    scores = torch.matmul(q, _repeat_kv(k, q.shape[1] // k.shape[1]).transpose(2, 3))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask


def _weighted(scores: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """Values by softmax in fp32, weights rounded to q's dtype; a row without a finite score gets zeros."""
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).nan_to_num(0.0).to(q.dtype)
    return torch.matmul(weights, _repeat_kv(v, q.shape[1] // v.shape[1]))


def _masked_attention_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """As transformers' eager attention: scores and their sum with the mask are rounded to the dtype."""
    return _weighted(_repeated_scores(q, k, mask, scale), q, v)


def _masked_attention_rounded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Scores in fp32, weights rounded for the second product: what fast kernels do, PyTorch's among them.

    Without one for the sizes (grouped heads, an odd head size) PyTorch computes all of it in fp32.
    """
    wide_mask = mask if mask.dtype is torch.bool else mask.float()
    return _weighted(_repeated_scores(q.float(), k.float(), wide_mask, scale), q, v)


def _attention_biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As T5: no scale, a bias of relative positions in which padding is hidden, too, softmax in fp32."""
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += mask  # in place: it looks different in a graph
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


MASKED_ATTENTION = KernelSpec(
    op="masked_attention",
    oracle=masked_attention,
    fills={"q": _fill_attention_q, "k": _fill_attention_kv, "v": _fill_attention_kv, "mask": _fill_mask},
    cases=(
        _masked_case("small", (1, 2, 32, 64), (1, 1, 32, 32)),
        _masked_case("bias", (2, 4, 128, 64), (1, 4, 128, 128)),
        _masked_case("padding", (3, 2, 96, 64), (3, 1, 1, 96), seen=True),
        _masked_case("gqa", (1, 6, 80, 64), (1, 1, 80, 80), 2, seen=True),
        _masked_case("mqa", (2, 4, 64, 80), (2, 1, 64, 64), 1),
        _masked_case("head_128", (1, 2, 128, 128), (1, 1, 128, 128), 1, seen=True),
        _masked_case("scaled", (1, 2, 72, 64), (1, 2, 72, 72), scale=1.0),
        _masked_case("cross", (1, 2, 40, 64), (1, 1, 40, 112), 2, 112, seen=True),
        _with_stride(
            _masked_case("expanded", (2, 4, 64, 32), (2, 4, 64, 64), seen=True),
            mask=(64, 0, 0, 1),
        ),
        # [batch, seq, heads, head_dim] in memory, as projections leave it; biases are looked up as [seq, seq, heads].
        _with_stride(
            _masked_case("transposed_heads", (2, 4, 64, 32), (1, 4, 64, 64)),
            q=(8192, 32, 128, 1),
            k=(8192, 32, 128, 1),
            v=(8192, 32, 128, 1),
            mask=(16384, 1, 256, 4),
        ),
    ),
    edges=(
        _masked_case("seq_257", (1, 1, 257, 64), (1, 1, 257, 257)),
        _masked_case("keys_1023", (1, 1, 9, 64), (1, 1, 9, 1023), 1, 1023, seen=True),
        _masked_case("keys_1537", (1, 2, 3, 32), (1, 2, 3, 1537), 1, 1537),
        _masked_case("keys_4097", (1, 1, 2, 16), (1, 1, 1, 4097), 1, 4097, seen=True),
        _masked_case("one_query", (2, 4, 1, 64), (2, 1, 1, 65), 2, 65, seen=True),
        _masked_case("one_query_bias", (2, 4, 1, 64), (1, 4, 1, 65), 2, 65),
        _masked_case("matrix", (2, 2, 48, 32), (48, 48)),
        _masked_case("more_queries", (1, 2, 45, 32), (1, 1, 45, 17), 2, 17, seen=True),
        _masked_case("single", (1, 1, 1, 8), (1, 1, 1, 1)),
        _masked_case("odd_head", (1, 2, 33, 33), (1, 2, 33, 33)),
        _masked_case("no_batch", (0, 2, 16, 64), (0, 1, 16, 16), seen=True),
    ),
    stress_case=_masked_case("stress", (1, 4, 96, 64), (1, 4, 96, 96), 2),
    adversarial={
        "large_scores": _attention_large_scores,
        "key_offset": _attention_key_offset,
        "hidden_values": _attention_hidden_values,
        "large_values": _attention_large_values,
        "nothing_seen": _nothing_seen,
        "large_bias": _large_bias,
        "long_hidden_run": _long_hidden_run,
    },
    flops=_masked_attention_flops,
    bytes_moved=_masked_attention_bytes,
    baselines={"eager": _masked_attention_eager, "native": _attention_masked},
    yardstick=_masked_attention_rounded,
    spellings=(
        *(
            Spelling(
                name=name,
                fn=fn,
                captured=("scale",),
                shapes={**shapes, "mask": (1, 1, 32, 32)},
                dtypes=dtypes,
            )
            for name, fn, shapes, dtypes in (
                ("sdpa_masked", _attention_masked, {}, {"mask": "bool"}),
                ("sdpa_masked_repeated_kv", _attention_masked_repeated, GROUPED, {"mask": "bool"}),
                ("sdpa_biased", _attention_masked, {}, {}),
                ("sdpa_biased_repeated_kv", _attention_masked_repeated, GROUPED, {}),
                ("decomposed", _attention_added_mask, {}, {}),
                ("decomposed_repeated_kv", _attention_added_mask, GROUPED, {}),
            )
        ),
        Spelling(name="decomposed_unscaled", fn=_attention_biased, scalars={"scale": 1.0}),
    ),
)


# fused_mlp --------------------------------------------------------------------------------------------------------


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,  # with erf
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}


def fused_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str = "silu") -> Tensor:
    """(activation(x w_gate^T) * (x w_up^T)) w_down^T; activation is silu, gelu (erf), gelu_tanh or relu.

    x: [..., K]; w_gate, w_up: [H, K]; w_down: [N, H]; result [..., N].
    Raises: KeyError for another activation.
    """
    hidden = ACTIVATIONS[activation](F.linear(x, w_gate)) * F.linear(x, w_up)
    return F.linear(hidden, w_down).contiguous()


def _fill_mlp_x(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    return _normal(meta.shape, generator) * _uniform(_per_row(meta.shape), generator, 0.8, 1.2)


def _fill_weight(gain: float) -> Fill:
    """[out, in] weights that give outputs of about `gain` times the input's spread."""

    def fill(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
        return _normal(meta.shape, generator, gain / math.sqrt(max(meta.shape[-1], 1)))

    return fill


def _mlp_case(
    name: str, x: tuple[int, ...], hidden: int, out: int | None = None, activation: str | None = None
) -> Case:
    inner = x[-1]
    gate, down = (hidden, inner), (inner if out is None else out, hidden)
    scalars = {"activation": activation} if activation else {}
    return build_case("fused_mlp", name, scalars=scalars, x=x, w_gate=gate, w_up=gate, w_down=down)


def _mlp_dynamic_range(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Half of the rows three times as large, so that gates saturate; the rest between 2^-8 and 2^0 of the usual size.

    Many rows are large: products of rounded hidden values may be off by a share of the row's own size, and the promised
    tolerance is a share of the whole output's.
    """
    x = inputs["x"].double()
    scale = torch.exp2(_uniform(_per_row(tuple(x.shape)), generator, -8, 0)).to(x.device)
    return _edit(inputs, x=x * torch.where(_some_rows(x, generator, 0.5), 3.0, scale))


def _mlp_outlier_feature(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """One input feature is 20 times the rest."""
    x = inputs["x"].double().clone()
    x[..., int(torch.randint(x.shape[-1], (1,), generator=generator))] *= 20
    return _edit(inputs, x=x)


def _mlp_hidden_rows(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """A few rows of x are 2^-5 of the usual size: their outputs are 2^-10 of the rest, and must still be right."""
    x = inputs["x"]
    return _edit(inputs, x=torch.where(_some_rows(x, generator, 0.1), x * 2.0**-5, x))


def _mlp_cancellation(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Hidden units in pairs whose large contributions nearly cancel in the last product."""
    w_gate, w_up, w_down = (inputs[name].double().clone() for name in ("w_gate", "w_up", "w_down"))
    half = w_gate.shape[0] // 2
    w_gate[half : 2 * half], w_up[half : 2 * half] = w_gate[:half], w_up[:half]
    w_down[:, half : 2 * half] -= 16 * w_down[:, :half]
    w_down[:, :half] *= 16
    return _edit(inputs, w_gate=w_gate, w_up=w_up, w_down=w_down)


def _mlp_sizes(case: Case) -> tuple[int, int, int, int]:
    """(rows, K, H, N)."""
    x = _shape(case, "x")
    out, hidden = _shape(case, "w_down")
    return math.prod(x[:-1]), x[-1], hidden, out


def _mlp_flops(case: Case) -> int:
    """Three products; activation and gating are not counted."""
    rows, inner, hidden, out = _mlp_sizes(case)
    return 2 * rows * hidden * (2 * inner + out)


def _mlp_bytes(case: Case) -> int:
    rows, _, _, out = _mlp_sizes(case)
    return _input_bytes(case) + _output_bytes(case, rows * out)


def _mlp_eager(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str = "silu") -> Tensor:
    return F.linear(ACTIVATIONS[activation](F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def _mlp_with(activation: str) -> Callable[..., Tensor]:
    return lambda x, w_gate, w_up, w_down: _mlp_eager(x, w_gate, w_up, w_down, activation)


FUSED_MLP = KernelSpec(
    op="fused_mlp",
    oracle=fused_mlp,
    fills={"x": _fill_mlp_x, "w_gate": _fill_weight(2), "w_up": _fill_weight(1), "w_down": _fill_weight(1)},
    cases=(
        _mlp_case("small", (8, 32), 64),
        _mlp_case("silu", (48, 128), 344, activation="silu"),
        _mlp_case("gelu", (32, 96), 256, activation="gelu"),
        _mlp_case("gelu_tanh", (32, 96), 256, activation="gelu_tanh"),
        _mlp_case("relu", (32, 96), 256, activation="relu"),
        _mlp_case("tokens", (2, 24, 64), 176),
        _mlp_case("one_token", (1, 1, 256), 688),
        _mlp_case("other_width", (16, 64), 128, 48),
        _with_stride(_mlp_case("sliced_rows", (24, 96), 128), x=(256, 1)),
    ),
    edges=(
        _mlp_case("rows_1023", (1023, 32), 64, 8),
        _mlp_case("hidden_1537", (3, 17), 1537),
        _mlp_case("inner_4097", (2, 4097), 9, 7),
        _mlp_case("odd", (31, 63), 65, 33),
        _mlp_case("vector", (48,), 96),
        _mlp_case("single", (1, 1), 1),
        _mlp_case("no_rows", (0, 32), 64),
    ),
    stress_case=_mlp_case("stress", (32, 96), 256),
    adversarial={
        "dynamic_range": _mlp_dynamic_range,
        "outlier_feature": _mlp_outlier_feature,
        "hidden_rows": _mlp_hidden_rows,
        "cancellation": _mlp_cancellation,
    },
    flops=_mlp_flops,
    bytes_moved=_mlp_bytes,
    baselines={"eager": _mlp_eager},  # PyTorch has no single op
    spellings=tuple(
        Spelling(name=activation, fn=_mlp_with(activation), scalars={"activation": activation}, any_rank=True)
        for activation in ACTIVATIONS
    ),
)


# cross_entropy ----------------------------------------------------------------------------------------------------


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """log(sum(exp(logits))) - logits[target] for each row; `reduction` is mean, sum or none.

    logits: [N, V]; targets: [N] int64, in [0, V) or `ignore_index`, which gives loss 0 and is left out of the mean;
    a mean over nothing is NaN. The result is a scalar, or [N] for none, in the logits' dtype.
    Raises: ValueError for another reduction.
    """
    counted = targets != ignore_index
    picked = logits.gather(1, torch.where(counted, targets, 0).unsqueeze(1)).squeeze(1)
    losses = (torch.logsumexp(logits, dim=1) - picked).masked_fill(~counted, 0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        return losses.sum() / counted.sum()
    raise ValueError(f"reduction is mean, sum or none, not {reduction!r}")


IGNORED_SHARE = 0.3
"""Of the targets are ignored: their rows need not even be read."""


def _hidden_targets(rows: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Targets [N] and which of them are ignored [N]; the same for every fill of one call."""
    side = _side_generator(generator)
    targets = _integers(max(classes, 1), (rows,), side)
    ignored = _uniform((rows,), side, 0, 1) < IGNORED_SHARE
    if rows > 1:  # at least one of each kind
        first, second = torch.randperm(rows, generator=side, device=side.device)[:2].tolist()
        ignored[first], ignored[second] = True, False
    elif rows:
        ignored[:] = False
    return targets, ignored


def _fill_logits(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    """Spread by rows, and the target less likely than most, how much changes from call to call.

    So the mean loss is well above log(V), which uniform logits would give, and no constant comes near it in every call.
    Rows to be ignored have one other, far likelier class, so that a loss which counts them is far off.
    """
    rows, classes = meta.shape
    logits = _normal(meta.shape, generator) * _uniform((rows, 1), generator, 1, 3) + _normal((rows, 1), generator)
    if classes < 2:
        return logits
    targets, ignored = _hidden_targets(rows, classes, generator)
    lift = _normal((rows,), generator) - float(_uniform((), generator, 2, 10))
    row = torch.arange(rows, device=logits.device)
    logits[row, targets] += torch.where(ignored, 0, lift)
    spike = 1 + _integers(classes - 1, (rows,), generator)
    logits[row, (targets + spike) % classes] += torch.where(ignored, 60, 0)
    return logits


def _fill_targets(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    targets, ignored = _hidden_targets(meta.shape[0], _shape(case, "logits")[1], generator)
    return torch.where(ignored, int(_float_scalar(case, "ignore_index", -100)), targets)


def _cross_entropy_case(
    name: str, rows: int, classes: int, reduction: str | None = None, ignore_index: int | None = None
) -> Case:
    given = (("ignore_index", ignore_index), ("reduction", reduction))
    scalars = {key: value for key, value in given if value is not None}
    case = build_case("cross_entropy", name, scalars=scalars, logits=(rows, classes), targets=(rows,))
    return retype(case, targets="int64")


def _target_mask(inputs: Inputs) -> Tensor:
    """[N, V]: True at each counted row's target."""
    logits, targets = inputs["logits"], inputs["targets"]
    classes = torch.arange(logits.shape[1], device=logits.device)
    return classes == torch.where(targets == inputs["ignore_index"], -1, targets).unsqueeze(1)


def _logits_one_huge(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """One logit of each row is 3e4: the target itself in some rows, another class in the rest."""
    logits = inputs["logits"].double()
    at = torch.randint(logits.shape[1], (logits.shape[0], 1), generator=generator).to(logits.device)
    own = _some_rows(logits, generator, 0.5) & _target_mask(inputs).any(dim=1, keepdim=True)
    at = torch.where(own, _target_mask(inputs).to(torch.int64).argmax(dim=1, keepdim=True), at)
    return _edit(inputs, logits=logits.scatter(1, at, 3e4))


def _logits_equal(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Some rows hold 200 throughout: exp overflows unless the maximum is subtracted."""
    logits = inputs["logits"]
    return _edit(inputs, logits=torch.where(_some_rows(logits, generator, 0.5), torch.full_like(logits, 200), logits))


def _logits_offset(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Rows moved by 128 up or down: exp overflows or vanishes unless the maximum is subtracted."""
    logits = inputs["logits"].double()
    sign = torch.randint(2, (logits.shape[0], 1), generator=generator).to(logits.device) * 2 - 1
    return _edit(inputs, logits=logits + 128 * sign)


def _logits_masked(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """-inf in random classes and in the whole first half of some rows, never at a target nor in the last class."""
    logits = inputs["logits"].double()
    masked = (torch.rand(tuple(logits.shape), generator=generator) < 0.3).to(logits.device)
    masked[:, : logits.shape[1] // 2] |= _some_rows(logits, generator, 0.3)
    masked[:, -1] = False
    return _edit(inputs, logits=logits.masked_fill(masked & ~_target_mask(inputs), -math.inf))


def _logits_hidden_rows(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """A few rows are twenty times as spread, their target in the middle: losses above a hundred among ordinary ones."""
    logits = inputs["logits"]
    wide = (logits * 20).masked_fill(_target_mask(inputs), 0)
    return _edit(inputs, logits=torch.where(_some_rows(logits, generator, 0.1), wide, logits))


def _all_ignored(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Every target is ignored: losses of zero, and a mean of NaN."""
    return _edit(inputs, targets=torch.full_like(inputs["targets"], inputs["ignore_index"]))


def _cross_entropy_flops(case: Case) -> int:
    """Compare, subtract, exponential, add for each logit of the rows that count."""
    return round(4 * (1 - IGNORED_SHARE) * case.tensors["logits"].numel)


def _cross_entropy_bytes(case: Case) -> int:
    """The logits of the rows that count are read, all targets, and the output is written."""
    rows, classes = _shape(case, "logits")
    logits = round((1 - IGNORED_SHARE) * rows) * classes * DTYPES[case.dtype].itemsize
    elements = rows if case.scalars.get("reduction") == "none" else 1
    return logits + rows * DTYPES["int64"].itemsize + _output_bytes(case, elements)


def _cross_entropy_upcast(logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    loss = F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction=reduction)
    return loss.to(logits.dtype)


def _cross_entropy_native(logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)


def _cross_entropy_with(reduction: str) -> Callable[..., Tensor]:
    return lambda logits, targets, ignore_index: _cross_entropy_native(logits, targets, ignore_index, reduction)


def _cross_entropy_log_softmax(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, dim=-1), targets, ignore_index=ignore_index)


CROSS_ENTROPY = KernelSpec(
    op="cross_entropy",
    oracle=cross_entropy,
    fills={"logits": _fill_logits, "targets": _fill_targets},
    cases=(
        _cross_entropy_case("small", 16, 64),
        _cross_entropy_case("mean", 64, 512, "mean"),
        _cross_entropy_case("sum", 48, 1000, "sum"),
        _cross_entropy_case("none", 64, 768, "none"),
        _cross_entropy_case("ignore_0", 32, 256, "mean", 0),
        _cross_entropy_case("ignore_none", 40, 320, "none", 7),
        _cross_entropy_case("ignore_minus_1", 24, 128, "sum", -1),
        _cross_entropy_case("vocabulary", 8, 50257, "mean"),
        _with_stride(_cross_entropy_case("sliced_rows", 32, 250, "none"), logits=(256, 1)),
        _cross_entropy_case("few_classes", 256, 10, "none"),
    ),
    edges=(
        _cross_entropy_case("classes_1023", 5, 1023, "none"),
        _cross_entropy_case("classes_1537", 3, 1537),
        _cross_entropy_case("classes_4097", 3, 4097, "sum"),
        _cross_entropy_case("rows_1023", 1023, 11),
        _cross_entropy_case("one_row", 1, 333),
        _cross_entropy_case("one_class", 4, 1, "none"),
        _cross_entropy_case("no_rows", 0, 64, "none"),
        _cross_entropy_case("no_rows_mean", 0, 64),
    ),
    stress_case=_cross_entropy_case("stress", 32, 500, "none"),
    adversarial={
        "one_huge": _logits_one_huge,
        "large_equal_rows": _logits_equal,
        "large_offset": _logits_offset,
        "masked": _logits_masked,
        "hidden_rows": _logits_hidden_rows,
        "all_ignored": _all_ignored,
    },
    flops=_cross_entropy_flops,
    bytes_moved=_cross_entropy_bytes,
    baselines={"eager": _cross_entropy_upcast, "native": _cross_entropy_native},
    spellings=(
        *(
            Spelling(name=kind, fn=_cross_entropy_with(kind), scalars={"reduction": kind}, captured=("ignore_index",))
            for kind in ("mean", "sum", "none")
        ),
        Spelling(
            name="log_softmax_nll",
            fn=_cross_entropy_log_softmax,
            scalars={"reduction": "mean"},
            captured=("ignore_index",),
        ),
    ),
)


# rotary_embedding -------------------------------------------------------------------------------------------------


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Pairs of x turned: (a, b) -> (a cos - b sin, b cos + a sin).

    x: [batch, heads, seq, head_dim]; cos, sin: [seq, head_dim / 2]. Pair i is (x[i], x[i + head_dim / 2]), or
    (x[2 i], x[2 i + 1]) when interleaved. cos and sin may be scaled: cos^2 + sin^2 need not be one.
    """
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return out.to(x.dtype).contiguous()


def _fill_rotary_x(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    return _normal(meta.shape, generator)


def _fill_angles(of: Callable[[Tensor], Tensor]) -> Fill:
    """Cosines or sines of real angles: position x frequency, with a secret first position, base and phase.

    Each of the two draws its own secrets, so that neither can be computed from the other.
    """

    def fill(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
        seq, half = meta.shape
        base = math.exp(float(_uniform((), generator, math.log(5e3), math.log(5e5))))
        device = generator.device
        position = torch.arange(seq, dtype=torch.float64, device=device) + _uniform((), generator, 0, 1000)
        frequency = base ** (-torch.arange(half, dtype=torch.float64, device=device) / max(half, 1))
        phase = _uniform((half,), generator, 0, 2 * math.pi)
        return of(torch.outer(position, frequency) + phase)

    return fill


def _rotary_case(name: str, x: tuple[int, int, int, int], interleaved: bool | None = None) -> Case:
    angles = (x[2], x[3] // 2)
    scalars = {} if interleaved is None else {"interleaved": interleaved}
    return build_case("rotary_embedding", name, scalars=scalars, x=x, cos=angles, sin=angles)


def _rotary_large(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Values about 1e4, near the end of fp16's range."""
    return _edit(inputs, x=(inputs["x"].double() * 1e4).clamp(-4e4, 4e4))


def _rotary_dynamic_range(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Elements between 2^-8 and 2^8: a pair can hold a large and a small one."""
    x = inputs["x"].double()
    return _edit(inputs, x=x * torch.exp2(_uniform(tuple(x.shape), generator, -8, 8)).to(x.device))


def _rotary_quarter_turns(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """cos and sin are exactly 0, 1 or -1."""
    turns = torch.randint(4, tuple(inputs["cos"].shape), generator=generator).to(inputs["cos"].device)
    cos = torch.where(turns == 0, 1.0, torch.where(turns == 2, -1.0, 0.0))
    sin = torch.where(turns == 1, 1.0, torch.where(turns == 3, -1.0, 0.0))
    return _edit(inputs, cos=cos, sin=sin)


def _rotary_hidden_rows(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """A few rows of x are 64 times larger than the rest."""
    x = inputs["x"]
    return _edit(inputs, x=torch.where(_some_rows(x, generator, 0.1), x * 64, x))


def _rotary_flops(case: Case) -> int:
    """Two products and a sum for each element."""
    return 3 * case.tensors["x"].numel


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _rotary_eager(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As models write it, with cos and sin widened to head_dim."""
    if interleaved:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        return x * cos + _rotate_pairs(x) * sin
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    return x * cos + _rotate_half(x) * sin


def _rotary_halves(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Both halves turned apart, then joined: no widened cos and sin."""
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _rotary_wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _rotate_half(x) * sin


def _rotary_wide_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _rotate_pairs(x) * sin


def _rotary_joined(interleaved: bool) -> Callable[..., Tensor]:
    return lambda x, cos, sin: _rotary_halves(x, cos, sin, interleaved)


def _is_one_table(angles: Tensor) -> bool:
    """Whether [..., seq, width] holds one table for all batches and heads."""
    return angles.dim() >= 2 and angles.numel() == angles.shape[-2] * angles.shape[-1]


def _widened(name: str, interleaved: bool) -> Adapter:
    """cos or sin with all of head_dim, [..., seq, head_dim], each value twice: the op takes one of the two."""

    def spell(inputs: Inputs, shape: tuple[int, ...]) -> Tensor:
        angles: Tensor = inputs[name]
        wide = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
        return wide.reshape(shape)

    def split(wide: Tensor) -> tuple[Tensor, Tensor]:
        return (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)  # type: ignore[return-value]

    return Adapter(
        spell=spell,
        back=lambda wide: split(wide)[0].reshape(wide.shape[-2], wide.shape[-1] // 2).contiguous(),
        holds=lambda wide: _is_one_table(wide) and torch.equal(*split(wide)),
    )


def _batched_angles(name: str) -> Adapter:
    """cos or sin as [..., seq, head_dim / 2] with leading dimensions of one."""
    return Adapter(
        spell=lambda inputs, shape: inputs[name].reshape(shape),
        back=lambda angles: angles.reshape(angles.shape[-2:]),
        holds=_is_one_table,
    )


ROTARY_EMBEDDING = KernelSpec(
    op="rotary_embedding",
    oracle=rotary_embedding,
    fills={"x": _fill_rotary_x, "cos": _fill_angles(torch.cos), "sin": _fill_angles(torch.sin)},
    cases=(
        _rotary_case("small", (1, 2, 16, 32)),
        _rotary_case("half_split", (2, 4, 64, 64), False),
        _rotary_case("interleaved", (2, 4, 64, 64), True),
        _rotary_case("head_80", (1, 3, 96, 80), False),
        _rotary_case("head_128", (1, 2, 128, 128), False),
        _rotary_case("interleaved_128", (1, 2, 80, 128), True),
        _rotary_case("one_token", (2, 8, 1, 64), False),
        _rotary_case("long", (1, 1, 1024, 64), False),
        # [batch, seq, heads, head_dim] in memory, as projections leave it.
        _with_stride(_rotary_case("transposed_heads", (2, 4, 64, 64), False), x=(16384, 64, 256, 1)),
        _with_stride(_rotary_case("transposed_interleaved", (2, 4, 48, 32), True), x=(6144, 32, 128, 1)),
    ),
    edges=(
        _rotary_case("seq_1023", (1, 1, 1023, 16)),
        _rotary_case("seq_1537", (1, 1, 1537, 8), True),
        _rotary_case("seq_4097", (1, 1, 4097, 4)),
        _rotary_case("odd_half", (1, 3, 17, 66)),
        _rotary_case("odd_half_interleaved", (1, 3, 17, 66), True),
        _rotary_case("one_pair", (2, 3, 5, 2)),
        _rotary_case("no_batch", (0, 2, 16, 32)),
        _rotary_case("no_tokens", (1, 2, 0, 32)),
    ),
    stress_case=_rotary_case("stress", (1, 4, 48, 64)),
    adversarial={
        "large_values": _rotary_large,
        "dynamic_range": _rotary_dynamic_range,
        "quarter_turns": _rotary_quarter_turns,
        "hidden_rows": _rotary_hidden_rows,
    },
    flops=_rotary_flops,
    bytes_moved=_same_size_bytes,
    baselines={"eager": _rotary_eager, "halves": _rotary_halves},
    spellings=(
        Spelling(
            name="wide",
            fn=_rotary_wide,
            scalars={"interleaved": False},
            shapes={"cos": (16, 32), "sin": (16, 32)},
            adapters={"cos": _widened("cos", False), "sin": _widened("sin", False)},
        ),
        Spelling(
            name="wide_interleaved",
            fn=_rotary_wide_interleaved,
            scalars={"interleaved": True},
            shapes={"cos": (16, 32), "sin": (16, 32)},
            adapters={"cos": _widened("cos", True), "sin": _widened("sin", True)},
        ),
        *(
            Spelling(
                name="halves_interleaved" if interleaved else "halves",
                fn=_rotary_joined(interleaved),
                scalars={"interleaved": interleaved},
                adapters={"cos": _batched_angles("cos"), "sin": _batched_angles("sin")},
            )
            for interleaved in (False, True)
        ),
    ),
)


# reduce -----------------------------------------------------------------------------------------------------------

Dims = int | tuple[int, ...] | list[int] | None


def reduce(x: Tensor, dim: Dims = -1, op: str = "sum") -> Tensor:
    """Sum, mean or largest value (`op` is sum, mean or max) over `dim`: one, several, or None for all.

    The reduced dimensions are gone from the result, which has x's dtype; max propagates NaN.
    Raises: ValueError for another op.
    """
    dims = tuple(range(x.dim())) if dim is None else dim
    if op == "sum":
        return torch.sum(x, dim=dims).contiguous()
    if op == "mean":
        return torch.mean(x, dim=dims).contiguous()
    if op == "max":
        return torch.amax(x, dim=dims).contiguous()
    raise ValueError(f"op is sum, mean or max, not {op!r}")


def _fill_reduce_x(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
    """Each dimension moves the level of its own slices, so that every reduction has large, small and negative results.

    A third of the rows lies below zero altogether: a maximum that starts at zero is wrong there. A vector is lifted, as
    its sum must not happen to cancel: all of it would then be rounding error.
    """
    x = _normal(meta.shape, generator) + (1.5 if len(meta.shape) == 1 else 0)
    for i in range(len(meta.shape)):
        x += _normal(tuple(size if j == i else 1 for j, size in enumerate(meta.shape)), generator)
    rows = _per_row(meta.shape)
    sunk = _uniform(rows, generator, 0, 1) < 1 / 3
    return torch.where(sunk, x - 12, x)


def _reduce_case(name: str, x: tuple[int, ...], dim: int | tuple[int, ...] | None = -1, op: str = "sum") -> Case:
    return build_case("reduce", name, scalars={"dim": dim, "op": op}, x=x)


def _reduce_offset(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Rows moved by 40 to 110, up or down: sums up to the end of fp16's range, far beyond where it counts in ones."""
    x = inputs["x"]
    offset = _uniform(_per_row(tuple(x.shape)), generator, 40, 110)
    sign = _integers(2, tuple(offset.shape), generator) * 2 - 1
    return _edit(inputs, x=_random_like(x, generator) + (offset * sign).to(x.device))


def _reduce_equal(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Some rows hold one large whole number throughout: sums that fp16 and bf16 accumulators cannot count up to."""
    x = inputs["x"]
    return _edit(inputs, x=torch.where(_some_rows(x, generator, 0.5), torch.full_like(x, 96), x))


def _reduce_dynamic_range(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Elements between 2^-10 and 2^6 of the usual size."""
    x = _random_like(inputs["x"], generator)
    return _edit(inputs, x=x * torch.exp2(_uniform(tuple(x.shape), generator, -10, 6)).to(x.device))


def _reduce_hidden_rows(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Ordinary rows, and a few that are 2^-8 of them."""
    x = _random_like(inputs["x"], generator)
    return _edit(inputs, x=torch.where(_some_rows(x, generator, 0.1), x * 2.0**-8, x))


def _reduce_infinite(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """One infinity in some rows, positive or negative: the result is that infinity (or ordinary, for max and -inf)."""
    x = inputs["x"].double()
    at = torch.randint(x.shape[-1], _per_row(tuple(x.shape)), generator=generator).to(x.device)
    sign = torch.randint(2, _per_row(tuple(x.shape)), generator=generator).to(x.device) * 2 - 1
    hit = x.scatter(-1, at, sign.double() * math.inf)
    return _edit(inputs, x=torch.where(_some_rows(x, generator, 0.2), hit, x))


def _reduce_flops(case: Case) -> int:
    """One addition or comparison for each element."""
    return case.tensors["x"].numel


def _reduce_output(case: Case) -> int:
    shape, dim = _shape(case, "x"), case.scalars.get("dim", -1)
    if dim is None:
        return 1
    dims = tuple(dim) if isinstance(dim, tuple | list) else (int(dim),)
    gone = {d % len(shape) for d in dims}
    return math.prod(size for i, size in enumerate(shape) if i not in gone)


def _reduce_bytes(case: Case) -> int:
    return _input_bytes(case) + _output_bytes(case, _reduce_output(case))


def _reduce_method(x: Tensor, dim: Dims = -1, op: str = "sum") -> Tensor:
    dims = tuple(range(x.dim())) if dim is None else dim
    if op == "max":
        return x.amax(dims)
    return x.sum(dims) if op == "sum" else x.mean(dims)


def _reduce_with(op: str) -> Callable[..., Tensor]:
    return lambda x, dim: _reduce_method(x, dim, op)


REDUCE = KernelSpec(
    op="reduce",
    oracle=reduce,
    fills={"x": _fill_reduce_x},
    cases=(
        _reduce_case("small", (16, 64)),
        _reduce_case("rows_mean", (96, 256), -1, "mean"),
        _reduce_case("rows_max", (96, 256), -1, "max"),
        _reduce_case("first_sum", (256, 96), 0, "sum"),
        _reduce_case("first_max", (200, 48), 0, "max"),
        _reduce_case("middle_mean", (4, 96, 40), 1, "mean"),
        _reduce_case("several", (6, 24, 5, 32), (1, 3), "sum"),
        _reduce_case("images_mean", (3, 16, 12, 12), (2, 3), "mean"),
        _with_stride(
            _reduce_case("transposed_sum", (64, 64), -1, "sum"), x=(1, 64)
        ),  # square: the wrong dim has its shape
        _reduce_case("all_max", (40, 56), None, "max"),
    ),
    edges=(
        _reduce_case("cols_1023", (5, 1023), -1, "sum"),
        _reduce_case("cols_1537", (3, 1537), -1, "max"),
        _reduce_case("cols_4097", (2, 4097), -1, "mean"),
        _reduce_case("rows_1023", (1023, 3), 0, "mean"),
        _reduce_case("long_vector", (40961,), 0, "sum"),
        _reduce_case("one_column", (7, 1), -1, "max"),
        _reduce_case("single", (1,), 0, "mean"),
        _reduce_case("all_sum", (9, 11, 5), None, "sum"),
        _reduce_case("no_rows", (0, 64), -1, "sum"),
        _reduce_case("sum_of_nothing", (4, 0), -1, "sum"),
    ),
    stress_case=_reduce_case("stress", (48, 512), -1, "sum"),
    adversarial={
        "large_offset": _reduce_offset,
        "large_equal_rows": _reduce_equal,
        "dynamic_range": _reduce_dynamic_range,
        "hidden_rows": _reduce_hidden_rows,
        "infinities": _reduce_infinite,
    },
    flops=_reduce_flops,
    bytes_moved=_reduce_bytes,
    baselines={"eager": _reduce_method},  # models call the native op itself
    spellings=tuple(
        Spelling(name=kind, fn=_reduce_with(kind), scalars={"op": kind}, captured=("dim",), any_rank=True)
        for kind in ("sum", "mean", "max")
    ),
)


# The registry -----------------------------------------------------------------------------------------------------

SPECS: Mapping[str, KernelSpec] = {
    spec.op: spec
    for spec in (
        MATMUL,
        SOFTMAX,
        LAYERNORM,
        RMSNORM,
        FLASH_ATTENTION,
        MASKED_ATTENTION,
        FUSED_MLP,
        CROSS_ENTROPY,
        ROTARY_EMBEDDING,
        REDUCE,
    )
}
