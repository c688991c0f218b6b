"""Softmax over one dimension: y = exp(x - max) / sum(exp(x - max)), in fp32, rounded once to x's dtype.

x: any shape, fp32 or bf16. Over the last dimension a row is handled by METHOD: "keep" takes the maximum, then stores
the exponentials for the final scaling; "recompute" stores nothing and takes the exponentials twice; "online" finds
maximum and sum together, block by block. Over another dimension a strip of columns is walked down. A row or strip
belongs to one thread and has one order of sums, so results repeat bit for bit.
"""

import platform

import torch

from autokernel.native import build

KERNEL_TYPE = "softmax"
BACKEND = "cpp"
TUNABLES = {
    "VEC": [8, 16, 32],  # floats per vector value
    "METHOD": ["keep", "recompute", "online"],
    "EXP_DEGREE": [5, 6],  # of the polynomial: relative error 9e-8 or 2e-9 before rounding
    "UNROLL": [1, 2, 4],  # pairs of vectors in flight, each with their own maximum and sum
    "BLOCK": [128, 512, 2048],  # elements between two updates of the maximum (online)
    "STRIP": [32, 128, 512],  # columns per task when the dimension is not the last
    "ROWS": [1, 4, 16],  # rows per task
    "SCHEDULE": ["static", "dynamic"],  # how tasks go to threads
    "GRAIN": [2048, 16384, 131072, 1073741824],  # fewer elements than this run on the calling thread
    "OPT": ["-O2", "-O3"],  # compiler level
}
CONFIG = {
    "OPT": "-O3",
    "METHOD": "keep",
    "EXP_DEGREE": 6,
    "VEC": 8,
    "UNROLL": 1,
    "BLOCK": 512,
    "STRIP": 128,
    "ROWS": 1,
    "SCHEDULE": "static",
    "GRAIN": 16384,
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
typedef uint16_t vh __attribute__((vector_size(VEC * 2)));
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
static inline vf load(const bf16* p) {
  vh h;
  std::memcpy(&h, p, sizeof h);
  vu u = __builtin_convertvector(h, vu) << 16;
  return (vf)u;
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
static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
static inline void store(bf16* p, vf v) {
  vu u = (vu)v;
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u = v != v ? vu{} + 0x7fc0 : u;
  vh h = __builtin_convertvector(u, vh);
  std::memcpy(p, &h, sizeof h);
}
static inline void store_pair(float* p, vf a, vf b) {
  store(p, a);
  store(p + VEC, b);
}
static inline void store_pair(bf16* p, vf a, vf b) {
  vu u = (round_up_half(a) >> 16) | (round_up_half(b) & 0xffff0000);
  std::memcpy(p, &u, sizeof u);
}

// The first `count` elements, all lanes if there are more, the other lanes set to `pad`.
template <class T>
static inline vf load_part(const T* p, int64_t count, float pad) {
  float lanes[VEC];
  for (int k = 0; k < VEC; ++k) lanes[k] = k < count ? widen(p[k]) : pad;
  return load(lanes);
}
template <class T>
static inline void store_part(T* p, int64_t count, vf v) {
  float lanes[VEC];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int k = 0; k < VEC && k < count; ++k) narrow(lanes[k], p + k);
}

static inline float sum_lanes(vf v) {
  float lanes[VEC];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int width = VEC / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  return lanes[0];
}

static inline vf max_of(vf a, vf b) { return a > b ? a : b; }
static inline float max_lanes(vf v) {
  float lanes[VEC];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int width = VEC / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) lanes[k] = lanes[k] > lanes[k + width] ? lanes[k] : lanes[k + width];
  return lanes[0];
}

// e^v for v <= 0 or NaN: 2^n * e^r with |r| <= ln(2)/2 and a minimax polynomial for e^r, whose relative error is 9e-8
// (degree 5) or 2e-9 (degree 6). The scale is applied in two steps so that subnormal results are right too.
static inline vf exp_of(vf v) {
  v = max_of(vf{} - 104.0f, v);  // a NaN stays one
  vf shifted = v * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  vf n = shifted - 12582912.0f;
  vf r = v - n * 0.693359375f - n * -2.12194440e-4f;
#if EXP_DEGREE == 5
  vf q = (((0.00829027221f * r + 0.0418981612f) * r + 0.166676387f) * r + 0.499991477f) * r + 0.999999702f;
#else
  vf q = (((0.00138436072f * r + 0.00837419555f) * r + 0.0416680053f) * r + 0.166664302f) * r + 0.49999994f;
  q = q * r + 1.0f;
#endif
  vf e = q * r + 1.0f;
  typedef int32_t vi __attribute__((vector_size(VEC * 4)));
  vi whole = (vi)shifted - 0x4b400000;
  vi half = whole >> 1;
  return e * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
}

