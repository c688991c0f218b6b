"""LayerNorm over the last dimension(s): y = (x - mean) / sqrt(variance + eps) * weight + bias.

x: [..., *weight.shape], fp32 or bf16; weight and bias of one shape, same dtype as x, or None. Statistics and scaling
are in fp32, rounded once to the output. The variance is never E[x^2] - E[x]^2, which loses everything when the mean is
large: METHOD "two_pass" sums squared distances from a first mean and corrects that mean by their own sum, "welford"
updates mean and squares in one pass. A row belongs to one thread and has one order of sums, so results repeat bit for
bit.
"""

import platform

import torch

from autokernel.native import build

KERNEL_TYPE = "layernorm"
BACKEND = "cpp"
TUNABLES = {
    "OPT": ["-O2", "-O3"],  # compiler level
    "METHOD": ["two_pass", "welford"],  # how the variance is taken
    "VEC": [8, 16, 32],  # floats per vector value
    "UNROLL": [1, 2, 4],  # vectors in flight, each with its own partial statistics
    "ROWS": [1, 4, 16],  # rows per task
    "SCHEDULE": ["static", "dynamic"],  # how tasks go to threads
    "GRAIN": [4096, 32768, 262144, 1073741824],  # fewer elements than this run on the calling thread
    "STREAM": [0, 1],  # 1: write the output past the caches (x86)
    "CACHE_ROW": [0, 1],  # 1: keep the row as fp32 after the first pass, so that bf16 is widened once
}
CONFIG = {
    "OPT": "-O3",
    "METHOD": "two_pass",
    "VEC": 8,
    "UNROLL": 2,
    "ROWS": 1,
    "SCHEDULE": "static",
    "GRAIN": 32768,
    "STREAM": 0,
    "CACHE_ROW": 0,
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
static inline void store(float* p, vf v) { put<STREAMING>(p, v); }
template <bool STREAMING>
static inline void store(bf16* p, vf v) {
  vu u = (vu)v;
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u = v != v ? vu{} + 0x7fc0 : u;
  put<STREAMING>(p, __builtin_convertvector(u, vh));
}

static inline float sum_lanes(vf v) {
  float lanes[VEC];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int width = VEC / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  return lanes[0];
}

enum { two_pass, welford };

// The mean is `base + delta`: a large base does not round away the small part.
struct Stats { float base, delta, variance; };

template <class T>
static float mean_of(const T* x, float* cache, int64_t cols) {
  vf part[UNROLL] = {};
  int64_t i = 0;
  for (; i + VEC * UNROLL <= cols; i += VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) {
      vf v = load(x + i + k * VEC);
      part[k] += v;
      if (CACHE_ROW) std::memcpy(cache + i + k * VEC, &v, sizeof v);
    }
  float rest = 0;
  for (; i < cols; ++i) {
    float v = widen(x[i]);
    rest += v;
    if (CACHE_ROW) cache[i] = v;
  }
  for (int k = 1; k < UNROLL; ++k) part[0] += part[k];
  return (sum_lanes(part[0]) + rest) / float(cols);
}

template <class S>
static Stats distances(const S* x, float base, int64_t cols) {
  vf sum[UNROLL] = {}, square[UNROLL] = {};
  int64_t i = 0;
  for (; i + VEC * UNROLL <= cols; i += VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) {
      vf d = load(x + i + k * VEC) - base;
      sum[k] += d;
      square[k] += d * d;
    }
  float rest = 0, rest_square = 0;
  for (; i < cols; ++i) {
    float d = widen(x[i]) - base;
    rest += d;
    rest_square += d * d;
  }
  for (int k = 1; k < UNROLL; ++k) sum[0] += sum[k], square[0] += square[k];
  float delta = (sum_lanes(sum[0]) + rest) / float(cols);
  float variance = (sum_lanes(square[0]) + rest_square) / float(cols) - delta * delta;
  return {base, delta, variance < 0 ? 0 : variance};
}

// Count, mean and sum of squared distances of one part of the row, and their union (Chan's formula).
struct Moments { float count, mean, square; };
static inline Moments join(Moments a, Moments b) {
  if (b.count == 0) return a;
  float count = a.count + b.count, d = b.mean - a.mean;
  return {count, a.mean + d * (b.count / count), a.square + b.square + d * d * (a.count * b.count / count)};
}

template <class T>
static Stats one_pass(const T* x, float* cache, int64_t cols) {
  vf mean[UNROLL] = {}, square[UNROLL] = {};
  int64_t i = 0, steps = 0;
  for (; i + VEC * UNROLL <= cols; i += VEC * UNROLL) {
    float share = 1.0f / float(++steps);
    for (int k = 0; k < UNROLL; ++k) {
      vf v = load(x + i + k * VEC);
      vf d = v - mean[k];
      mean[k] += d * share;
      square[k] += d * (v - mean[k]);
      if (CACHE_ROW) std::memcpy(cache + i + k * VEC, &v, sizeof v);
    }
  }
  Moments all = {0, 0, 0};
  for (; i < cols; ++i) {
    float v = widen(x[i]), d = v - all.mean;
    all.count += 1;
    all.mean += d / all.count;
    all.square += d * (v - all.mean);
    if (CACHE_ROW) cache[i] = v;
  }
  if (steps) {
    Moments lanes[UNROLL * VEC];
    for (int k = 0; k < UNROLL * VEC; ++k) lanes[k] = {float(steps), mean[k / VEC][k % VEC], square[k / VEC][k % VEC]};
    for (int width = UNROLL * VEC / 2; width > 0; width /= 2)
      for (int k = 0; k < width; ++k) lanes[k] = join(lanes[k], lanes[k + width]);
    all = join(lanes[0], all);
  }
  return {all.mean, 0, all.square / float(cols)};
}

template <bool STREAMING, class S, class T>
static void scale_row(const S* x, const T* w, const T* b, T* y, Stats s, float eps, int64_t cols) {
  float scale = 1.0f / std::sqrt(s.variance + eps);
  int64_t i = 0;
  for (; i + VEC <= cols; i += VEC) {
    vf v = (load(x + i) - s.base - s.delta) * scale;
    if (w) v *= load(w + i);
    if (b) v += load(b + i);
    store<STREAMING>(y + i, v);
  }
  for (; i < cols; ++i) {
    float v = (widen(x[i]) - s.base - s.delta) * scale;
    if (w) v *= widen(w[i]);
    if (b) v += widen(b[i]);
    narrow(v, y + i);
  }
}

template <class S, class T>
static void finish_row(const S* x, const T* w, const T* b, T* y, Stats s, float eps, int64_t cols) {
  if (STREAM && uintptr_t(y) % 16 == 0) scale_row<true>(x, w, b, y, s, eps, cols);
  else scale_row<false>(x, w, b, y, s, eps, cols);
}

template <class T>
static void some_rows(const T* x, const T* w, const T* b, T* y, int64_t from, int64_t to, int64_t cols, float eps) {
  std::vector<float> cache(CACHE_ROW ? cols : 0);
  for (int64_t r = from; r < to; ++r) {
    const T* in = x + r * cols;
    Stats s;
    if (METHOD == welford) {
      s = one_pass(in, cache.data(), cols);
    } else {
      float base = mean_of(in, cache.data(), cols);
      s = CACHE_ROW ? distances(cache.data(), base, cols) : distances(in, base, cols);
    }
    if (CACHE_ROW) finish_row(cache.data(), w, b, y + r * cols, s, eps, cols);
    else finish_row(in, w, b, y + r * cols, s, eps, cols);
  }
#if defined(__SSE2__)
  if (STREAM) _mm_sfence();
#endif
}

template <class T>
static int layernorm(const T* x, const T* w, const T* b, T* y, int64_t rows, int64_t cols, double eps) {
  if (rows < 2 || rows * cols < GRAIN) {
    some_rows(x, w, b, y, 0, rows, cols, float(eps));
    return 0;
  }
  int64_t tasks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(SCHEDULE)
  for (int64_t t = 0; t < tasks; ++t) {
    int64_t to = (t + 1) * ROWS < rows ? (t + 1) * ROWS : rows;
    some_rows(x, w, b, y, t * ROWS, to, cols, float(eps));
  }
  return 0;
}

extern "C" int layernorm_fp32(const float* x, const float* w, const float* b, float* y, int64_t rows, int64_t cols,
                              double eps) {
  return layernorm(x, w, b, y, rows, cols, eps);
}
extern "C" int layernorm_bf16(const bf16* x, const bf16* w, const bf16* b, bf16* y, int64_t rows, int64_t cols,
                              double eps) {
  return layernorm(x, w, b, y, rows, cols, eps);
}
"""


def _flags(config):
    macros = [f"-D{knob}={value}" for knob, value in config.items() if knob != "OPT"]
    # g++ prefers half-wide vectors on many AVX-512 parts; the width is ours to choose.
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [config["OPT"], *wide, *macros]


lib = build(SOURCE, flags=_flags(CONFIG))
FUNCTIONS = {torch.float32: lib.layernorm_fp32, torch.bfloat16: lib.layernorm_bf16}


def kernel_fn(x, weight, bias, eps=1e-5):
    """The normalized x, contiguous, in x's dtype; weight's shape gives the normalized dimensions (None: the last).

    Raises: TypeError for a dtype other than fp32 and bf16; ValueError when weight or bias does not fit x.
    """
    function = FUNCTIONS.get(x.dtype)
    if function is None or not x.is_cpu:
        raise TypeError(f"layernorm takes fp32 or bf16 on the CPU, not {x.dtype} on {x.device}")
    shape = x.shape[-1:] if weight is None else weight.shape
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(f"weight has shape {list(shape)}, x has {list(x.shape)}")
    x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    count = x.numel()
    if count:
        weight, bias = _parameter(weight, x, shape), _parameter(bias, x, shape)
        cols = shape.numel()
        function(x, weight, bias, out, count // cols, cols, float(eps))
    return out


def _parameter(value, x, shape):
    if value is None:
        return None
    if value.dtype != x.dtype or value.device != x.device:
        raise TypeError(f"weight or bias is {value.dtype} on {value.device}, x is {x.dtype} on {x.device}")
    if value.shape != shape:
        raise ValueError(f"weight or bias has shape {list(value.shape)}, expected {list(shape)}")
    return value.contiguous()
