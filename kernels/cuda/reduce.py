"""Sum, mean or maximum over one, several or all dimensions, which the result no longer has.

x: any shape and strides, fp32, bf16 or fp16. Values are widened to fp32, joined in fp32 in an order that the shape and
the address fix, and rounded once to x's dtype; the maximum is NaN where any element is, as PyTorch's.

The work is bound by reading x once, so everything serves to keep many 16-byte loads in flight:

* The dimensions are sorted by stride and merged into a few kept and a few reduced ones. The one with the smallest
  stride decides between two kernels.
* `rows` (a reduced dimension is innermost): a group of threads, from one thread to a block, shares an output. Each
  thread issues UNROLL loads before it uses the first. A run that starts or ends off a 16-byte boundary has its ragged
  ends read by element, so odd lengths and sliced views keep the wide loads.
* `columns` (a kept dimension is innermost): each lane owns neighbouring outputs and walks down the reduced dimensions;
  the rows of lanes of a block are joined through shared memory.
* Too few outputs to fill the GPU: each is split over several blocks, which leave fp32 partial results in a workspace
  that a second launch of `columns` joins in order. No atomics, so results repeat bit for bit.
"""

import array
import functools
import math

import torch

from autokernel.native import build
from autokernel.target import target_of

KERNEL_TYPE = "reduce"
BACKEND = "cuda"
TUNABLES = {
    "BLOCK": [128, 256, 512],  # threads per block
    "GROUP": [0, 1, 2, 4, 8, 16, 32, 64, 128],  # threads per output in `rows`; 0: by the length, see _group
    "UNROLL": [2, 4, 8, 16],  # 16-byte loads in flight per thread in `rows`
    "COLUMN_UNROLL": [2, 4, 8],  # the same in `columns`
    "STRIP": [16, 32, 64],  # lanes next to each other in `columns`, at least
    "SPLIT": [0, 1, 2, 4, 8, 16, 32],  # blocks per output (rows) or strip (columns); 0: as many as fill the GPU
    "WAVES": [1, 2, 4],  # with SPLIT 0: how many times over
    "LOAD": ["plain", "stream", "stream256", "last"],  # cache policy of the wide loads, see load16
    "RESIDENT": [512, 1024, 1536, 2048],  # threads per multiprocessor that registers leave room for
}
CONFIG = {
    "BLOCK": 128,
    "GROUP": 0,
    "UNROLL": 4,
    "COLUMN_UNROLL": 4,
    "STRIP": 32,
    "SPLIT": 0,
    "WAVES": 1,
    "LOAD": "stream",
    "RESIDENT": 1024,
}

RANK = 4  # kept or reduced dimensions left after merging that the kernels can walk; more are copied into order first