enum { keep, recompute, online };
static const float LOWEST = -std::numeric_limits<float>::infinity();

template <class T>
static float max_of_row(const T* x, int64_t cols) {
  vf top[2 * UNROLL];
  for (int k = 0; k < 2 * UNROLL; ++k) top[k] = vf{} + LOWEST;
  int64_t i = 0;
  auto add = [&](int64_t at, int k) {
    vf a, b;
    load_pair(x + at, a, b);
    top[k] = max_of(top[k], a);
    top[k + 1] = max_of(top[k + 1], b);
  };
  for (; i + 2 * VEC * UNROLL <= cols; i += 2 * VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) add(i + 2 * VEC * k, 2 * k);
  for (; i + 2 * VEC <= cols; i += 2 * VEC) add(i, 0);
  for (; i < cols; i += VEC) top[0] = max_of(top[0], load_part(x + i, cols - i, LOWEST));
  for (int k = 1; k < 2 * UNROLL; ++k) top[0] = max_of(top[0], top[k]);
  return max_lanes(top[0]);
}

// Sum of exp(x - top); `kept`, unless null, receives the exponentials (within a pair in the pair's order).
template <class T>
static float sum_of_row(const T* x, float* kept, float top, int64_t cols) {
  vf sum[2 * UNROLL] = {};
  int64_t i = 0;
  auto add = [&](int64_t at, int k) {
    vf a, b;
    load_pair(x + at, a, b);
    a = exp_of(a - top);
    b = exp_of(b - top);
    sum[k] += a;
    sum[k + 1] += b;
    if (kept) store_pair(kept + at, a, b);
  };
  for (; i + 2 * VEC * UNROLL <= cols; i += 2 * VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) add(i + 2 * VEC * k, 2 * k);
  for (; i + 2 * VEC <= cols; i += 2 * VEC) add(i, 0);
  for (; i < cols; i += VEC) {
    vf e = exp_of(load_part(x + i, cols - i, LOWEST) - top);
    sum[0] += e;
    if (kept) store_part(kept + i, cols - i, e);
  }
  for (int k = 1; k < 2 * UNROLL; ++k) sum[0] += sum[k];
  return sum_lanes(sum[0]);
}

template <class T>
static float online_sum(const T* x, float* top, int64_t cols) {
  float sum = 0;
  *top = LOWEST;
  for (int64_t i = 0; i < cols; i += BLOCK) {
    int64_t count = cols - i < BLOCK ? cols - i : BLOCK;
    float higher = max_of_row(x + i, count);
    if (higher > *top) {
      vf ratio = exp_of(vf{} + (*top - higher));
      sum *= ratio[0];
      *top = higher;
    }
    // Until a finite value is seen, -inf counts as e^-inf = 0 and not as e^(-inf + inf).
    sum += sum_of_row(x + i, (float*)nullptr, *top == LOWEST ? 0.0f : *top, count);
  }
  return sum;
}

template <class T>
static void scale_exp(const T* x, T* y, float top, float scale, int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * VEC <= cols; i += 2 * VEC) {
    vf a, b;
    load_pair(x + i, a, b);
    store_pair(y + i, exp_of(a - top) * scale, exp_of(b - top) * scale);
  }
  for (; i < cols; i += VEC) store_part(y + i, cols - i, exp_of(load_part(x + i, cols - i, LOWEST) - top) * scale);
}

template <class T>
static void scale_kept(const float* kept, T* y, float scale, int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * VEC <= cols; i += 2 * VEC) store_pair(y + i, load(kept + i) * scale, load(kept + i + VEC) * scale);
  for (; i < cols; ++i) narrow(kept[i] * scale, y + i);
}

template <class T>
static void some_rows(const T* x, T* y, float* kept, int64_t from, int64_t to, int64_t cols) {
  for (int64_t r = from; r < to; ++r) {
    const T* in = x + r * cols;
    T* out = y + r * cols;
    float top, sum;
    if (METHOD == online) {
      sum = online_sum(in, &top, cols);
    } else {
      top = max_of_row(in, cols);
      sum = sum_of_row(in, METHOD == keep ? kept : nullptr, top, cols);
    }
    if (METHOD == keep) scale_kept(kept, out, 1.0f / sum, cols);
    else scale_exp(in, out, top, 1.0f / sum, cols);
  }
}

