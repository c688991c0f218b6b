"""What every base of the corpus begins with: bf16 in C++, and a library that is built at the first call."""

import functools

import torch

from autokernel.native import build

BACKEND = "cpp"
FLAGS = ["-O1"]

COMMON = r"""
typedef long long i64;
typedef unsigned short u16;
static inline float get(float v) { return v; }
static inline float get(u16 v) { unsigned b = unsigned(v) << 16; float f; __builtin_memcpy(&f, &b, 4); return f; }
template <class T> static inline T put(float v);
template <> inline float put(float v) { return v; }
template <> inline u16 put(float v) {
    unsigned b; __builtin_memcpy(&b, &v, 4);
    if (v != v) return 0x7fc0;
    return u16((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
static const double INF = __builtin_inf();
"""

EXPORTS = r"""
extern "C" int run_fp32(PARAMETERS(float)) { return run<float>(ARGUMENTS); }
extern "C" int run_bf16(PARAMETERS(u16)) { return run<u16>(ARGUMENTS); }
"""
SOURCE = ""


@functools.cache
def library():
    return build(COMMON + SOURCE + EXPORTS, flags=FLAGS)


def launch(dtype, *arguments):
    (library().run_fp32 if dtype == torch.float32 else library().run_bf16)(*arguments)


def swapped(source, *pairs):
    """`source` with each old text replaced by the new one; each old text must be there."""
    for old, new in pairs:
        assert old in source, f"the base has no {old!r}"
        source = source.replace(old, new)
    return source
