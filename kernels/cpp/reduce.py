"""Sum, mean or maximum over one, several or all dimensions, which the result no longer has.

x: any shape, fp32 or bf16. Short runs are added in fp32, runs in fp64, rounded once to x's dtype; the maximum is NaN
where any element is, as PyTorch's. Over the last dimensions each row is one sum; over others a strip of columns is
walked down. Long sums are cut at places that depend on the shape alone, not on the number of threads, and joined in
order, so results repeat bit for bit.
"""

import platform

import torch

from autokernel.native import build

KERNEL_TYPE = "reduce"
BACKEND = "cpp"
TUNABLES = {
    "VEC": [8, 16, 32],  # floats per vector value
    "UNROLL": [1, 2, 4, 8],  # pairs of vectors in flight along a row; rows at once in a strip
    "RUN": [512, 2048, 8192],  # elements of a row added in fp32 before they join the fp64 sum
    "SPLIT": [32768, 262144],  # elements per task in one row
    "STRIP": [32, 128, 512],  # columns per task
    "DEPTH": [64, 256, 1024],  # rows per task in a strip, added in fp32
    "ROWS": [1, 8, 32],  # rows per task
    "SCHEDULE": ["static", "dynamic"],  # how tasks go to threads
    "GRAIN": [4096, 32768, 262144, 1073741824],  # fewer elements than this run on the calling thread
    "OPT": ["-O2", "-O3"],  # compiler level
}
CONFIG = {
    "OPT": "-O3",
    "VEC": 8,
    "UNROLL": 2,
    "RUN": 2048,
    "SPLIT": 262144,
    "STRIP": 128,
    "DEPTH": 256,
    "ROWS": 8,
    "SCHEDULE": "static",
    "GRAIN": 32768,
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
static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

struct Sum {
  static float start() { return 0; }
  static inline float join(float a, float b) { return a + b; }
  static inline double join(double a, double b) { return a + b; }
  static inline vf join(vf a, vf b) { return a + b; }
  static const bool LOSES_NAN = false;
  static inline vf join_numbers(vf a, vf b) { return a + b; }
};
struct Max {  // NaN wins
  static float start() { return -std::numeric_limits<float>::infinity(); }
  static inline float join(float a, float b) { return b > a || b != b ? b : a; }
  static inline double join(double a, double b) { return b > a || b != b ? b : a; }
  static inline vf join(vf a, vf b) { return (b > a) | (b != b) ? b : a; }
  static const bool LOSES_NAN = true;  // what a single instruction gives
  static inline vf join_numbers(vf a, vf b) { return b > a ? b : a; }
};

template <class Op, class T>
static float of_run(const T* x, int64_t count) {
  vf part[2 * UNROLL];
  vu nan[2 * UNROLL] = {};
  for (int k = 0; k < 2 * UNROLL; ++k) part[k] = vf{} + Op::start();
  int64_t i = 0;
  auto add = [&](int64_t at, int k) {
    vf v[2];
    load_pair(x + at, v[0], v[1]);
    for (int j = 0; j < 2; ++j) {
      part[k + j] = Op::join_numbers(part[k + j], v[j]);
      if (Op::LOSES_NAN) {  // without its sign a NaN is above 0x7f800000, infinity
        vu doubled = (vu)v[j] + (vu)v[j];
        nan[k + j] = doubled > nan[k + j] ? doubled : nan[k + j];
      }
    }
  };
  for (; i + 2 * VEC * UNROLL <= count; i += 2 * VEC * UNROLL)
    for (int k = 0; k < UNROLL; ++k) add(i + 2 * VEC * k, 2 * k);
  for (; i + 2 * VEC <= count; i += 2 * VEC) add(i, 0);
  float rest = Op::start();
  for (; i < count; ++i) rest = Op::join(rest, widen(x[i]));
  for (int k = 1; k < 2 * UNROLL; ++k) {
    part[0] = Op::join(part[0], part[k]);
    nan[0] = nan[k] > nan[0] ? nan[k] : nan[0];
  }
  float lanes[VEC];
  uint32_t nans[VEC];
  std::memcpy(lanes, &part[0], sizeof lanes);
  std::memcpy(nans, &nan[0], sizeof nans);
  for (int width = VEC / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) {
      lanes[k] = Op::join(lanes[k], lanes[k + width]);
      nans[k] = nans[k] > nans[k + width] ? nans[k] : nans[k + width];
    }
  if (nans[0] > 0xff000000) return std::numeric_limits<float>::quiet_NaN();
  return Op::join(lanes[0], rest);
}

template <class Op, class T>
static double of_row(const T* x, int64_t count) {
  double all = Op::start();
  for (int64_t i = 0; i < count; i += RUN) {
    int64_t length = count - i < RUN ? count - i : RUN;
    all = Op::join(all, double(of_run<Op>(x + i, length)));
  }
  return all;
}

// `rows` rows of `width` columns, `step` apart, into `all`.
template <class Op, class T>
static void of_strip(const T* x, int64_t rows, int64_t step, int64_t width, float* all) {
  for (int64_t c = 0; c < width; ++c) all[c] = Op::start();
  int64_t whole = width - width % VEC, j = 0;
  for (; j < rows; j += UNROLL) {
    const T* p = x + j * step;
    int together = rows - j < UNROLL ? int(rows - j) : UNROLL;
    if (together == UNROLL) {
      for (int64_t c = 0; c < whole; c += VEC) {
        vf v = load(p + c);
        for (int k = 1; k < UNROLL; ++k) v = Op::join(v, load(p + k * step + c));
        store(all + c, Op::join(load(all + c), v));
      }
    } else {
      for (int k = 0; k < together; ++k)
        for (int64_t c = 0; c < whole; c += VEC) store(all + c, Op::join(load(all + c), load(p + k * step + c)));
    }
    for (int k = 0; k < together; ++k)
      for (int64_t c = whole; c < width; ++c) all[c] = Op::join(all[c], widen(p[k * step + c]));
  }
}

template <class Op, class T>
static void over_rows(const T* x, T* y, int64_t outer, int64_t n, double divisor, bool alone) {
  int64_t cuts = n > SPLIT ? (n + SPLIT - 1) / SPLIT : 1, parts = outer * cuts, tasks = (parts + ROWS - 1) / ROWS;
  if (cuts > 1) tasks = parts;
  int64_t per_task = cuts > 1 ? 1 : ROWS;
  std::vector<double> partial(cuts > 1 ? parts : 0);
#pragma omp parallel for schedule(SCHEDULE) if (!alone && tasks > 1)
  for (int64_t t = 0; t < tasks; ++t)
    for (int64_t p = t * per_task; p < parts && p < (t + 1) * per_task; ++p) {
      int64_t from = p % cuts * SPLIT, count = cuts > 1 && n - from > SPLIT ? SPLIT : n - from;
      double all = of_row<Op>(x + p / cuts * n + from, count);
      if (cuts > 1) partial[p] = all;
      else narrow(float(all / divisor), y + p);
    }
  if (cuts == 1) return;
  for (int64_t o = 0; o < outer; ++o) {
    double all = Op::start();
    for (int64_t c = 0; c < cuts; ++c) all = Op::join(all, partial[o * cuts + c]);
    narrow(float(all / divisor), y + o);
  }
}

template <class Op, class T>
static void over_columns(const T* x, T* y, int64_t outer, int64_t n, int64_t inner, double divisor, bool alone) {
  int64_t cuts = n > DEPTH ? (n + DEPTH - 1) / DEPTH : 1, strips = (inner + STRIP - 1) / STRIP;
  std::vector<float> partial(cuts > 1 ? outer * cuts * inner : 0);
  int64_t tasks = outer * cuts * strips;
#pragma omp parallel for schedule(SCHEDULE) if (!alone && tasks > 1)
  for (int64_t t = 0; t < tasks; ++t) {
    int64_t column = t % strips * STRIP, cut = t / strips % cuts, o = t / strips / cuts;
    int64_t width = inner - column < STRIP ? inner - column : STRIP;
    int64_t rows = cuts > 1 && n - cut * DEPTH > DEPTH ? DEPTH : n - cut * DEPTH;
    float local[STRIP];
    float* all = cuts > 1 ? partial.data() + (o * cuts + cut) * inner + column : local;
    of_strip<Op>(x + (o * n + cut * DEPTH) * inner + column, rows, inner, width, all);
    if (cuts == 1)
      for (int64_t c = 0; c < width; ++c) narrow(float(all[c] / divisor), y + o * inner + column + c);
  }
  if (cuts == 1) return;
  std::vector<double> all(inner);
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t c = 0; c < inner; ++c) all[c] = Op::start();
    for (int64_t cut = 0; cut < cuts; ++cut)
      for (int64_t c = 0; c < inner; ++c) all[c] = Op::join(all[c], double(partial[(o * cuts + cut) * inner + c]));
    for (int64_t c = 0; c < inner; ++c) narrow(float(all[c] / divisor), y + o * inner + c);
  }
}