SOURCE = r"""
#include <stdint.h>

// 16-bit numbers as bits: the conversions are one instruction each, and the headers cost more than the kernels.
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

struct Dim { int64_t size, in, out; };  // strides in elements: of x, and of what it is a dimension of
struct Plan {                           // what _plan wrote
  int64_t columns, wide, blocks, threads;
  int64_t dtype, maximum, divisor;      // of the output; whether not the sum; what the sum is divided by
  int64_t outputs, splits;              // an output's runs are shared out to `splits` blocks
  int64_t runs, per_split;              // stretches of the walked dimension per output; of those per split
  int64_t walked, stride, piece;        // the walked dimension, and its elements per run (the last may have fewer)
  int64_t group, lanes, strips;         // rows: log2 of threads per output, per run; columns: -, lanes, blocks abreast
  int64_t kept_rank, run_rank;
  Dim kept[RANK], run[RANK];            // innermost first; out: in the output; in the walked dimension
};

struct Sum {
  static __device__ __forceinline__ float start() { return 0.0f; }
  static __device__ __forceinline__ float join(float a, float b) { return a + b; }
};
struct Max {
  static __device__ __forceinline__ float start() { return __uint_as_float(0xff800000); }  // -infinity
  static __device__ __forceinline__ float join(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
  }
};

// The numbers in a 32-bit word as floats, and back.
template <class T> struct Word;
template <> struct Word<float> {
  static __device__ __forceinline__ void widen(uint32_t w, float* v) { v[0] = __uint_as_float(w); }
  static __device__ __forceinline__ uint32_t narrow(const float* v) { return __float_as_uint(v[0]); }
};
template <> struct Word<bf16> {
  static __device__ __forceinline__ void widen(uint32_t w, float* v) {
    v[0] = __uint_as_float(w << 16);
    v[1] = __uint_as_float(w & 0xffff0000);
  }
  static __device__ __forceinline__ uint32_t narrow(const float* v) {
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(v[1]), "f"(v[0]));
    return w;
  }
};
template <> struct Word<f16> {
  static __device__ __forceinline__ void widen(uint32_t w, float* v) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(v[0]), "=f"(v[1]) : "r"(w));
  }
  static __device__ __forceinline__ uint32_t narrow(const float* v) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(v[1]), "f"(v[0]));
    return w;
  }
};

__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
#if LOAD == 0  // through L1
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#elif LOAD == 1  // not kept in L1
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#elif LOAD == 2  // and 256 bytes fetched into L2 at a time
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#else  // first to leave L1 and L2
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#endif
  return v;
}

// VEC numbers of type T: 16 bytes, or one element.
template <class T, int VEC> struct Pack {
  uint4 raw;
  __device__ __forceinline__ void load(const T* p) { raw = load16(p); }
  __device__ __forceinline__ void widen(float (&v)[VEC]) const {
    constexpr int PER_WORD = 4 / sizeof(T);
    Word<T>::widen(raw.x, v);
    Word<T>::widen(raw.y, v + PER_WORD);
    Word<T>::widen(raw.z, v + 2 * PER_WORD);
    Word<T>::widen(raw.w, v + 3 * PER_WORD);
  }
};
template <class T> struct Pack<T, 1> {
  T raw;
  __device__ __forceinline__ void load(const T* p) { raw = *p; }
  __device__ __forceinline__ void widen(float (&v)[1]) const { v[0] = widened(raw); }
  static __device__ __forceinline__ float widened(float value) { return value; }
  template <class H> static __device__ __forceinline__ float widened(H value) {
    float pair[2];
    Word<H>::widen(value.bits, pair);
    return pair[0];
  }
};

// Rounded to dtype 0 (fp32), 1 (bf16) or 2 (fp16) and put at y[index]: a workspace is fp32 whatever x is.
__device__ __forceinline__ void store(void* y, int64_t dtype, int64_t index, float value) {
  float pair[2] = {value, 0.0f};
  if (dtype == 0) static_cast<float*>(y)[index] = value;
  else static_cast<uint16_t*>(y)[index] = uint16_t(dtype == 1 ? Word<bf16>::narrow(pair) : Word<f16>::narrow(pair));
}

// Neighbours, on a multiple of their size, rounded to T or, in a workspace, left as they are.
template <class T, int COUNT>
__device__ __forceinline__ void store_pack(void* y, int64_t dtype, int64_t index, const float (&v)[COUNT]) {
  if (dtype == 0) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(y) + index);
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) to[i / 4] = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
  } else {
    constexpr int NEXT = COUNT / 4;
    *reinterpret_cast<uint4*>(static_cast<T*>(y) + index) = make_uint4(
        Word<T>::narrow(v), Word<T>::narrow(v + NEXT), Word<T>::narrow(v + 2 * NEXT), Word<T>::narrow(v + 3 * NEXT));
  }
}

// Where index i of a nest of dimensions lies.
struct Place { int64_t in, out; };
__device__ __forceinline__ Place place(uint64_t i, const Dim* dims, int64_t rank) {
  Place at = {0, 0};
#pragma unroll 1
  for (int64_t d = 0; d < rank; ++d) {
    uint64_t rest = 0, index = i;
    if (d + 1 < rank) {  // a division is slow, and the outermost dimension needs none
      rest = i / uint64_t(dims[d].size);
      index = i - rest * dims[d].size;
    }
    at.in += index * dims[d].in;
    at.out += index * dims[d].out;
    i = rest;
  }
  return at;
}

template <class Op, int COUNT> __device__ __forceinline__ float join_all(float (&v)[COUNT]) {
#pragma unroll
  for (int width = COUNT / 2; width > 0; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) v[i] = Op::join(v[i], v[i + width]);
  return v[0];
}

// This lane's share of `packs` packs. Whole warps (WARP) each take UNROLL x 32 packs at a time, so that the loads
// differ by constants, which costs no registers; fewer lanes are for short runs and take a few packs each.
template <class Op, bool WARP, class T>
__device__ __forceinline__ float of_packs(const T* p, int packs, int lane, int lanes) {
  constexpr int VEC = 16 / sizeof(T), DEEP = WARP ? UNROLL : 4;
  const int width = WARP ? 32 : lanes, first = WARP ? lane / 32 * (32 * DEEP) + lane % 32 : lane;
  int left = packs - first;
  p += first * VEC;
  float all = Op::start();
  Pack<T, VEC> pack[DEEP];
  auto join = [&](int k) {
    float v[VEC];
    pack[k].widen(v);
    all = Op::join(all, join_all<Op>(v));
  };
  for (; left > (DEEP - 1) * width; left -= DEEP * lanes, p += DEEP * lanes * VEC) {
#pragma unroll
    for (int k = 0; k < DEEP; ++k) pack[k].load(p + k * width * VEC);
#pragma unroll
    for (int k = 0; k < DEEP; ++k) join(k);
  }
  if (left > 0) {
#pragma unroll
    for (int k = 0; k < DEEP; ++k) {
      pack[k] = {};  // else the registers of a load that may not happen are kept from the loop above
      if (k * width < left) pack[k].load(p + k * width * VEC);
    }
#pragma unroll
    for (int k = 0; k < DEEP; ++k)
      if (k * width < left) join(k);
  }
  return all;
}

// This lane's share of `count` neighbours: those on whole 16 bytes as packs, the ragged ends one by one.
template <class Op, class T> __device__ __forceinline__ float of_run(const T* p, int count, int lane, int lanes) {
  constexpr int VEC = 16 / sizeof(T);
  const int past = int(reinterpret_cast<uintptr_t>(p) % 16), ragged = past ? (16 - past) / int(sizeof(T)) : 0;
  const int head = ragged < count ? ragged : count, packs = (count - head) / VEC, body = packs * VEC;
  float all = Op::start();
#pragma unroll 1
  for (int i = lane; i < count - body; i += lanes) {
    float v[1];
    Pack<T, 1> one;
    one.load(p + (i < head ? i : i + body));
    one.widen(v);
    all = Op::join(all, v[0]);
  }
  p += head;
  if (lanes < 32) return Op::join(all, of_packs<Op, false>(p, packs, lane, lanes));
  return Op::join(all, of_packs<Op, true>(p, packs, lane, lanes));
}

// A group of threads per output and split. Each `lanes` of them take a run, then the run after those of the others.
template <class Op, class T>
__global__ void __launch_bounds__(BLOCK, RESIDENT / BLOCK)
rows(const T* __restrict__ x, void* __restrict__ y, const __grid_constant__ Plan plan) {
  const int log_group = int(plan.group), group = 1 << log_group, log_lanes = int(plan.lanes), lanes = 1 << log_lanes;
  const int lane = threadIdx.x & (group - 1);
  const int64_t output = int64_t(blockIdx.x) * (BLOCK >> log_group) + (threadIdx.x >> log_group), split = blockIdx.y;
  const bool live = output < plan.outputs;
  float all = Op::start();
  Place at = {0, 0};
  if (live) {
    at = place(output, plan.kept, plan.kept_rank);
    const int64_t end = (split + 1) * plan.per_split, last = end < plan.runs ? end : plan.runs;
    for (int64_t run = split * plan.per_split + (lane >> log_lanes); run < last; run += group >> log_lanes) {
      const Place start = place(run, plan.run, plan.run_rank);
      const T* p = x + at.in + start.in;
      const int64_t left = plan.walked - start.out;
      const int count = int(left < plan.piece ? left : plan.piece), which = lane & (lanes - 1);
      all = Op::join(all, of_run<Op>(p, count, which, lanes));
    }
  }
  for (int far = (group < 32 ? group : 32) / 2; far > 0; far /= 2)
    all = Op::join(all, __shfl_xor_sync(0xffffffff, all, far));
  if (group > 32) {
    __shared__ float of_warp[BLOCK / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = all;
    __syncthreads();
    if (lane < 32) {  // a whole warp, as groups are multiples of 32 here
      const int warps = group / 32;
      all = lane < warps ? of_warp[threadIdx.x / 32 + lane] : Op::start();
      for (int far = warps / 2; far > 0; far /= 2) all = Op::join(all, __shfl_xor_sync(0xffffffff, all, far));
    }
  }
  if (live && lane == 0) store(y, plan.dtype, split * plan.outputs + at.out, all / float(plan.divisor));
}

// Blocks of `lanes` lanes side by side, each with VEC neighbouring outputs, and as many rows of them as there are
// threads. VEC > 1 needs the innermost kept dimension to be contiguous in x, and all addresses on 16 bytes.
template <class Op, class T, int VEC>
__global__ void __launch_bounds__(BLOCK, RESIDENT / BLOCK)
columns(const T* __restrict__ x, void* __restrict__ y, const __grid_constant__ Plan plan) {
  constexpr int DEEP = VEC > 1 ? COLUMN_UNROLL : 2 * COLUMN_UNROLL;
  __shared__ float of_row[VEC][BLOCK];
  const int lanes = int(plan.lanes), lane = threadIdx.x % lanes, row = threadIdx.x / lanes, height = blockDim.x / lanes;
  const unsigned strips = unsigned(plan.strips), strip = blockIdx.x % strips;
  const int64_t split = blockIdx.y, column = (int64_t(strip) * lanes + lane) * VEC;
  const Place at = place(blockIdx.x / strips, plan.kept + 1, plan.kept_rank - 1);
  const bool live = column < plan.kept[0].size;
  float all[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) all[j] = Op::start();
  if (live) {
    x += at.in + column * plan.kept[0].in + row * plan.stride;
    const int64_t end = (split + 1) * plan.per_split, last = end < plan.runs ? end : plan.runs;
    for (int64_t run = split * plan.per_split; run < last; ++run) {
      const Place start = place(run, plan.run, plan.run_rank);
      const T* p = x + start.in;
      int64_t left = plan.walked - start.out;
      left = (left < plan.piece ? left : plan.piece) - row;
      Pack<T, VEC> pack[DEEP];
      auto join = [&](int k) {
        float v[VEC];
        pack[k].widen(v);
#pragma unroll
        for (int j = 0; j < VEC; ++j) all[j] = Op::join(all[j], v[j]);
      };
      for (; left > (DEEP - 1) * height; left -= DEEP * height, p += DEEP * height * plan.stride) {
#pragma unroll
        for (int k = 0; k < DEEP; ++k) pack[k].load(p + k * height * plan.stride);
#pragma unroll
        for (int k = 0; k < DEEP; ++k) join(k);
      }
      if (left > 0) {
#pragma unroll
        for (int k = 0; k < DEEP; ++k) {
          pack[k] = {};
          if (k * height < left) pack[k].load(p + k * height * plan.stride);
        }
#pragma unroll
        for (int k = 0; k < DEEP; ++k)
          if (k * height < left) join(k);
      }
    }
  }
  int half = 1;
  while (2 * half < height) half *= 2;
  for (; half > 0; half /= 2) {  // the rows from `half` on join those before; the slots of one step are not the next's
    if (row >= half && row < 2 * half) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) of_row[j][threadIdx.x] = all[j];
    }
    __syncthreads();
    if (row + half < height && row < half) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) all[j] = Op::join(all[j], of_row[j][threadIdx.x + half * lanes]);
    }
  }
  if (!live || row > 0) return;
  const int64_t to = split * plan.outputs + at.out + column * plan.kept[0].out;
#pragma unroll
  for (int j = 0; j < VEC; ++j) all[j] /= float(plan.divisor);
  if constexpr (VEC > 1) {
    if (plan.kept[0].out == 1) return store_pack<T>(y, plan.dtype, to, all);
  }
#pragma unroll
  for (int j = 0; j < VEC; ++j) store(y, plan.dtype, to + j * plan.kept[0].out, all[j]);
}

template <class Op, class T>
static void launch(const Plan& plan, const void* x, void* y, cudaStream_t stream) {
  const dim3 blocks(unsigned(plan.blocks), unsigned(plan.splits));
  const unsigned threads = unsigned(plan.threads);
  const T* in = static_cast<const T*>(x);
  if (!plan.columns) rows<Op, T><<<blocks, threads, 0, stream>>>(in, y, plan);
  else if (plan.wide) columns<Op, T, 16 / sizeof(T)><<<blocks, threads, 0, stream>>>(in, y, plan);
  else columns<Op, T, 1><<<blocks, threads, 0, stream>>>(in, y, plan);
}

template <class T>
static void launch(const Plan& plan, const void* x, void* y, cudaStream_t stream) {
  if (plan.maximum) launch<Max, T>(plan, x, y, stream);
  else launch<Sum, T>(plan, x, y, stream);
}

// plans: the address of a Plan, or of two where results are split.
extern "C" int reduce(const void* x, void* y, float* partial, int64_t dtype, int64_t plans, cudaStream_t stream) {
  const Plan* plan = reinterpret_cast<const Plan*>(plans);
  if (plan->blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  void* first = partial ? partial : y;
  if (dtype == 0) launch<float>(plan[0], x, first, stream);
  else if (dtype == 1) launch<bf16>(plan[0], x, first, stream);
  else launch<f16>(plan[0], x, first, stream);
  if (partial) launch<float>(plan[1], partial, y, stream);
  return cudaGetLastError();
}
"""
MACROS = ("BLOCK", "UNROLL", "COLUMN_UNROLL", "RESIDENT")
flags = [f"-D{knob}={CONFIG[knob]}" for knob in MACROS]
flags += [f"-DRANK={RANK}", f"-DLOAD={TUNABLES['LOAD'].index(CONFIG['LOAD'])}"]
lib = build(SOURCE, backend="cuda", flags=flags)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KINDS = ("sum", "mean", "max")
LONGEST = 512  # packs or elements that one thread adds up before it starts a new sum
MAX_SPLITS = 65535  # a grid's second dimension
SECTOR, LINE = 32, 128  # bytes that memory and L1 move at least
FULL = 512  # threads per multiprocessor, with their loads in flight, that keep the memory busy


