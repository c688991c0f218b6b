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
    "VEC": [8, 16, 32],  # floats per vector value
    "METHOD": ["two_pass", "welford"],  # how the variance is taken
    "UNROLL": [1, 2, 4],  # pairs of vectors in flight, each with its own partial statistics
    "ROWS": [1, 4, 16],  # rows per task
    "SCHEDULE": ["static", "dynamic"],  # how tasks go to threads
    "GRAIN": [4096, 32768, 262144, 1073741824],  # fewer elements than this run on the calling thread
    "STREAM": [0, 1],  # 1: write the output past the caches (x86)
    "CACHE_ROW": [0, 1],  # 1: keep the row as fp32 after the first pass, so that bf16 is widened once
    "OPT": ["-O2", "-O3"],  # compiler level
}
CONFIG = {
    "OPT": "-O3",
    "METHOD": "two_pass",
    "VEC": 8,
    "UNROLL": 1,
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
  vf part[2 * UNROLL] = {};
  int64_t i = 0;
  for (; i + 2 * VEC * UNROLL <= cols; i += 2 * VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) {
      vf a, b;
      load_pair(x + i + 2 * VEC * k, a, b);
      part[2 * k] += a;
      part[2 * k + 1] += b;
      if (CACHE_ROW) store_pair<false>(cache + i + 2 * VEC * k, a, b);
    }
  for (; i + 2 * VEC <= cols; i += 2 * VEC) {
    vf a, b;
    load_pair(x + i, a, b);
    part[0] += a;
    part[1] += b;
    if (CACHE_ROW) store_pair<false>(cache + i, a, b);
  }
  float rest = 0;
  for (; i < cols; ++i) {
    float v = widen(x[i]);
    rest += v;
    if (CACHE_ROW) cache[i] = v;
  }
  for (int k = 1; k < 2 * UNROLL; ++k) part[0] += part[k];
  return (sum_lanes(part[0]) + rest) / float(cols);
}

template <class S>
static Stats distances(const S* x, float base, int64_t cols) {
  vf sum[2 * UNROLL] = {}, square[2 * UNROLL] = {};
  int64_t i = 0;
  auto add = [&](int64_t at, int k) {
    vf a, b;
    load_pair(x + at, a, b);
    a -= base, b -= base;
    sum[k] += a, sum[k + 1] += b;
    square[k] += a * a, square[k + 1] += b * b;
  };
  for (; i + 2 * VEC * UNROLL <= cols; i += 2 * VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) add(i + 2 * VEC * k, 2 * k);
  for (; i + 2 * VEC <= cols; i += 2 * VEC) add(i, 0);
  float rest = 0, rest_square = 0;
  for (; i < cols; ++i) {
    float d = widen(x[i]) - base;
    rest += d;
    rest_square += d * d;
  }
  for (int k = 1; k < 2 * UNROLL; ++k) sum[0] += sum[k], square[0] += square[k];
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
  const int PARTS = 2 * UNROLL;
  vf mean[PARTS] = {}, square[PARTS] = {};
  int64_t i = 0, steps = 0;
  for (; i + VEC * PARTS <= cols; i += VEC * PARTS) {
    float share = 1.0f / float(++steps);
    for (int k = 0; k < PARTS; k += 2) {
      vf v[2];
      load_pair(x + i + k * VEC, v[0], v[1]);
      for (int j = 0; j < 2; ++j) {
        vf d = v[j] - mean[k + j];
        mean[k + j] += d * share;
        square[k + j] += d * (v[j] - mean[k + j]);
      }
      if (CACHE_ROW) store_pair<false>(cache + i + k * VEC, v[0], v[1]);
    }
  }
  Moments all = {0, 0, 0};
  auto add = [&all](float v) {
    float d = v - all.mean;
    all.count += 1;
    all.mean += d / all.count;
    all.square += d * (v - all.mean);
  };
  for (; i + 2 * VEC <= cols; i += 2 * VEC) {
    vf a, b;
    load_pair(x + i, a, b);
    for (int k = 0; k < VEC; ++k) add(a[k]), add(b[k]);
    if (CACHE_ROW) store_pair<false>(cache + i, a, b);
  }
  for (; i < cols; ++i) {
    add(widen(x[i]));
    if (CACHE_ROW) cache[i] = widen(x[i]);
  }
  if (steps) {
    Moments lanes[PARTS * VEC];
    for (int k = 0; k < PARTS * VEC; ++k) lanes[k] = {float(steps), mean[k / VEC][k % VEC], square[k / VEC][k % VEC]};
    for (int width = PARTS * VEC / 2; width > 0; width /= 2)
      for (int k = 0; k < width; ++k) lanes[k] = join(lanes[k], lanes[k + width]);
    all = join(lanes[0], all);
  }
  return {all.mean, 0, all.square / float(cols)};
}

template <bool STREAMING, class S, class T>
static void scale_row(const S* x, const T* w, const T* b, T* y, Stats s, float eps, int64_t cols) {
  float scale = 1.0f / std::sqrt(s.variance + eps), shift = -s.delta * scale;
  int64_t i = 0;
  for (; i + 2 * VEC <= cols; i += 2 * VEC) {
    vf even, odd, w0 = vf{} + 1.0f, w1 = w0, b0 = {}, b1 = {};
    load_pair(x + i, even, odd);
    if (w) load_pair(w + i, w0, w1);
    if (b) load_pair(b + i, b0, b1);
    even = (even - s.base) * scale + shift;
    odd = (odd - s.base) * scale + shift;
    store_pair<STREAMING>(y + i, even * w0 + b0, odd * w1 + b1);
  }
  for (; i < cols; ++i) {
    float v = (widen(x[i]) - s.base) * scale + shift;
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
static void some_rows(const T* x, const T* w, const T* b, T* y, float* cache, int64_t from, int64_t to, int64_t cols,
                      float eps) {
  for (int64_t r = from; r < to; ++r) {
    const T* in = x + r * cols;
    Stats s;
    if (METHOD == welford) {
      s = one_pass(in, cache, cols);
    } else {
      float base = mean_of(in, cache, cols);
      s = CACHE_ROW ? distances(cache, base, cols) : distances(in, base, cols);
    }
    if (CACHE_ROW) finish_row(cache, w, b, y + r * cols, s, eps, cols);
    else finish_row(in, w, b, y + r * cols, s, eps, cols);
  }
#if defined(__SSE2__)
  if (STREAM) _mm_sfence();
#endif
}

template <class T>
static int layernorm(const T* x, const T* w, const T* b, T* y, int64_t rows, int64_t cols, double eps) {
  int64_t tasks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel if (tasks > 1 && rows * cols >= GRAIN)
  {
    std::vector<float> cache(CACHE_ROW ? cols : 0);
#pragma omp for schedule(SCHEDULE)
    for (int64_t t = 0; t < tasks; ++t) {
      int64_t to = (t + 1) * ROWS < rows ? (t + 1) * ROWS : rows;
      some_rows(x, w, b, y, cache.data(), t * ROWS, to, cols, float(eps));
    }
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
