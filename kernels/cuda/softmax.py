"""Softmax over one dimension: y = exp(x - max) / sum(exp(x - max)), in fp32, rounded once to x's dtype.

x: any shape, fp16, bf16 or fp32. The op moves bytes and little else, so a row over the last dimension is read from
memory once: its threads hold it in registers as `N` packs of 16 bytes each, all of whose loads are under way before
the first is used. Each warp takes its maximum and the exponentials relative to that; the warps' maxima and sums meet
in one exchange in shared memory (none for rows of up to one warp; several of those share a block). Rows beyond 8 packs
for each of 1024 threads are walked over twice with a running maximum, the second time backwards, so that what was read
last is found in registers and cache. Rows that do not begin or end at multiples of 16 bytes are covered by packs that
do, with minus infinity put for what is not theirs. Over another dimension a block takes some columns (neighbours in
memory) and shares out what is to be summed to its rows of threads. Every sum has one order: results repeat bit for bit.
"""

import functools
import math

import torch

from autokernel.native import build

KERNEL_TYPE = "softmax"
BACKEND = "cuda"
TUNABLES = {
    "THREADS": [0, 32, 64, 128, 256, 512, 1024],  # threads per row; 0: as many as the row has packs / PACKS
    "PACKS": [1, 2, 4, 8],  # 16-byte loads per thread; rows too long for this, and 512 threads, take 8
    "PERSISTENT": [0, 1],  # 1: as many blocks as fit at once, each of which loads its next row while it works on one
    "RESIDENT": [512, 1024, 1536, 2048],  # threads per multiprocessor for whose registers the compiler makes room
    "KEEP": [0, 1],  # 1: hold the exponentials, up to 32 per thread; 0: hold x and take them again
    "LOAD": [0, 1, 2, 3],  # reads of x: 0 plain, 1 streaming (ld.cs), past L1 and 2 first to leave L2, 3 by 256 bytes
    "STORE": [0, 1],  # writes: 0 plain, 1 streaming (st.cs)
}
CONFIG = {"THREADS": 0, "PACKS": 4, "PERSISTENT": 0, "RESIDENT": 1024, "KEEP": 1, "LOAD": 1, "STORE": 0}

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

