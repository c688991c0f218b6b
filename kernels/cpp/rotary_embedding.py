"""Rotary position embedding: each pair (a, b) of a head turns by its angle: (a cos - b sin, b cos + a sin).

x: [..., heads, seq, head_dim], fp32 or bf16; cos and sin: [seq, head_dim / 2], same dtype. The pair of angle i is
(x[i], x[i + head_dim / 2]), or (x[2i], x[2i + 1]) when interleaved. Computed in fp32, rounded once. Strides of the
leading dimensions are used as they are, so a transposed [batch, seq, heads, head_dim] is read without a copy.
"""

import platform

import torch

from autokernel.native import build

KERNEL_TYPE = "rotary_embedding"
BACKEND = "cpp"
TUNABLES = {
    "VEC": [8, 16, 32],  # floats per vector value
    "ORDER": ["seq_inner", "heads_inner"],  # which rows are neighbours in a task
    "FIXED": [0, 1],  # 1: loops of known length for head sizes 64 and 128
    "ROWS": [16, 64, 256],  # rows (one position of one head) per task
    "SCHEDULE": ["static", "dynamic"],  # how tasks go to threads
    "GRAIN": [4096, 32768, 262144, 1073741824],  # fewer elements than this run on the calling thread
    "STREAM": [0, 1],  # 1: write the output past the caches (x86)
    "OPT": ["-O2", "-O3"],  # compiler level
}
CONFIG = {
    "OPT": "-O3",
    "ORDER": "seq_inner",
    "FIXED": 0,
    "VEC": 8,
    "ROWS": 64,
    "SCHEDULE": "static",
    "GRAIN": 32768,
    "STREAM": 0,
}

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

typedef float vf __attribute__((vector_size(VEC * 4)));
typedef uint32_t vu __attribute__((vector_size(VEC * 4)));
struct bf16 { uint16_t bits; };