// x: [outer, n, inner], over the middle dimension; kind 0 sum, 1 mean, 2 maximum.
template <class T>
static int reduce(const T* x, T* y, int64_t outer, int64_t n, int64_t inner, int64_t kind) {
  double divisor = kind == 1 ? double(n) : 1.0;
  bool alone = outer * n * inner < GRAIN;
  if (inner == 1 && kind == 2) over_rows<Max>(x, y, outer, n, divisor, alone);
  else if (inner == 1) over_rows<Sum>(x, y, outer, n, divisor, alone);
  else if (kind == 2) over_columns<Max>(x, y, outer, n, inner, divisor, alone);
  else over_columns<Sum>(x, y, outer, n, inner, divisor, alone);
  return 0;
}

extern "C" int reduce_fp32(const float* x, float* y, int64_t outer, int64_t n, int64_t inner, int64_t kind) {
  return reduce(x, y, outer, n, inner, kind);
}
extern "C" int reduce_bf16(const bf16* x, bf16* y, int64_t outer, int64_t n, int64_t inner, int64_t kind) {
  return reduce(x, y, outer, n, inner, kind);
}
"""


def _flags(config):
    macros = [f"-D{knob}={value}" for knob, value in config.items() if knob != "OPT"]
    # g++ prefers half-wide vectors on many AVX-512 parts; the width is ours to choose.
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [config["OPT"], *wide, *macros]


lib = build(SOURCE, flags=_flags(CONFIG))
FUNCTIONS = {torch.float32: lib.reduce_fp32, torch.bfloat16: lib.reduce_bf16}
KINDS = {"sum": 0, "mean": 1, "max": 2}


def kernel_fn(x, dim=-1, op="sum"):
    """x reduced over `dim` (an int, a tuple, or None or () for all), contiguous, in x's dtype.

    Raises: TypeError for a dtype other than fp32 and bf16; ValueError for an unknown op or a dimension named twice;
    IndexError when x has no such dimension, or for the maximum of nothing.
    """
    function = FUNCTIONS.get(x.dtype)
    if function is None or not x.is_cpu:
        raise TypeError(f"reduce takes fp32 or bf16 on the CPU, not {x.dtype} on {x.device}")
    if op not in KINDS:
        raise ValueError(f"op is {op!r}, expected one of {', '.join(KINDS)}")
    dims = _dims(x, dim)
    kept = [d for d in range(x.dim()) if d not in dims]
    if dims and dims[-1] - dims[0] >= len(dims):  # not neighbours: bring them together at the end
        x = x.permute(*kept, *dims)
        dims = range(len(kept), x.dim())
        kept = range(len(kept))
    x = x.contiguous()
    shape = x.shape
    outer = n = inner = 1
    for d, size in enumerate(shape):
        if d in dims:
            n *= size
        elif d < dims[0]:
            outer *= size
        else:
            inner *= size
    if op == "max" and n == 0:
        raise IndexError(f"the maximum over {dim} of shape {list(shape)} has no elements")
    out = torch.empty([shape[d] for d in kept], dtype=x.dtype)
    if outer * inner:
        function(x, out, outer, n, inner, KINDS[op])
    return out


def _dims(x, dim):
    """The dimensions to reduce, ascending and not negative."""
    rank = x.dim()
    if dim is None or dim == () or dim == []:
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    if any(not -max(rank, 1) <= d < max(rank, 1) for d in dims):
        raise IndexError(f"reduce over {dim} of a tensor of rank {rank}")
    dims = sorted(d % rank for d in dims) if rank else []
    if len(set(dims)) < len(dims):
        raise ValueError(f"{dim} names a dimension twice")
    return dims
