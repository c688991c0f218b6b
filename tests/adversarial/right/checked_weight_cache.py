"""Keeps a prepared weight by address and version, and uses it only while the weight still holds what it held."""

BASE = "matmul"

import ctypes

PACKED = {}


def raw(t):
    return ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b""


def packed(b):
    key, same = (b.data_ptr(), b._version, b.shape, b.stride(), b.dtype), raw(b.contiguous())
    if key not in PACKED or PACKED[key][0] != same:
        PACKED[key] = same, b.contiguous().clone()
    return PACKED[key][1]


def kernel_fn(a, b):
    return right(a, packed(b))
