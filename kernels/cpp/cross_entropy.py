"""Cross entropy of class indices: log(sum(exp(logits))) - logits[target], then none, mean or sum over the rows.

logits: [rows, classes], [rows, classes, ...] or [classes], fp32 or bf16; targets: int64 without the class dimension.
All in fp32 with the maximum subtracted, the reduction in fp64; the result has the logits' dtype. Logits are read from
memory once: each block of BLOCK elements is taken while it is in cache, first its maximum, then its exponentials
(the largest BLOCK takes the whole row's maximum first). A row belongs to one thread and rows are added in order, so
results repeat bit for bit.
"""

import platform

import torch

from autokernel.native import build

KERNEL_TYPE = "cross_entropy"
BACKEND = "cpp"
TUNABLES = {
    "VEC": [8, 16, 32],  # floats per vector value
    "BLOCK": [256, 1024, 4096, 1073741824],  # elements between two updates of the maximum
    "EXP_DEGREE": [5, 6],  # of the polynomial: relative error 9e-8 or 2e-9 before rounding
    "UNROLL": [1, 2, 4],  # pairs of vectors in flight, each with their own maximum and sum
    "PREFETCH": [0, 512, 2048],  # bytes fetched ahead while the maximum is taken
    "ROWS": [1, 4, 16],  # rows per task
    "SCHEDULE": ["static", "dynamic"],  # how tasks go to threads
    "GRAIN": [2048, 16384, 131072, 1073741824],  # fewer elements than this run on the calling thread
    "OPT": ["-O2", "-O3"],  # compiler level
}
CONFIG = {
    "OPT": "-O3",
    "BLOCK": 1073741824,
    "EXP_DEGREE": 6,
    "VEC": 8,
    "UNROLL": 1,
    "PREFETCH": 0,
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

// The first `count` elements, all lanes if there are more, the other lanes set to `pad`.
template <class T>
static inline vf load_part(const T* p, int64_t count, float pad) {
  float lanes[VEC];
  for (int k = 0; k < VEC; ++k) lanes[k] = k < count ? widen(p[k]) : pad;
  return load(lanes);
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

static const float LOWEST = -std::numeric_limits<float>::infinity();

template <class T>
static float max_of_block(const T* x, int64_t cols) {
  vf top[2 * UNROLL];
  for (int k = 0; k < 2 * UNROLL; ++k) top[k] = vf{} + LOWEST;
  int64_t i = 0;
  auto add = [&](int64_t at, int k) {
    if (PREFETCH) __builtin_prefetch((const char*)(x + at) + PREFETCH);
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

template <class T>
static float sum_of_block(const T* x, float top, int64_t cols) {
  vf sum[2 * UNROLL] = {};
  int64_t i = 0;
  auto add = [&](int64_t at, int k) {
    vf a, b;
    load_pair(x + at, a, b);
    sum[k] += exp_of(a - top);
    sum[k + 1] += exp_of(b - top);
  };
  for (; i + 2 * VEC * UNROLL <= cols; i += 2 * VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) add(i + 2 * VEC * k, 2 * k);
  for (; i + 2 * VEC <= cols; i += 2 * VEC) add(i, 0);
  for (; i < cols; i += VEC) sum[0] += exp_of(load_part(x + i, cols - i, LOWEST) - top);
  for (int k = 1; k < 2 * UNROLL; ++k) sum[0] += sum[k];
  return sum_lanes(sum[0]);
}

template <class T>
static float loss_of_row(const T* x, int64_t target, int64_t cols) {
  float top = LOWEST, sum = 0;
  for (int64_t i = 0; i < cols; i += BLOCK) {
    int64_t count = cols - i < BLOCK ? cols - i : BLOCK;
    float higher = max_of_block(x + i, count);
    if (higher > top) {
      vf ratio = exp_of(vf{} + (top - higher));
      sum *= ratio[0];
      top = higher;
    }
    // Until a finite value is seen, -inf counts as e^-inf = 0 and not as e^(-inf + inf).
    sum += sum_of_block(x + i, top == LOWEST ? 0.0f : top, count);
  }
  return std::log(sum) + (top - widen(x[target]));
}

enum { none, mean, sum };

// y: [rows] for `none`, else one value. Returns 1, having read no logit out of bounds, when a target is no class.
template <class T>
static int cross_entropy(const T* x, const int64_t* targets, T* y, int64_t rows, int64_t cols, int64_t ignored,
                         int64_t reduction) {
  int64_t counted = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (targets[r] == ignored) continue;
    if (targets[r] < 0 || targets[r] >= cols) return 1;
    ++counted;
  }
  std::vector<float> losses(rows);
  int64_t tasks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(SCHEDULE) if (tasks > 1 && rows * cols >= GRAIN)
  for (int64_t t = 0; t < tasks; ++t)
    for (int64_t r = t * ROWS; r < rows && r < (t + 1) * ROWS; ++r)
      losses[r] = targets[r] == ignored ? 0.0f : loss_of_row(x + r * cols, targets[r], cols);
  if (reduction == none) {
    for (int64_t r = 0; r < rows; ++r) narrow(losses[r], y + r);
    return 0;
  }
  double total = 0;
  for (int64_t r = 0; r < rows; ++r) total += losses[r];
  // No row counted: 0 / 0, as PyTorch.
  narrow(float(reduction == mean ? total / double(counted) : total), y);
  return 0;
}

extern "C" int cross_entropy_fp32(const float* x, const int64_t* targets, float* y, int64_t rows, int64_t cols,
                                  int64_t ignored, int64_t reduction) {
  return cross_entropy(x, targets, y, rows, cols, ignored, reduction);
}
extern "C" int cross_entropy_bf16(const bf16* x, const int64_t* targets, bf16* y, int64_t rows, int64_t cols,
                                  int64_t ignored, int64_t reduction) {
  return cross_entropy(x, targets, y, rows, cols, ignored, reduction);
}
"""


def _flags(config):
    macros = [f"-D{knob}={value}" for knob, value in config.items() if knob != "OPT"]
    # g++ prefers half-wide vectors on many AVX-512 parts; the width is ours to choose.
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [config["OPT"], *wide, *macros]


lib = build(SOURCE, flags=_flags(CONFIG))
FUNCTIONS = {torch.float32: lib.cross_entropy_fp32, torch.bfloat16: lib.cross_entropy_bf16}
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    """The loss in the logits' dtype: a scalar, or targets' shape for reduction "none".

    Raises: TypeError for logits other than fp32 and bf16 or targets other than int64; ValueError for shapes that do
    not fit or an unknown reduction; IndexError for a target that is no class and not `ignore_index`.
    """
    function = FUNCTIONS.get(logits.dtype)
    if function is None or not logits.is_cpu:
        raise TypeError(f"cross_entropy takes fp32 or bf16 on the CPU, not {logits.dtype} on {logits.device}")
    if targets.dtype != torch.int64 or not targets.is_cpu:
        raise TypeError(f"targets must be int64 class indices on the CPU, not {targets.dtype} on {targets.device}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    axis = 1 if logits.dim() > 1 else 0
    if logits.dim() == 0 or logits.shape[:axis] + logits.shape[axis + 1 :] != targets.shape:
        raise ValueError(f"logits {list(logits.shape)} do not fit targets {list(targets.shape)}")
    classes = logits.shape[axis]
    if logits.dim() > 2:
        logits = logits.movedim(1, -1)
    logits, targets = logits.contiguous(), targets.contiguous()
    out = torch.empty(targets.shape if reduction == "none" else (), dtype=logits.dtype)
    try:
        function(logits, targets, out, targets.numel(), classes, ignore_index, REDUCTIONS[reduction])
    except RuntimeError:
        raise IndexError(f"a target is neither in [0, {classes}) nor {ignore_index}, the ignored one") from None
    return out
