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
    "OPT": ["-O2", "-O3"],  # compiler level
    "VEC": [8, 16, 32],  # floats per vector value
    "UNROLL": [1, 2, 4],  # vectors in flight, each with its own partial sum
    "ROWS": [1, 4, 16],  # rows per task
    "SCHEDULE": ["static", "dynamic"],  # how tasks go to threads
    "GRAIN": [4096, 32768, 262144, 1073741824],  # fewer elements than this run on the calling thread
    "STREAM": [0, 1],  # 1: write the output past the caches (x86)
    "CACHE_ROW": [0, 1],  # 1: keep the row as fp32 for the second pass, so that bf16 is widened once
    "PREFETCH": [0, 1],  # 1: fetch the next row's lines during the second pass
}
CONFIG = {
    "OPT": "-O3",
    "VEC": 8,
    "UNROLL": 2,
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

template <class T>
static float sum_of_squares(const T* x, float* cache, int64_t cols) {
  vf part[UNROLL] = {};
  int64_t i = 0;
  for (; i + VEC * UNROLL <= cols; i += VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) {
      vf v = load(x + i + k * VEC);
      part[k] += v * v;
      if (CACHE_ROW) std::memcpy(cache + i + k * VEC, &v, sizeof v);
    }
  float rest = 0;
  for (; i < cols; ++i) {
    float v = widen(x[i]);
    rest += v * v;
    if (CACHE_ROW) cache[i] = v;
  }
  for (int k = 1; k < UNROLL; ++k) part[0] += part[k];
  float lanes[VEC];
  std::memcpy(lanes, &part[0], sizeof lanes);
  for (int width = VEC / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  return lanes[0] + rest;
}

template <bool STREAMING, class S, class T>
static void scale_row(const S* x, const T* w, T* y, float scale, int64_t cols, const char* next, int64_t next_bytes) {
  int64_t i = 0;
  for (; i + VEC <= cols; i += VEC) {
    if (PREFETCH && i * int64_t(sizeof(T)) < next_bytes) __builtin_prefetch(next + i * sizeof(T));
    vf v = load(x + i) * scale;
    if (w) v *= load(w + i);
    store<STREAMING>(y + i, v);
  }
  for (; i < cols; ++i) {
    float v = widen(x[i]) * scale;
    narrow(w ? v * widen(w[i]) : v, y + i);
  }
}

template <class T>
static void some_rows(const T* x, const T* w, T* y, int64_t from, int64_t to, int64_t rows, int64_t cols, double eps) {
  std::vector<float> cache(CACHE_ROW ? cols : 0);
  for (int64_t r = from; r < to; ++r) {
    const T* in = x + r * cols;
    T* out = y + r * cols;
    float mean = sum_of_squares(in, cache.data(), cols) / float(cols);
    float scale = 1.0f / std::sqrt(mean + float(eps));
    const char* next = (const char*)(in + cols);
    int64_t next_bytes = r + 1 < rows ? cols * int64_t(sizeof(T)) : 0;
    bool streaming = STREAM && uintptr_t(out) % 16 == 0;
    if (streaming && CACHE_ROW) scale_row<true>(cache.data(), w, out, scale, cols, next, next_bytes);
    else if (streaming) scale_row<true>(in, w, out, scale, cols, next, next_bytes);
    else if (CACHE_ROW) scale_row<false>(cache.data(), w, out, scale, cols, next, next_bytes);
    else scale_row<false>(in, w, out, scale, cols, next, next_bytes);
  }
#if defined(__SSE2__)
  if (STREAM) _mm_sfence();
#endif
}

template <class T>
static int rmsnorm(const T* x, const T* w, T* y, int64_t rows, int64_t cols, double eps) {
  if (rows < 2 || rows * cols < GRAIN) {
    some_rows(x, w, y, 0, rows, rows, cols, eps);
    return 0;
  }
  int64_t tasks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(SCHEDULE)
  for (int64_t t = 0; t < tasks; ++t) {
    int64_t to = (t + 1) * ROWS < rows ? (t + 1) * ROWS : rows;
    some_rows(x, w, y, t * ROWS, to, rows, cols, eps);
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
