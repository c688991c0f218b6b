"""Cross entropy of class indices: log(sum(exp(logits))) - logits[target], then none, mean or sum over the rows.

logits: [rows, classes], [rows, classes, ...] or [classes], fp16, bf16 or fp32; targets: int64 without the class
dimension. All in fp32 with the maximum subtracted, the reduction in fp64; the result has the logits' dtype. The op
reads every logit once and does little else. A block (or, where rows are short, a few threads) walks over a row in
packs of 16 bytes, several of them under way for each thread, with a running maximum and sum of exponentials; elements
before the first and after the last multiple of 16 bytes, as odd numbers of classes have them, are taken one by one. A
row that is ignored is not read. For mean and sum each block leaves the sum of its rows, and a second kernel of one
block adds those; on compute capability 9.0 and later that one is launched while the first still runs. Every sum has
one order: results repeat bit for bit. A target that is no class gives NaN.
"""

import torch

from autokernel.native import build

KERNEL_TYPE = "cross_entropy"
BACKEND = "cuda"
TUNABLES = {
    "THREADS": [0, 32, 64, 128, 256, 512],  # threads per row; 0: up to 512, so that all have equally many packs
    "PACKS": [1, 2, 4, 8],  # 16-byte loads of a thread that are under way together
    "AHEAD": [0, 1],  # 1: load the next packs while working on these
    "RESIDENT": [512, 1024, 1536, 2048],  # threads per multiprocessor for whose registers the compiler makes room
    "LOAD": [0, 1, 2, 3],  # reads: 0 plain, 1 streaming (ld.cs), past L1 and 2 first to leave L2, 3 by 256 bytes
    "OVERLAP": [0, 1],  # 1: launch the second kernel early (compute capability 9.0 and later)
}
CONFIG = {"THREADS": 128, "PACKS": 4, "AHEAD": 1, "RESIDENT": 1024, "LOAD": 0, "OVERLAP": 1}