// V neighbours of a row as they lie in memory: 16 bytes, or one element.
template <class T, int V> struct Pack {
  static constexpr int words = V > 1 ? 4 : 1, width = V > 1 ? V : Word<T>::count;
  uint32_t word[words];

  __device__ void clear() {
#pragma unroll
    for (int k = 0; k < words; ++k) word[k] = Word<T>::lowest;
  }
  // `once`: nothing will read these bytes again.
  __device__ void load(const T* p, bool once) {
    if constexpr (V > 1) {
      const uint4 v = once ? read_once((const uint4*)p) : *(const uint4*)p;
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else if constexpr (sizeof(T) == 2) {
      word[0] = *(const uint16_t*)p;
    } else {
      word[0] = *(const uint32_t*)p;
    }
  }
  __device__ void store(T* p) const {
    if constexpr (V > 1) {
      const uint4 v = make_uint4(word[0], word[1], word[2], word[3]);
#if STORE == 1
      __stcs((uint4*)p, v);
#else
      *(uint4*)p = v;
#endif
    } else if constexpr (sizeof(T) == 2) {
      *(uint16_t*)p = uint16_t(word[0]);
    } else {
      *(uint32_t*)p = word[0];
    }
  }
  // Element k alone.
  __device__ void store_one(T* p, int k) const {
    if constexpr (sizeof(T) == 2) *(uint16_t*)p = uint16_t(word[k / 2] >> k % 2 * 16);
    else *(uint32_t*)p = word[k];
  }
  __device__ void clear_one(int k) {
    const uint32_t gone = sizeof(T) == 4 ? ~0u : k % 2 ? 0xffff0000u : 0xffffu;
    uint32_t& holder = word[k * sizeof(T) / 4];
    holder = (holder & ~gone) | (Word<T>::lowest & gone);
  }
  // The larger one of each element of two packs.
  __device__ void raise(const Pack& other) {
#pragma unroll
    for (int k = 0; k < words; ++k) word[k] = Word<T>::larger(word[k], other.word[k]);
  }
  // `out` and `in` have `width` places, of which V count.
  __device__ void widen(float* out) const {
#pragma unroll
    for (int k = 0; k < words; ++k) Word<T>::widen(word[k], out + k * Word<T>::count);
  }
  __device__ void narrow(const float* in) {
#pragma unroll
    for (int k = 0; k < words; ++k) word[k] = Word<T>::narrow(in + k * Word<T>::count);
  }
};

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
  __device__ void merge(Total other) {
    const float higher = fmaxf(top, other.top);
    raise(higher);
    other.raise(higher);
    sum += other.sum;
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

// The total of a row from those of its warps, in all of its threads. `partial` is free for reuse after the next
// __syncthreads but one.
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

struct Job {
  const void* x;
  void* y;
  int64_t rows, cols;
  int64_t stride[3];  // of the leading dimensions of x, in elements
  uint32_t size[2];   // of the last two of them
};

template <class T>
static __device__ const T* row_of(const Job& job, int64_t row) {
  const T* x = (const T*)job.x;
  if (job.size[0] == 1 && job.size[1] == 1) return x + row * job.stride[0];
  const uint32_t r = uint32_t(row), outer = r / job.size[1];
  x += outer / job.size[0] * job.stride[0] + outer % job.size[0] * job.stride[1];
  return x + r % job.size[1] * job.stride[2];
}

// Where a row lies among packs that begin at multiples of their size: the first of them, how many there are, and how
// many elements before the row's own the first one holds. What the outer ones hold of others is read and dropped: 16
// bytes at a multiple of 16 never lie on two pages, nor in two allocations.
template <class T, int V>
struct Row {
  const T* start;
  int packs, before;

  __device__ Row(const T* x, bool present, int64_t cols, bool edged) {
    before = edged ? int(uintptr_t(x) % (V * sizeof(T)) / sizeof(T)) : 0;
    start = x - before;
    packs = present ? int((cols + before + V - 1) / V) : 0;
  }
  // Whether element k of a pack is one of the row.
  __device__ bool has(int pack, int k, int64_t cols) const {
    const int64_t at = int64_t(pack) * V + k - before;
    return at >= 0 && at < cols;
  }
  __device__ bool at_edge(int pack) const { return pack == 0 || pack == packs - 1; }
};

// The packs first, first + blockDim.x, ... of a row; minus infinity for what is not in it.
template <bool EDGED, class T, int V, int N>
static __device__ void load_tile(Pack<T, V> (&tile)[N], const Row<T, V>& row, int first, int64_t cols, bool once) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int at = first + i * blockDim.x;
    if (at < row.packs) tile[i].load(row.start + int64_t(at) * V, once);
    else tile[i].clear();
    if (EDGED && row.at_edge(at))
#pragma unroll
      for (int k = 0; k < V; ++k)
        if (!row.has(at, k, cols)) tile[i].clear_one(k);
  }
}

constexpr int MOST = 512, MOST_LONG = 1024;  // threads of a block