// One vector of columns, walked down `n` rows that lie `step` elements apart; `count` < VEC at the right edge.
template <class T>
static void column_vectors(const T* x, T* y, int64_t n, int64_t step, int count) {
  bool whole = count == VEC;
  vf top = vf{} + LOWEST, sum = {};
  for (int64_t j = 0; j < n; ++j)
    top = max_of(top, whole ? load(x + j * step) : load_part(x + j * step, count, LOWEST));
  for (int64_t j = 0; j < n; ++j)
    sum += exp_of((whole ? load(x + j * step) : load_part(x + j * step, count, LOWEST)) - top);
  vf scale = 1.0f / sum;
  for (int64_t j = 0; j < n; ++j) {
    if (whole) store(y + j * step, exp_of(load(x + j * step) - top) * scale);
    else store_part(y + j * step, count, exp_of(load_part(x + j * step, count, LOWEST) - top) * scale);
  }
}

template <class T>
static void strip(const T* x, T* y, int64_t n, int64_t step, int64_t width) {
  if (width < STRIP) {
    for (int64_t c = 0; c < width; c += VEC)
      column_vectors(x + c, y + c, n, step, int(width - c < VEC ? width - c : VEC));
    return;
  }
  float top[STRIP], sum[STRIP];
  for (int c = 0; c < STRIP; ++c) top[c] = LOWEST, sum[c] = 0;
  for (int64_t j = 0; j < n; ++j)
    for (int c = 0; c < STRIP; c += VEC) store(top + c, max_of(load(top + c), load(x + j * step + c)));
  for (int64_t j = 0; j < n; ++j)
    for (int c = 0; c < STRIP; c += VEC)
      store(sum + c, load(sum + c) + exp_of(load(x + j * step + c) - load(top + c)));
  for (int c = 0; c < STRIP; ++c) sum[c] = 1.0f / sum[c];
  for (int64_t j = 0; j < n; ++j)
    for (int c = 0; c < STRIP; c += VEC)
      store(y + j * step + c, exp_of(load(x + j * step + c) - load(top + c)) * load(sum + c));
}

// x: [outer, n, inner], over the middle dimension.
template <class T>
static int softmax(const T* x, T* y, int64_t outer, int64_t n, int64_t inner) {
  bool alone = outer * n * inner < GRAIN;
  if (inner == 1) {
    int64_t tasks = (outer + ROWS - 1) / ROWS;
#pragma omp parallel if (!alone && tasks > 1)
    {
      std::vector<float> kept(METHOD == keep ? n : 0);
#pragma omp for schedule(SCHEDULE)
      for (int64_t t = 0; t < tasks; ++t) {
        int64_t to = (t + 1) * ROWS < outer ? (t + 1) * ROWS : outer;
        some_rows(x, y, kept.data(), t * ROWS, to, n);
      }
    }
    return 0;
  }
  int64_t strips = (inner + STRIP - 1) / STRIP;
#pragma omp parallel for schedule(SCHEDULE) if (!alone)
  for (int64_t t = 0; t < outer * strips; ++t) {
    int64_t column = t % strips * STRIP, start = t / strips * n * inner + column;
    strip(x + start, y + start, n, inner, inner - column < STRIP ? inner - column : STRIP);
  }
  return 0;
}

extern "C" int softmax_fp32(const float* x, float* y, int64_t outer, int64_t n, int64_t inner) {
  return softmax(x, y, outer, n, inner);
}
extern "C" int softmax_bf16(const bf16* x, bf16* y, int64_t outer, int64_t n, int64_t inner) {
  return softmax(x, y, outer, n, inner);
}
"""


def _flags(config):
    macros = [f"-D{knob}={value}" for knob, value in config.items() if knob != "OPT"]
    # g++ prefers half-wide vectors on many AVX-512 parts; the width is ours to choose.
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [config["OPT"], *wide, *macros]


lib = build(SOURCE, flags=_flags(CONFIG))
FUNCTIONS = {torch.float32: lib.softmax_fp32, torch.bfloat16: lib.softmax_bf16}


def kernel_fn(x, dim=-1):
    """Softmax of x over `dim`, contiguous, in x's shape and dtype.

    Raises: TypeError for a dtype other than fp32 and bf16; IndexError when x has no dimension `dim`.
    """
    function = FUNCTIONS.get(x.dtype)
    if function is None or not x.is_cpu:
        raise TypeError(f"softmax takes fp32 or bf16 on the CPU, not {x.dtype} on {x.device}")
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"softmax over dimension {dim} of a tensor of rank {x.dim()}")
    x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    count = x.numel()
    if count:
        shape = x.shape or (1,)
        n = shape[dim]
        inner = 1
        for size in shape[dim % rank + 1 :]:
            inner *= size
        function(x, out, count // (n * inner), n, inner)
    return out