SOURCE = r"""
#include <stdint.h>

// The few conversions needed, one instruction each; the headers that hold them take longer to parse than all of this.
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
template <class T> struct Word;  // what a 32-bit word of a row holds
template <> struct Word<float> {
  static constexpr int count = 1;
  static constexpr uint32_t lowest = 0xff800000;  // minus infinity throughout
  static __device__ uint32_t larger(uint32_t a, uint32_t b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ void widen(uint32_t word, float* out) { out[0] = __uint_as_float(word); }
  static __device__ uint32_t narrow(const float* in) { return __float_as_uint(in[0]); }
};
template <> struct Word<f16> {
  static constexpr int count = 2;
  static constexpr uint32_t lowest = 0xfc00fc00;
  static __device__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t word;
    asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
  }
  static __device__ void widen(uint32_t word, float* out) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(out[0]), "=f"(out[1]) : "r"(word));
  }
  static __device__ uint32_t narrow(const float* in) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
    return word;
  }
};
template <> struct Word<bf16> {
  static constexpr int count = 2;
  static constexpr uint32_t lowest = 0xff80ff80;
  static __device__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t word;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
  }
  static __device__ void widen(uint32_t word, float* out) {
    out[0] = __uint_as_float(word << 16);
    out[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ uint32_t narrow(const float* in) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
    return word;
  }
};

static __device__ uint4 read_once(const uint4* p) {
#if LOAD == 1
  return __ldcs(p);
#elif LOAD >= 2
  uint4 v;
  asm volatile(
#if LOAD == 2
      "{ .reg .b64 leave; createpolicy.fractional.L2::evict_first.b64 leave, 1.0;\n"
      "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], leave; }"
#else
      "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
#endif
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
#else
  return *p;
#endif
}

// Neighbours in a row as they lie in memory: 16 bytes.
template <class T> struct Pack {
  static constexpr int width = 16 / sizeof(T);
  uint32_t word[4];

  __device__ void clear() {
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = Word<T>::lowest;
  }
  __device__ void load(const T* p) {
    const uint4 v = read_once((const uint4*)p);
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
  }
};

template <class T>
static __device__ float element(const T* p) {
  float both[2];
  if constexpr (sizeof(T) == 2) Word<T>::widen(*(const uint16_t*)p, both);
  else both[0] = *p;
  return both[0];
}

template <class T>
static __device__ void round_to(T* p, float v) {
  const float both[2] = {v, 0};
  if constexpr (sizeof(T) == 2) *(uint16_t*)p = uint16_t(Word<T>::narrow(both));
  else *p = v;
}

constexpr float LOWEST = -__builtin_huge_valf();

// e^v; what is below the smallest normal number becomes zero.
static __device__ float exponential(float v) {
  float x = v * 1.4426950408889634f, y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What is subtracted from x: its maximum, or 0 where all of it is minus infinity, as that difference would be NaN.
static __device__ float anchor(float top) { return top == LOWEST ? 0.0f : top; }

// A maximum, and the sum of exponentials relative to it.
struct Total {
  float top, sum;

  __device__ void raise(float higher) {
    sum *= exponential(top - anchor(higher));
    top = higher;
  }
};

// blockDim.x threads share a row: a power of two up to 32, or whole warps. The maximum and the sum over those of them
// in one warp, the same bits in every one.
static __device__ float warp_max(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (step < blockDim.x) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
  return v;
}
static __device__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (step < blockDim.x) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// The total of a row from those of its warps, in all of its threads.
static __device__ Total whole_row(const Total& warp, Total* partial) {
  if (blockDim.x <= 32) return warp;
  const int in_warp = threadIdx.x % 32;
  if (in_warp == 0) partial[threadIdx.x / 32] = warp;
  __syncthreads();
  Total own = {LOWEST, 0};
  if (in_warp < blockDim.x / 32) own = partial[in_warp];
  own.raise(warp_max(own.top));
  return {own.top, warp_sum(own.sum)};
}

constexpr int MOST_THREADS = 512;
enum { NONE, MEAN, SUM };

struct Job {
  const void* logits;
  const int64_t* targets;
  void* losses;  // in the logits' type, one for each row: for NONE, else null
  float* sums;   // of the losses of a block's rows, and
  int* counts;   // how many of them count: for MEAN and SUM
  int64_t rows, classes, stride, ignored;
};

// The packs first, first + blockDim.x, ... ; minus infinity beyond the last.
template <bool GUARDED, class T>
static __device__ void load_tile(Pack<T> (&tile)[PACKS], const T* x, int first, int packs) {
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int at = first + i * blockDim.x;
    if (!GUARDED || at < packs) tile[i].load(x + int64_t(at) * Pack<T>::width);
    else tile[i].clear();
  }
}

template <class T>
static __device__ void take(Total& total, const Pack<T> (&tile)[PACKS]) {
  uint32_t largest = tile[0].word[0];
#pragma unroll
  for (int i = 0; i < PACKS; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) largest = Word<T>::larger(largest, tile[i].word[k]);
  float v[2];
  Word<T>::widen(largest, v);
  total.raise(fmaxf(total.top, Word<T>::count == 2 ? fmaxf(v[0], v[1]) : v[0]));
  const float base = anchor(total.top);
#pragma unroll
  for (int i = 0; i < PACKS; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Word<T>::widen(tile[i].word[k], v);
#pragma unroll
      for (int j = 0; j < Word<T>::count; ++j) total.sum += exponential(v[j] - base);
    }
}

// The total of what one of a row's threads reads of it.
template <class T>
static __device__ Total part_of_row(const T* x, int64_t classes) {
  constexpr int V = Pack<T>::width;
  const int lane = threadIdx.x, tile = PACKS * blockDim.x;
  int64_t before = (16 - uintptr_t(x) % 16) % 16 / sizeof(T);
  if (before > classes) before = classes;
  const int packs = int((classes - before) / V), single = int(classes - int64_t(packs) * V);
  const T* start = x + before;

  Total total = {LOWEST, 0};
  for (int i = lane; i < single; i += blockDim.x) {
    const float v = element(x + (i < before ? i : i + int64_t(packs) * V));
    total.raise(fmaxf(total.top, v));
    total.sum += exponential(v - anchor(total.top));
  }
  Pack<T> now[PACKS], next[PACKS];
  auto load = [&](Pack<T>(&to)[PACKS], int at) {
    if (at + tile <= packs) load_tile<false>(to, start, at + lane, packs);
    else load_tile<true>(to, start, at + lane, packs);
  };
  if (AHEAD) load(now, 0);
  for (int at = 0; at < packs; at += tile) {
    load(AHEAD ? next : now, AHEAD ? at + tile : at);
    take(total, now);
    if (AHEAD)
#pragma unroll
      for (int i = 0; i < PACKS; ++i) now[i] = next[i];
  }
  return total;
}

template <class T>
__global__ void __launch_bounds__(MOST_THREADS, RESIDENT / MOST_THREADS) losses_of_rows(const Job job) {
  __shared__ Total partial[MOST_THREADS / 32];
#if OVERLAP && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t target = row < job.rows ? job.targets[row] : job.ignored;
  const bool counted = target != job.ignored, first = threadIdx.x == 0;
  const T* x = (const T*)job.logits + row * job.stride;
  float own = __uint_as_float(0x7fffffff);  // NaN
  if (first && counted && target >= 0 && target < job.classes) own = element(x + target);

  Total warp = counted ? part_of_row(x, job.classes) : Total{LOWEST, 0};
  warp.raise(warp_max(warp.top));
  warp.sum = warp_sum(warp.sum);
  const Total total = whole_row(warp, partial);
  float loss = counted ? logf(total.sum) + (total.top - own) : 0.0f;

  if (job.losses) {
    if (first && row < job.rows) round_to((T*)job.losses + row, loss);
    return;
  }
  int count = counted;
  if (blockDim.y > 1) {  // few threads per row, whole warps in all
    __shared__ float of_warp[4];
    if (!first) loss = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) loss += __shfl_xor_sync(~0u, loss, step);
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    if (thread % 32 == 0) of_warp[thread / 32] = loss;
    count = __syncthreads_count(first && counted);
    loss = (of_warp[0] + of_warp[1]) + (of_warp[2] + of_warp[3]);
  }
  if (first && threadIdx.y == 0) {
    job.sums[blockIdx.x] = loss;
    job.counts[blockIdx.x] = count;
  }
}

template <class T>
__global__ void __launch_bounds__(1024) reduced(const float* sums, const int* counts, int blocks, bool mean, T* out) {
  __shared__ double partial_sum[32];
  __shared__ int64_t partial_count[32];
#if OVERLAP && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  double sum = 0;
  int64_t count = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += blockDim.x) sum += sums[i], count += counts[i];
  for (bool last : {false, true}) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      count += __shfl_xor_sync(~0u, count, step);
    }
    if (last) break;
    if (threadIdx.x % 32 == 0) partial_sum[threadIdx.x / 32] = sum, partial_count[threadIdx.x / 32] = count;
    __syncthreads();
    sum = partial_sum[threadIdx.x % 32], count = partial_count[threadIdx.x % 32];
  }
  if (threadIdx.x == 0) round_to(out, float(mean ? sum / double(count) : sum));  // a mean over nothing is NaN
}

template <class T>
static int cross_entropy(const Job& job, int reduction, T* out, cudaStream_t stream) {
  const int64_t packs = job.classes / Pack<T>::width, most = PACKS * MOST_THREADS, turns = (packs + most - 1) / most;
  if (packs > 0x7fff0000) return cudaErrorInvalidValue;
  int64_t threads = THREADS ? THREADS : turns ? (packs + turns * PACKS - 1) / (turns * PACKS) : 1;
  if (threads > 32) threads = (threads + 31) / 32 * 32;
  else while (threads & (threads - 1)) ++threads;
  const dim3 block(threads, threads <= 32 ? 128 / threads : 1);
  const int64_t blocks = (job.rows + block.y - 1) / block.y;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  if (blocks) {
    losses_of_rows<T><<<unsigned(blocks), block, 0, stream>>>(job);
    if (const cudaError_t error = cudaGetLastError()) return error;
  }
  if (reduction == NONE) return cudaSuccess;

  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t second = {};
  second.gridDim = 1, second.blockDim = 1024, second.stream = stream, second.attrs = &early;
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  second.numAttrs = OVERLAP && blocks && major >= 9;
  return cudaLaunchKernelEx(&second, reduced<T>, (const float*)job.sums, (const int*)job.counts, int(blocks),
                            reduction == MEAN, out);
}

// dtype: 0 fp32, 1 fp16, 2 bf16. out: [rows] for NONE, else one value, with 8 bytes per row of work space.
extern "C" int cross_entropy(const void* logits, const int64_t* targets, void* out, void* work, int64_t dtype,
                             int64_t rows, int64_t classes, int64_t stride, int64_t ignored, int64_t reduction,
                             cudaStream_t stream) {
  const int kind = int(reduction);
  void* losses = kind == NONE ? out : nullptr;
  const Job job = {logits, targets, losses, (float*)work, (int*)work + rows, rows, classes, stride, ignored};
  return dtype == 0   ? cross_entropy(job, kind, (float*)out, stream)
         : dtype == 1 ? cross_entropy(job, kind, (f16*)out, stream)
                      : cross_entropy(job, kind, (bf16*)out, stream);
}
"""