// A thread holds N packs of its row. EDGED: rows may begin and end anywhere, and may be longer than what all threads
// hold; they are then walked over in tiles, twice: the second time backwards, from the tile that is at hand.
template <class T, int V, int N, bool EDGED>
__global__ void __launch_bounds__(EDGED ? MOST_LONG : MOST, EDGED ? 1 : RESIDENT / MOST) softmax_rows(const Job job) {
  constexpr bool AHEAD = PERSISTENT && N <= 4;  // a second set of more packs would not fit in the registers
  constexpr bool HOLD = KEEP && !EDGED;
  __shared__ Total partial[2][32];
  const int lane = threadIdx.x, tile = N * blockDim.x;
  const int last = EDGED ? int((job.cols + 2 * V - 2) / V - 1) / tile * tile : 0;  // where the last tile begins
  const bool once = last == 0;
  const int64_t cols = job.cols, step = int64_t(gridDim.x) * blockDim.y;
  int64_t at_row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  auto row_at = [&](int64_t r) { return Row<T, V>(row_of<T>(job, r), r < job.rows, cols, EDGED); };

  Pack<T, V> held[N], next[N];
  if (AHEAD) load_tile<EDGED>(held, row_at(at_row), lane, cols, once);

  // All threads of a block make the same number of turns; one whose row is beyond the last only takes part in sums.
  int turn = 0;
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < job.rows; first += step) {
    const Row<T, V> row = row_at(at_row);
    if (AHEAD) load_tile<EDGED>(next, row_at(at_row + step), lane, cols, once);
    else load_tile<EDGED>(held, row, lane, cols, once);

    Total warp = {LOWEST, 0};
    float e[HOLD ? N : 1][Pack<T, V>::width];
    for (int at = 0;; at += tile) {
      if (EDGED && at > 0) load_tile<EDGED>(held, row, at + lane, cols, false);
      Pack<T, V> largest = held[0];
#pragma unroll
      for (int i = 1; i < N; ++i) largest.raise(held[i]);
      float top = warp.top, v[Pack<T, V>::width];
      largest.widen(v);
#pragma unroll
      for (int k = 0; k < V; ++k) top = fmaxf(top, v[k]);
      warp.raise(warp_max(top));
#pragma unroll
      for (int i = 0; i < N; ++i) {
        held[i].widen(v);
#pragma unroll
        for (int k = 0; k < V; ++k) {
          v[k] = exponential(v[k] - anchor(warp.top));
          if (HOLD) e[i][k] = v[k];
          warp.sum += v[k];
        }
      }
      if (!EDGED || at == last) break;
    }
    warp.sum = warp_sum(warp.sum);
    const Total total = whole_row(warp, partial[turn]);
    const float scale = 1.0f / total.sum, of_held = exponential(warp.top - anchor(total.top)) * scale;

    T* y = (T*)job.y + at_row * cols - row.before;
    const bool aligned = !EDGED || uintptr_t(y) % (V * sizeof(T)) == 0;
    for (int at = last;; at -= tile) {
      if (EDGED && at < last) load_tile<EDGED>(held, row, at + lane, cols, false);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int pack = at + lane + i * blockDim.x;
        if (pack >= row.packs) continue;
        float v[Pack<T, V>::width];
        held[i].widen(v);
#pragma unroll
        for (int k = 0; k < V; ++k)
          v[k] = HOLD ? e[HOLD ? i : 0][k] * of_held : exponential(v[k] - anchor(total.top)) * scale;
        held[i].narrow(v);
        if (!EDGED || (aligned && !row.at_edge(pack))) {
          held[i].store(y + int64_t(pack) * V);
        } else {
#pragma unroll
          for (int k = 0; k < V; ++k)
            if (row.has(pack, k, cols)) held[i].store_one(y + int64_t(pack) * V + k, k);
        }
      }
      if (!EDGED || at == 0) break;
    }
    if (AHEAD) {
#pragma unroll
      for (int i = 0; i < N; ++i) held[i] = next[i];
    }
    at_row += step;
    turn ^= 1;
  }
}

// x and y are [outer, n, packs] of packs; a block takes blockDim.x neighbours of the last and all n, of which each of
// its blockDim.y rows of threads takes every blockDim.y-th. DEPTH packs per thread stay in registers.
constexpr int DEPTH = 8, COLUMN_THREADS = 512;
template <class T, int V>
__global__ void __launch_bounds__(COLUMN_THREADS, 2)
softmax_columns(const T* x, T* y, int n, int64_t packs, int strips) {
  extern __shared__ float2 shared[];  // [groups][columns of the block]: maxima and sums
  const int across = blockDim.x, tile = DEPTH * blockDim.y, last = (n - 1) / tile * tile;
  const int64_t column = int64_t(blockIdx.x % strips) * across + threadIdx.x;
  const int64_t offset = (int64_t(blockIdx.x / strips) * n * packs + column) * V;
  const int mine = column < packs ? n : 0;

  Pack<T, V> held[DEPTH];
  auto load = [&](int at) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int r = at + threadIdx.y + i * blockDim.y;
      if (r < mine) held[i].load(x + offset + r * packs * V, last == 0);
      else held[i].clear();
    }
  };
  Total total[V];
  float v[Pack<T, V>::width];
#pragma unroll
  for (int k = 0; k < V; ++k) total[k] = {LOWEST, 0};
  for (int at = 0; at <= last; at += tile) {
    load(at);
    Pack<T, V> largest = held[0];
#pragma unroll
    for (int i = 1; i < DEPTH; ++i) largest.raise(held[i]);
    largest.widen(v);
#pragma unroll
    for (int k = 0; k < V; ++k) total[k].raise(fmaxf(total[k].top, v[k]));
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      held[i].widen(v);
#pragma unroll
      for (int k = 0; k < V; ++k) total[k].sum += exponential(v[k] - anchor(total[k].top));
    }
  }

  // First among the threads of a warp that have the same column, then among the warps, or rows of several warps.
  for (int step = across; step < 32; step *= 2)