def kernel_fn(x, dim=-1, op="sum"):
    """x reduced over `dim` (an int, a tuple, or None or () for all), contiguous, in x's dtype.

    Raises: TypeError for another dtype or device; ValueError for an unknown op or a dimension named twice;
    IndexError when x has no such dimension, or for the maximum of nothing.
    """
    if x.dtype not in DTYPES or not x.is_cuda:
        raise TypeError(f"reduce takes fp32, bf16 or fp16 on a GPU, not {x.dtype} on {x.device}")
    dim = tuple(dim) if isinstance(dim, list) else dim
    plan = _plan(x.shape, x.stride(), dim, op, x.dtype, x.data_ptr() % 16 == 0, target_of(x).sms)
    if plan.order:
        x = x.permute(plan.order).contiguous()
    out = torch.empty(plan.shape, dtype=x.dtype, device=x.device)
    if plan.address:
        partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device) if plan.partials else None
        lib.reduce(x, out, partial, plan.dtype, plan.address)
    return out


class _Plan:
    """How to compute one kind of call.

    `order` is to copy x into first, or None; `shape` is the output's; `partials` are the floats of the workspace;
    `address` is where the C plans lie, 0 when the output is empty.
    """

    __slots__ = ("address", "dtype", "order", "partials", "shape", "words")

    def __init__(self, shape, dtype, order=None, words=(), partials=0):
        self.shape, self.dtype, self.order, self.partials = shape, DTYPES[dtype], order, partials
        self.words = array.array("q", words)  # keeps alive what `address` names
        self.address = self.words.buffer_info()[0] if words else 0