static inline float widen(float v) { return v; }
static inline float widen(bf16 v) {
  uint32_t u = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
static inline void narrow(float v, float* p) { *p = v; }
static inline void narrow(float v, bf16* p) {  // round to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &v, 4);
  p->bits = v != v ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// 2 * VEC neighbours as two vectors: in order for fp32, even and odd ones for bf16, as no lane then has to move.
static inline void load_pair(const float* p, vf& a, vf& b) {
  a = load(p);
  b = load(p + VEC);
}
static inline void load_pair(const bf16* p, vf& a, vf& b) {
  vu u;
  std::memcpy(&u, p, sizeof u);
  a = (vf)(u << 16);
  b = (vf)(u & 0xffff0000);
}
static inline vu round_up_half(vf v) {  // the upper 16 bits are the bf16 nearest to v, ties to even
  vu u = (vu)v;
  u += 0x7fff + ((u >> 16) & 1);
  return v != v ? vu{} + 0x7fc00000 : u;
}

// Plain store, or 16-byte stores that bypass the caches; those need `p` on a 16-byte boundary.
template <bool STREAMING, class V>
static inline void put(void* p, const V& v) {
#if defined(__SSE2__)
  if (STREAMING) {
    __m128i part[sizeof(V) / 16];
    std::memcpy(part, &v, sizeof v);
    for (unsigned i = 0; i < sizeof(V) / 16; ++i) _mm_stream_si128((__m128i*)p + i, part[i]);
    return;
  }
#endif
  std::memcpy(p, &v, sizeof v);
}
template <bool STREAMING>
static inline void store_pair(float* p, vf a, vf b) {
  put<STREAMING>(p, a);
  put<STREAMING>(p + VEC, b);
}
template <bool STREAMING>
static inline void store_pair(bf16* p, vf a, vf b) {
  vu u = (round_up_half(a) >> 16) | (round_up_half(b) & 0xffff0000);
  put<STREAMING>(p, u);
}

enum { seq_inner, heads_inner };

template <bool STREAMING, class T>
static inline void split_row(const T* x, const T* cos, const T* sin, T* y, int64_t half) {
  int64_t i = 0;
  for (; i + 2 * VEC <= half; i += 2 * VEC) {
    vf a0, a1, b0, b1, c0, c1, s0, s1;
    load_pair(x + i, a0, a1);
    load_pair(x + half + i, b0, b1);
    load_pair(cos + i, c0, c1);
    load_pair(sin + i, s0, s1);
    store_pair<STREAMING>(y + i, a0 * c0 - b0 * s0, a1 * c1 - b1 * s1);
    store_pair<STREAMING>(y + half + i, b0 * c0 + a0 * s0, b1 * c1 + a1 * s1);
  }
  for (; i < half; ++i) {
    float a = widen(x[i]), b = widen(x[half + i]), c = widen(cos[i]), s = widen(sin[i]);
    narrow(a * c - b * s, y + i);
    narrow(b * c + a * s, y + half + i);
  }
}

template <class T>
static inline void pair_row(const T* __restrict x, const T* __restrict cos, const T* __restrict sin, T* __restrict y,
                            int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    float a = widen(x[2 * i]), b = widen(x[2 * i + 1]), c = widen(cos[i]), s = widen(sin[i]);
    narrow(a * c - b * s, y + 2 * i);
    narrow(b * c + a * s, y + 2 * i + 1);
  }
}

template <class T>
static inline void row(const T* x, const T* cos, const T* sin, T* y, int64_t half, bool interleaved) {
  if (interleaved) pair_row(x, cos, sin, y, half);
  else if (STREAM && uintptr_t(y) % 16 == 0 && half * sizeof(T) % 16 == 0) split_row<true>(x, cos, sin, y, half);
  else split_row<false>(x, cos, sin, y, half);
}

template <class T>
static inline void any_row(const T* x, const T* cos, const T* sin, T* y, int64_t half, bool interleaved) {
  if (FIXED && half == 32) row(x, cos, sin, y, 32, interleaved);
  else if (FIXED && half == 64) row(x, cos, sin, y, 64, interleaved);
  else row(x, cos, sin, y, half, interleaved);
}

struct Layout { int64_t batch, head, seq; };  // strides in elements

template <class T>
static void some_rows(const T* x, const T* cos, const T* sin, T* y, int64_t from, int64_t to, int64_t heads,
                      int64_t seq, int64_t half, Layout in, Layout out, bool interleaved) {
  int64_t inner = ORDER == seq_inner ? seq : heads, middle = ORDER == seq_inner ? heads : seq;
  int64_t i = from % inner, m = from / inner % middle, b = from / inner / middle;
  for (int64_t r = from; r < to; ++r) {
    int64_t h = ORDER == seq_inner ? m : i, s = ORDER == seq_inner ? i : m;
    any_row(x + b * in.batch + h * in.head + s * in.seq, cos + s * half, sin + s * half,
            y + b * out.batch + h * out.head + s * out.seq, half, interleaved);
    if (++i == inner) {
      i = 0;
      if (++m == middle) m = 0, ++b;
    }
  }
#if defined(__SSE2__)
  if (STREAM) _mm_sfence();
#endif
}

template <class T>
static int rotate(const T* x, const T* cos, const T* sin, T* y, int64_t batch, int64_t heads, int64_t seq, int64_t half,
                  Layout in, Layout out, int64_t interleaved) {
  int64_t rows = batch * heads * seq, tasks = (rows + ROWS - 1) / ROWS;
  if (tasks < 2 || rows * half * 2 < GRAIN) {
    some_rows(x, cos, sin, y, 0, rows, heads, seq, half, in, out, interleaved);
    return 0;
  }
#pragma omp parallel for schedule(SCHEDULE)
  for (int64_t t = 0; t < tasks; ++t) {
    int64_t to = (t + 1) * ROWS < rows ? (t + 1) * ROWS : rows;
    some_rows(x, cos, sin, y, t * ROWS, to, heads, seq, half, in, out, interleaved);
  }
  return 0;
}

extern "C" int rotary_fp32(const float* x, const float* cos, const float* sin, float* y, int64_t batch, int64_t heads,
                           int64_t seq, int64_t half, int64_t xb, int64_t xh, int64_t xs, int64_t yb, int64_t yh,
                           int64_t ys, int64_t interleaved) {
  return rotate(x, cos, sin, y, batch, heads, seq, half, {xb, xh, xs}, {yb, yh, ys}, interleaved);
}
extern "C" int rotary_bf16(const bf16* x, const bf16* cos, const bf16* sin, bf16* y, int64_t batch, int64_t heads,
                           int64_t seq, int64_t half, int64_t xb, int64_t xh, int64_t xs, int64_t yb, int64_t yh,
                           int64_t ys, int64_t interleaved) {
  return rotate(x, cos, sin, y, batch, heads, seq, half, {xb, xh, xs}, {yb, yh, ys}, interleaved);
}
"""


def _flags(config):
    macros = [f"-D{knob}={value}" for knob, value in config.items() if knob != "OPT"]
    # g++ prefers half-wide vectors on many AVX-512 parts; the width is ours to choose.
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [config["OPT"], *wide, *macros]


lib = build(SOURCE, flags=_flags(CONFIG))
FUNCTIONS = {torch.float32: lib.rotary_fp32, torch.bfloat16: lib.rotary_bf16}


def kernel_fn(x, cos, sin, interleaved=False):
    """x with every pair turned, in x's shape and dtype, contiguous.

    Raises: TypeError for a dtype other than fp32 and bf16; ValueError when cos and sin do not fit x.
    """
    function = FUNCTIONS.get(x.dtype)
    if function is None or not x.is_cpu:
        raise TypeError(f"rotary_embedding takes fp32 or bf16 on the CPU, not {x.dtype} on {x.device}")
    if x.dim() < 2:
        raise ValueError(f"x has shape {list(x.shape)}, expected [..., seq, head_dim]")
    seq, width = x.shape[-2:]
    half = width // 2
    for angle in (cos, sin):
        if angle.dtype != x.dtype or angle.device != x.device:
            raise TypeError(f"cos or sin is {angle.dtype} on {angle.device}, x is {x.dtype} on {x.device}")
        if width % 2 or angle.shape != (seq, half):
            raise ValueError(
                f"cos or sin has shape {list(angle.shape)}, x {list(x.shape)}; expected [seq, head_dim / 2]"
            )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        batch, heads, *strides = _layout(x)
        if strides[3] != 1 or x.dim() > 4:
            x = x.contiguous()
            batch, heads, *strides = _layout(x)
        function(
            x, cos.contiguous(), sin.contiguous(), out, batch, heads, seq, half,
            *strides[:3], heads * seq * width, seq * width, width, bool(interleaved),
        )  # fmt: skip
    return out


def _layout(x):
    """Batch, heads, and the strides of [batch, heads, seq, head_dim]; more leading dimensions count as batch."""
    if x.dim() == 4:
        return (*x.shape[:2], *x.stride())
    heads = x.shape[-3] if x.dim() > 2 else 1
    seq, width = x.shape[-2:]
    if x.dim() == 3:
        return (1, heads, 0, *x.stride())
    if x.dim() == 2:
        return (1, 1, 0, 0, *x.stride())
    return (x.numel() // (heads * seq * width), heads, heads * seq * width, *x.stride()[-3:])