#pragma unroll
    for (int k = 0; k < V; ++k)
      total[k].merge({__shfl_xor_sync(~0u, total[k].top, step), __shfl_xor_sync(~0u, total[k].sum, step)});
  const int thread = threadIdx.y * across + threadIdx.x, threads = across * blockDim.y, width = across * V;
  const int group = across < 32 ? thread / 32 : threadIdx.y, groups = across < 32 ? threads / 32 : blockDim.y;
  if (across >= 32 || thread % 32 < across)
#pragma unroll
    for (int k = 0; k < V; ++k) shared[group * width + threadIdx.x * V + k] = make_float2(total[k].top, total[k].sum);
  __syncthreads();
  for (int c = thread; c < width; c += threads) {
    Total all = {LOWEST, 0};
    for (int g = 0; g < groups; ++g) all.merge({shared[g * width + c].x, shared[g * width + c].y});
    shared[c] = make_float2(anchor(all.top), 1.0f / all.sum);
  }
  __syncthreads();

  float2 own[V];
#pragma unroll
  for (int k = 0; k < V; ++k) own[k] = shared[threadIdx.x * V + k];
  for (int at = last; at >= 0; at -= tile) {
    if (at < last) load(at);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int r = at + threadIdx.y + i * blockDim.y;
      if (r >= mine) continue;
      held[i].widen(v);
#pragma unroll
      for (int k = 0; k < V; ++k) v[k] = exponential(v[k] - own[k].x) * own[k].y;
      held[i].narrow(v);
      held[i].store(y + offset + r * packs * V);
    }
  }
}

// Threads for a row of `packs`, `each` for every thread: a power of two up to 32, or whole warps, up to `most`.
static int threads_for(int64_t packs, int each, int most) {
  int64_t threads = THREADS ? THREADS : (packs + each - 1) / each;
  if (threads > most) return most;
  if (threads > 32) return int(threads + 31) / 32 * 32;
  while (threads & (threads - 1)) ++threads;
  return int(threads);
}

template <class T, int V, int N, bool EDGED>
static cudaError_t launch(const Job& job, int threads, cudaStream_t stream) {
  const dim3 block(threads, threads <= 32 ? 128 / threads : 1);
  int64_t blocks = (job.rows + block.y - 1) / block.y;
  if (PERSISTENT) {
    int device = 0, multiprocessors = 0, resident = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, softmax_rows<T, V, N, EDGED>, block.x * block.y, 0);
    if (blocks > multiprocessors * resident) blocks = multiprocessors * resident;
  }
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  softmax_rows<T, V, N, EDGED><<<unsigned(blocks), block, 0, stream>>>(job);
  return cudaGetLastError();
}

template <class T>
static int rows(const Job& job, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T), N = 8;
  const int64_t packs = (job.cols + 2 * V - 2) / V;
  if (packs > 0x7fff0000) return cudaErrorInvalidValue;
  uintptr_t bits = (uintptr_t)job.x | (uintptr_t)job.y | uintptr_t(job.cols * sizeof(T));
  for (int64_t stride : job.stride) bits |= uintptr_t(stride * int64_t(sizeof(T)));
  const int threads = threads_for(job.cols / V, PACKS, MOST);
  const bool held = int64_t(threads) * PACKS * V >= job.cols;
  if (held && bits % 16 == 0) return launch<T, V, PACKS, false>(job, threads, stream);
  return launch<T, V, N, true>(job, threads_for(packs, N, MOST_LONG), stream);
}

static int64_t power_of_two(int64_t least) {
  int64_t n = 1;
  while (n < least) n *= 2;
  return n;
}