lib = build(SOURCE, backend="cuda", flags=[f"-D{knob}={value}" for knob, value in CONFIG.items()])
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    """The loss in the logits' dtype: a scalar, or targets' shape for reduction "none". A target that is no class: NaN.

    Raises: TypeError for logits other than fp32, fp16 and bf16 or targets other than int64; ValueError for shapes that
    do not fit or an unknown reduction.
    """
    dtype, kind, shape, rank = DTYPES.get(logits.dtype), REDUCTIONS.get(reduction), logits.shape, logits.dim()
    if dtype is None or not logits.is_cuda:
        raise TypeError(f"cross_entropy takes fp32, fp16 or bf16 on a GPU, not {logits.dtype} on {logits.device}")
    if targets.dtype != torch.int64 or targets.device != logits.device:
        raise TypeError(f"targets must be int64 class indices with the logits, not {targets.dtype} on {targets.device}")
    if kind is None:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    axis = 1 if rank > 1 else 0
    if rank == 0 or shape[:axis] + shape[axis + 1 :] != targets.shape:
        raise ValueError(f"logits {list(shape)} do not fit targets {list(targets.shape)}")
    if rank > 2:
        logits = logits.movedim(1, -1).contiguous()
    elif logits.stride(-1) != 1:
        logits = logits.contiguous()
    classes, rows = shape[axis], targets.numel()
    stride = logits.stride(0) if rank == 2 else classes
    out = torch.empty(targets.shape if kind == 0 else (), dtype=logits.dtype, device=logits.device)
    if rows or kind:
        work = torch.empty(2 * rows, dtype=torch.float32, device=logits.device) if kind else None
        lib.cross_entropy(logits, targets.contiguous(), out, work, dtype, rows, classes, stride, ignore_index, kind)
    return out
