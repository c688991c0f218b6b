"""RMSNorm over the last dimension(s): y = x / sqrt(mean(x^2) + eps) * weight.

x: [..., *weight.shape], fp32 or bf16; weight: same dtype, or None. Sums and the scaling are in fp32, rounded once to
the output. Each row is read twice (sum of squares, then scale), the second time from cache; rows are shared out to
threads, and a row's sum has one fixed order, so results repeat bit for bit.
"""

import platform

import torch

from autokernel.native import build

KERNEL_TYPE = "rmsnorm"
BACKEND = "cpp"
TUNABLES = {
    "VEC": [8, 16, 32],  # floats per vector value
    "UNROLL": [1, 2, 4],  # pairs of vectors in flight, each with its own partial sums
    "ROWS": [1, 4, 16],  # rows per task
    "SCHEDULE": ["static", "dynamic"],  # how tasks go to threads
    "GRAIN": [4096, 32768, 262144, 1073741824],  # fewer elements than this run on the calling thread
    "STREAM": [0, 1],  # 1: write the output past the caches (x86)
    "CACHE_ROW": [0, 1],  # 1: keep the row as fp32 for the second pass, so that bf16 is widened once
    "PREFETCH": [0, 1],  # 1: fetch the next row's lines during the second pass
    "OPT": ["-O2", "-O3"],  # compiler level
}
CONFIG = {
    "OPT": "-O3",
    "VEC": 8,
    "UNROLL": 1,
    "ROWS": 1,
    "SCHEDULE": "static",
    "GRAIN": 32768,
    "STREAM": 0,
    "CACHE_ROW": 0,
    "PREFETCH": 0,
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

template <class T>
static float sum_of_squares(const T* x, float* cache, int64_t cols) {
  vf part[2 * UNROLL] = {};
  int64_t i = 0;
  for (; i + 2 * VEC * UNROLL <= cols; i += 2 * VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) {
      vf a, b;
      load_pair(x + i + 2 * VEC * k, a, b);
      part[2 * k] += a * a;
      part[2 * k + 1] += b * b;
      if (CACHE_ROW) store_pair<false>(cache + i + 2 * VEC * k, a, b);
    }
  for (; i + 2 * VEC <= cols; i += 2 * VEC) {
    vf a, b;
    load_pair(x + i, a, b);
    part[0] += a * a;
    part[1] += b * b;
    if (CACHE_ROW) store_pair<false>(cache + i, a, b);
  }
  float rest = 0;
  for (; i < cols; ++i) {
    float v = widen(x[i]);
    rest += v * v;
    if (CACHE_ROW) cache[i] = v;
  }
  for (int k = 1; k < 2 * UNROLL; ++k) part[0] += part[k];
  return sum_lanes(part[0]) + rest;
}

template <bool STREAMING, class S, class T>
static void scale_row(const S* x, const T* w, T* y, float scale, int64_t cols, const char* next, int64_t next_bytes) {
  int64_t i = 0;
  for (; i + 2 * VEC <= cols; i += 2 * VEC) {
    if (PREFETCH && i * int64_t(sizeof(T)) < next_bytes) __builtin_prefetch(next + i * sizeof(T));
    vf a, b, wa = vf{} + 1.0f, wb = wa;
    load_pair(x + i, a, b);
    if (w) load_pair(w + i, wa, wb);
    store_pair<STREAMING>(y + i, a * scale * wa, b * scale * wb);
  }
  for (; i < cols; ++i) {
    float v = widen(x[i]) * scale;
    narrow(w ? v * widen(w[i]) : v, y + i);
  }
}

template <class T>
static void some_rows(const T* x, const T* w, T* y, float* cache, int64_t from, int64_t to, int64_t rows, int64_t cols,
                      double eps) {
  for (int64_t r = from; r < to; ++r) {
    const T* in = x + r * cols;
    T* out = y + r * cols;
    float mean = sum_of_squares(in, cache, cols) / float(cols);
    float scale = 1.0f / std::sqrt(mean + float(eps));
    const char* next = (const char*)(in + cols);
    int64_t next_bytes = r + 1 < rows ? cols * int64_t(sizeof(T)) : 0;
    bool streaming = STREAM && uintptr_t(out) % 16 == 0;
    if (streaming && CACHE_ROW) scale_row<true>(cache, w, out, scale, cols, next, next_bytes);
    else if (streaming) scale_row<true>(in, w, out, scale, cols, next, next_bytes);
    else if (CACHE_ROW) scale_row<false>(cache, w, out, scale, cols, next, next_bytes);
    else scale_row<false>(in, w, out, scale, cols, next, next_bytes);
  }
#if defined(__SSE2__)
  if (STREAM) _mm_sfence();
#endif
}

template <class T>
static int rmsnorm(const T* x, const T* w, T* y, int64_t rows, int64_t cols, double eps) {
  int64_t tasks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel if (tasks > 1 && rows * cols >= GRAIN)
  {
    std::vector<float> cache(CACHE_ROW ? cols : 0);
#pragma omp for schedule(SCHEDULE)
    for (int64_t t = 0; t < tasks; ++t) {
      int64_t to = (t + 1) * ROWS < rows ? (t + 1) * ROWS : rows;
      some_rows(x, w, y, cache.data(), t * ROWS, to, rows, cols, eps);
    }
  }
  return 0;
}

extern "C" int rmsnorm_fp32(const float* x, const float* w, float* y, int64_t rows, int64_t cols, double eps) {
  return rmsnorm(x, w, y, rows, cols, eps);
}
extern "C" int rmsnorm_bf16(const bf16* x, const bf16* w, bf16* y, int64_t rows, int64_t cols, double eps) {
  return rmsnorm(x, w, y, rows, cols, eps);
}
"""


def _flags(config):
    macros = [f"-D{knob}={value}" for knob, value in config.items() if knob != "OPT"]
    # g++ prefers half-wide vectors on many AVX-512 parts; the width is ours to choose.
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [config["OPT"], *wide, *macros]


lib = build(SOURCE, flags=_flags(CONFIG))
FUNCTIONS = {torch.float32: lib.rmsnorm_fp32, torch.bfloat16: lib.rmsnorm_bf16}


def kernel_fn(x, weight, eps=1e-6):
    """The normalized x, contiguous, in x's dtype; weight's shape gives the normalized dimensions (None: the last).

    Raises: TypeError for a dtype other than fp32 and bf16; ValueError when weight does not fit x.
    """
    function = FUNCTIONS.get(x.dtype)
    if function is None or not x.is_cpu:
        raise TypeError(f"rmsnorm takes fp32 or bf16 on the CPU, not {x.dtype} on {x.device}")
    shape = x.shape[-1:]
    if weight is not None:
        shape = weight.shape
        if weight.dtype != x.dtype or weight.device != x.device:
            raise TypeError(f"weight is {weight.dtype} on {weight.device}, x is {x.dtype} on {x.device}")
        weight = weight.contiguous()
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(f"weight has shape {list(shape)}, x has {list(x.shape)}")
    x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    count = x.numel()
    if count:
        cols = shape.numel()
        function(x, weight, out, count // cols, cols, float(eps))
    return out