@functools.lru_cache(maxsize=4096)
def _plan(shape, strides, dim, op, dtype, aligned, sms):
    if op not in KINDS:
        raise ValueError(f"op is {op!r}, expected one of {', '.join(KINDS)}")
    dims = _dims(len(shape), dim)
    kept = [d for d in range(len(shape)) if d not in dims]
    out_shape = tuple(shape[d] for d in kept)
    count = math.prod(shape[d] for d in dims)
    if op == "max" and count == 0:
        raise IndexError(f"the maximum over {dim} of shape {list(shape)} has no elements")
    if 0 in out_shape:
        return _Plan(out_shape, dtype)
    kept_dims = _merged([(shape[d], strides[d], math.prod(shape[e] for e in kept if e > d)) for d in kept])
    reduced_dims = _merged([(shape[d], strides[d], 0) for d in dims])
    order = None
    if len(kept_dims) > RANK - 1 or len(reduced_dims) > RANK:
        order, aligned = (*kept, *dims), True
        kept_dims, reduced_dims = [(math.prod(out_shape), count, 1)], [(count, 1, 0)]
    words, partials = _words(kept_dims, reduced_dims, op, dtype, aligned, sms)
    return _Plan(out_shape, dtype, order, words, partials)


def _dims(rank, dim):
    """The dimensions to reduce, ascending and not negative."""
    if dim is None or dim == ():
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    if any(not -max(rank, 1) <= d < max(rank, 1) for d in dims):
        raise IndexError(f"reduce over {dim} of a tensor of rank {rank}")
    dims = sorted(d % rank for d in dims) if rank else []
    if len(set(dims)) < len(dims):
        raise ValueError(f"{dim} names a dimension twice")
    return dims