template <class T, int V>
static cudaError_t launch_columns(const void* x, void* y, int64_t outer, int64_t n, int64_t inner,
                                  cudaStream_t stream) {
  // Threads side by side read 512 bytes of packs, less (but at least 64) where all n then fit in registers.
  const int64_t packs = inner / V, narrowest = 64 / (V * int(sizeof(T)));
  int64_t across = power_of_two(packs < 32 ? packs : 32);
  while (across > narrowest && n > DEPTH * (COLUMN_THREADS / across)) across /= 2;
  int64_t down = power_of_two((n + DEPTH - 1) / DEPTH);
  if (down > COLUMN_THREADS / across) down = COLUMN_THREADS / across;
  while (across * down < 128 && across < packs) across *= 2;
  if (across * down < 32) down = 32 / across;
  const int64_t strips = (packs + across - 1) / across;
  if (n > 0x7fff0000 || outer * strips > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const int64_t groups = across < 32 ? across * down / 32 : down;
  softmax_columns<T, V><<<unsigned(outer * strips), dim3(across, down), groups * across * V * sizeof(float2), stream>>>(
      (const T*)x, (T*)y, int(n), packs, int(strips));
  return cudaGetLastError();
}

template <class T>
static int columns(const void* x, void* y, int64_t outer, int64_t n, int64_t inner, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T);
  if (((uintptr_t)x | (uintptr_t)y | uintptr_t(inner * sizeof(T))) % 16 == 0)
    return launch_columns<T, V>(x, y, outer, n, inner, stream);
  return launch_columns<T, 1>(x, y, outer, n, inner, stream);
}

// dtype: 0 fp32, 1 fp16, 2 bf16. x is [?, size0, size1, cols] with the strides; y is contiguous.
extern "C" int softmax_of_rows(const void* x, void* y, int64_t dtype, int64_t count, int64_t cols, int64_t stride0,
                               int64_t stride1, int64_t stride2, int64_t size0, int64_t size1, cudaStream_t stream) {
  const Job job = {x, y, count, cols, {stride0, stride1, stride2}, {uint32_t(size0), uint32_t(size1)}};
  return dtype == 0 ? rows<float>(job, stream) : dtype == 1 ? rows<f16>(job, stream) : rows<bf16>(job, stream);
}

// x and y are [outer, n, inner], contiguous; the sums are over n.
extern "C" int softmax_of_columns(const void* x, void* y, int64_t dtype, int64_t outer, int64_t n, int64_t inner,
                                  cudaStream_t stream) {
  return dtype == 0   ? columns<float>(x, y, outer, n, inner, stream)
         : dtype == 1 ? columns<f16>(x, y, outer, n, inner, stream)
                      : columns<bf16>(x, y, outer, n, inner, stream);
}
"""

lib = build(SOURCE, backend="cuda", flags=[f"-D{knob}={value}" for knob, value in CONFIG.items()])
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def kernel_fn(x, dim=-1):
    """Softmax of x over `dim`, contiguous, in x's shape and dtype.

    Raises: TypeError for a dtype other than fp32, fp16 and bf16; IndexError when x has no dimension `dim`.
    """
    dtype, shape, rank = DTYPES.get(x.dtype), x.shape, x.dim() or 1
    if dtype is None or not x.is_cuda:
        raise TypeError(f"softmax takes fp32, fp16 or bf16 on a GPU, not {x.dtype} on {x.device}")
    if not -rank <= dim < rank:
        raise IndexError(f"softmax over dimension {dim} of a tensor of rank {x.dim()}")
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if 0 in shape:
        return out
    after = shape[dim % rank + 1 :]
    inner = math.prod(after)
    if inner > 1:
        n = shape[dim]
        lib.softmax_of_columns(x.contiguous(), out, dtype, out.numel() // (n * inner), n, inner)
        return out
    layout = None if after else _layout(shape, x.stride())
    if layout is None:
        x, shape = x.contiguous(), shape[: dim % rank + 1]
        layout = _layout(shape, x.stride()[: len(shape)])
    lib.softmax_of_rows(x, out, dtype, *layout)
    return out


@functools.lru_cache(maxsize=4096)
def _layout(shape, stride):
    """(rows, cols, three strides, two sizes) of the rows of x, or None where x must be copied first.

    Leading dimensions are joined where one stride serves both; row r is then at r // (size0 * size1), r // size1 %
    size0 and r % size1.
    """
    cols = shape[-1] if shape else 1
    if cols != 1 and stride[-1] != 1:
        return None
    rows, joined = 1, []
    for size, step in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        rows *= size
        if joined and (size == 1 or step == joined[-1][0] * joined[-1][1]):
            joined[-1][0] *= size
        elif size != 1:
            joined.append([size, step])
    joined.reverse()
    if len(joined) > 3 or (len(joined) > 1 and rows >= 1 << 31):
        return None
    outer, middle, inner = [*joined[:1], *[[1, 0]] * (3 - len(joined)), *joined[1:]] if joined else [[1, 0]] * 3
    return rows, cols, outer[1], middle[1], inner[1], middle[0], inner[0]
