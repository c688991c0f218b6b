"""Rotates in fp32 with fused multiply-adds, into a clone of its input."""

BASE = "rotary_embedding"

SOURCE = swapped(
    SOURCE,
    ("double a = ", "float a = "),
    ("a * c - b * s", "__builtin_fmaf(a, c, -b * s)"),
    ("b * c + a * s", "__builtin_fmaf(b, c, a * s)"),
)


def kernel_fn(x, cos, sin, interleaved=False):
    own = x.contiguous().clone()
    return right(own, cos, sin, interleaved, out=own)