def _merged(dims):
    """The same elements as (size, stride, output stride), innermost first, in as few dimensions as can be.

    Stride 0 (an expanded dimension) says nothing about neighbours and goes outermost.
    """
    merged = []
    for size, stride, out in sorted((d for d in dims if d[0] != 1), key=lambda d: (d[1] == 0, d[1], d[2])):
        if merged and stride == merged[-1][0] * merged[-1][1] and out == merged[-1][0] * merged[-1][2]:
            merged[-1] = (merged[-1][0] * size, *merged[-1][1:])
        else:
            merged.append((size, stride, out))
    return merged


def _words(kept, reduced, op, dtype, aligned, sms):
    """(the numbers of the C plan, or of two when a second launch joins the splits; floats of workspace)."""
    outputs, count = math.prod(d[0] for d in kept), math.prod(d[0] for d in reduced)
    plan = {"maximum": op == "max", "outputs": outputs, "divisor": count if op == "mean" else 1, "dtype": DTYPES[dtype]}
    if reduced and reduced[0][1] == 1 and (not kept or reduced[0][0] * dtype.itemsize >= SECTOR):
        shape = _rows(kept, reduced, dtype.itemsize, sms)
    else:
        shape = _columns(kept, reduced, dtype.itemsize, aligned, sms)
    if shape["splits"] == 1:
        return _flat(plan | shape), 0
    splits = shape["splits"]
    join = _columns([(outputs, 1, 1)], [(splits, outputs, 0)], 4, False, 0)
    return _flat(plan | shape | {"dtype": 0, "divisor": 1}) + _flat(plan | join), splits * outputs


