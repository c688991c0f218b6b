"""A call of an op by a few numbers, as people write it on a command line: rmsnorm 4096x4096, matmul 512x512x2048."""

from __future__ import annotations

from autokernel.errors import ConfigError
from autokernel.records import Case
from autokernel.spec import build_case, retype

SIZES = {
    "softmax": "any dimensions",
    "reduce": "any dimensions",
    "rmsnorm": "any dimensions",
    "layernorm": "any dimensions",
    "matmul": "M x N x K",
    "cross_entropy": "rows x classes",
    "rotary_embedding": "batch x heads x tokens x width",
    "flash_attention": "batch x heads x tokens x width",
    "masked_attention": "batch x heads x tokens x width",
    "fused_mlp": "tokens x width x hidden",
}
"""What the numbers mean for each op."""


def parse_sizes(text: str) -> tuple[int, ...]:
    """`4096x4096` as numbers. Raises: ConfigError."""
    try:
        sizes = tuple(map(int, text.split("x")))
    except ValueError:
        raise ConfigError(f"{text!r} is no shape", hint="give sizes like 4096x4096") from None
    if min(sizes) < 1:
        raise ConfigError(f"the shape {text} has a size below 1", hint="give sizes like 4096x4096")
    return sizes


def sized_case(op: str, sizes: tuple[int, ...]) -> Case:
    """A contiguous fp32 call of `op`; `SIZES` says what the sizes mean. Raises: ConfigError for too many or few."""
    wanted = SIZES[op].count(" x ") + 1
    if wanted > 1 and len(sizes) != wanted:
        raise ConfigError(f"{op} cannot have the shape {'x'.join(map(str, sizes))}", hint=f"give {SIZES[op]}")
    last = sizes[-1:]
    if op == "cross_entropy":
        return retype(build_case(op, "model", logits=sizes, targets=sizes[:1]), targets="int64")
    if op == "flash_attention":
        return build_case(op, "model", scalars={"causal": True}, q=sizes, k=sizes, v=sizes)
    if op == "masked_attention":
        return build_case(op, "model", q=sizes, k=sizes, v=sizes, mask=(1, sizes[1], sizes[2], sizes[2]))
    if op == "matmul":
        m, n, k = sizes
        return build_case(op, "model", a=(m, k), b=(k, n))
    if op == "fused_mlp":
        tokens, width, hidden = sizes
        up = (hidden, width)
        return build_case(op, "model", x=(tokens, width), w_gate=up, w_up=up, w_down=(width, hidden))
    if op == "rotary_embedding":
        angles = (sizes[2], sizes[3] // 2)
        return build_case(op, "model", x=sizes, cos=angles, sin=angles)
    if op == "layernorm":
        return build_case(op, "model", x=sizes, weight=last, bias=last)
    return build_case(op, "model", x=sizes, weight=last) if op == "rmsnorm" else build_case(op, "model", x=sizes)