FIELDS = (
    "columns", "wide", "blocks", "threads", "dtype", "maximum", "divisor", "outputs", "splits", "runs", "per_split",
    "walked", "stride", "piece", "group", "lanes", "strips",
)  # fmt: skip


def _flat(plan):
    """The plan as the words of C's struct Plan."""
    words = [plan.get(name, 0) for name in FIELDS]
    words += [len(plan["kept"]), len(plan["run"])]
    for dims in (plan["kept"], plan["run"]):
        words += [number for d in dims for number in d] + [0] * 3 * (RANK - len(dims))
    return words


def _runs(walked, others, splits, unit, lanes):
    """The plan's fields that share out `others` x `walked` among about `splits` blocks.

    The walked dimension is cut, at multiples of `unit` elements, where there are fewer others than splits, and where a
    lane would add more than LONGEST units in a row: a long fp32 sum is more accurate as a sum of sums.
    """
    size, stride = walked[:2]
    outer = math.prod(d[0] for d in others)
    pieces = max(splits // max(outer, 1), _ceil(size, lanes * unit * LONGEST), 1)
    piece = _ceil(_ceil(size, pieces), unit) * unit
    pieces = _ceil(size, max(piece, 1))
    cut = [(pieces, piece * stride, piece)] if pieces > 1 else []
    per_split = max(_ceil(outer * pieces, splits), 1)
    return {
        "walked": size, "stride": stride, "piece": piece, "runs": outer * pieces, "per_split": per_split,
        "splits": max(_ceil(outer * pieces, per_split), 1), "run": [*cut, *((s, t, 0) for s, t, _ in others)],
    }  # fmt: skip


def _ceil(a, b):
    return -(-a // b)


def _power(number):
    """The smallest power of two that is not below `number`."""
    return 1 << max(math.ceil(number) - 1, 0).bit_length()


def _log(power):
    return power.bit_length() - 1


def _rows(kept, reduced, itemsize, sms):
    """Threads per output: four loads for each thread of a warp, then up to two rounds of UNROLL, then more threads; and
    more of them, then several blocks, where outputs are few."""
    block, unroll = CONFIG["BLOCK"], CONFIG["UNROLL"]
    outputs, others = math.prod(d[0] for d in kept), math.prod(d[0] for d in reduced[1:])
    packs = _ceil(reduced[0][0] * itemsize, 16)
    loads = packs * others
    group = CONFIG["GROUP"] or max(min(_power(loads / 4), 32), _power(loads / (2 * unroll)))
    group = max(group, _power(loads / LONGEST))  # no thread's sum is longer than that
    while not CONFIG["GROUP"] and group * unroll < loads and group * outputs < FULL * sms:
        group *= 2
    group = min(group, block)
    lanes = min(group, _power(packs / 4)) if others > 1 else group
    splits = 1
    if group == block:  # a split is worth a second launch when each part still fills every thread's loads
        wanted = CONFIG["SPLIT"] or CONFIG["WAVES"] * FULL * sms // (outputs * block)
        splits = max(min(wanted, loads // (block * unroll), MAX_SPLITS), 1)
    return {
        "columns": 0, "wide": 1, "threads": block, "blocks": _ceil(outputs * group, block), "group": _log(group),
        "lanes": _log(lanes), "kept": kept, **_runs(reduced[0], reduced[1:], splits, 16 // itemsize, lanes),
    }  # fmt: skip


def _columns(kept, reduced, itemsize, aligned, sms):
    """Few elements per output are walked by one row of lanes, many by as many rows as leave the lanes a few cache
    lines side by side, and by several blocks where outputs are few. With no multiprocessors, by one block."""
    if not kept or (reduced and 0 < reduced[0][1] < kept[0][1] and math.prod(reduced[0][:2]) * itemsize >= LINE):
        kept = [(1, 0, 1), *kept]  # threads read the fewest lines when all of them walk one output
    reduced = sorted(reduced or [(1, 0, 0)], key=lambda d: d[0])  # the longest is walked, the others looked up
    walked, others = reduced[-1], reduced[:-1]
    per_pack = 16 // itemsize
    strides = [kept[0][0], *(d[1] for d in (*kept[1:], *reduced))]
    wide = aligned and kept[0][1] == 1 and all(s % per_pack == 0 for s in strides)
    packs = kept[0][0] // per_pack if wide else kept[0][0]
    factor = 1 if wide else 2
    deep, least = CONFIG["COLUMN_UNROLL"] * factor, CONFIG["STRIP"] * factor
    block = CONFIG["BLOCK"]
    lanes = min(packs, max(least, block // _power(walked[0] / deep)), block)
    strips = _ceil(packs, lanes)
    lanes = _ceil(packs, strips)
    height = max(min(block // lanes, walked[0]), 1)
    groups = math.prod(d[0] for d in kept[1:])
    splits = 1
    if sms:
        wanted = CONFIG["SPLIT"] or CONFIG["WAVES"] * FULL * sms // (groups * strips * lanes * height)
        loads = _ceil(walked[0], height) * math.prod(d[0] for d in others)
        splits = max(min(wanted, loads // deep, MAX_SPLITS), 1)
    return {
        "columns": 1, "wide": int(wide), "threads": lanes * height, "blocks": groups * strips, "lanes": lanes,
        "strips": strips, "kept": kept, **_runs(walked, others, splits, 1, height),
    }  # fmt: skip
