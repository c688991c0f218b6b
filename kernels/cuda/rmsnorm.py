"""RMSNorm over the last dimension(s): y = x / sqrt(mean(x^2) + eps) * weight.

x: [..., *weight.shape], fp16, bf16 or fp32; weight: same dtype, or None. Sums and the scaling are in fp32, rounded
once to the output. The op moves bytes and little else, so a row is read from memory once: `threads` threads hold it in
registers as `N` packs of 16 bytes each, all of whose loads are under way before the first is used, and the sum goes
through warp shuffles and, for rows of more than one warp, one exchange in shared memory. Several short rows share a
block. Rows beyond 8 packs for each of 1024 threads are walked over twice, the second time backwards, so that what was
read last is found in registers and cache; so are rows of 8 to 16 KB, which take fewer registers then and have more
threads under way. Rows may lie apart and be permuted (up to three leading strides); where
addresses are no multiples of 16 bytes, packs are single elements. A sum has one fixed order: results repeat bit for
bit.
"""

import functools

import torch

from autokernel.native import build

KERNEL_TYPE = "rmsnorm"
BACKEND = "cuda"
TUNABLES = {
    "THREADS": [0, 32, 64, 128, 256, 512, 1024],  # threads per row; 0: as many as the row has packs / PACKS
    "PACKS": [1, 2, 4, 8],  # 16-byte loads per thread; rows too long for this, and 512 threads, take 8
    "STEPS": [0, 2, 4],  # in which rows of 8 to 16 KB are walked over twice; 0: once, held in registers
    "STEP_PACKS": [1, 2, 4],  # 16-byte loads per thread and step
    "STEP_RESIDENT": [1024, 1536, 2048],  # as RESIDENT, for those
    "PERSISTENT": [0, 1],  # 1: as many blocks as fit at once, each of which loads its next row while it works on one
    "RESIDENT": [512, 1024, 1536, 2048],  # threads per multiprocessor for whose registers the compiler makes room
    "LOAD": [0, 1, 2, 3],  # reads of x: 0 plain, 1 streaming (ld.cs), past L1 and 2 first to leave L2, 3 by 256 bytes
    "STORE": [0, 1],  # writes: 0 plain, 1 streaming (st.cs)
}
CONFIG = {
    "THREADS": 0,
    "PACKS": 4,
    "STEPS": 2,
    "STEP_PACKS": 2,
    "STEP_RESIDENT": 1536,
    "PERSISTENT": 0,
    "RESIDENT": 1024,
    "LOAD": 1,
    "STORE": 0,
}

SOURCE = r"""
#include <stdint.h>

// The few conversions needed, one instruction each; the headers that hold them take longer to parse than all of this.
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
template <class T> struct Word;  // what a 32-bit word of a row holds
template <> struct Word<float> {
  static constexpr int count = 1;
  static __device__ void widen(uint32_t word, float* out) { out[0] = __uint_as_float(word); }
  static __device__ uint32_t narrow(const float* in) { return __float_as_uint(in[0]); }
};
template <> struct Word<f16> {
  static constexpr int count = 2;
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
    for (int k = 0; k < words; ++k) word[k] = 0;
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

// The sum over a row's threads, in every one of them the same bits. blockDim.x threads share a row: a power of two up
// to 32, or whole warps. `partial` is free for reuse after the next __syncthreads but one.
static __device__ float row_sum(float v, float* partial) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (step < blockDim.x) v += __shfl_xor_sync(~0u, v, step);
  if (blockDim.x <= 32) return v;
  const int in_warp = threadIdx.x % 32;
  if (in_warp == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  v = in_warp < blockDim.x / 32 ? partial[in_warp] : 0.0f;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

struct Job {
  const void* x;
  const void* weight;  // or null
  void* y;
  int64_t rows, cols;
  int64_t stride[3];   // of the leading dimensions of x, in elements
  uint32_t size[2];    // of the last two of them
  float eps;
};

template <class T>
static __device__ const T* row_of(const Job& job, int64_t row) {
  const T* x = (const T*)job.x;
  if (job.size[0] == 1 && job.size[1] == 1) return x + row * job.stride[0];
  const uint32_t r = uint32_t(row), outer = r / job.size[1];
  x += outer / job.size[0] * job.stride[0] + outer % job.size[0] * job.stride[1];
  return x + r % job.size[1] * job.stride[2];
}

// The packs first, first + blockDim.x, ... of a row of `packs`; zeros beyond its end.
template <class T, int V, int N>
static __device__ void load_tile(Pack<T, V> (&tile)[N], const T* x, int first, int packs, bool once) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int at = first + i * blockDim.x;
    if (at < packs) tile[i].load(x + int64_t(at) * V, once);
    else tile[i].clear();
  }
}

// Threads of a block, and of a multiprocessor: for rows that are held, for those walked over twice, for those too long.
constexpr int MOST = 512, MOST_LONG = 1024;
enum Walk { HELD, TWICE, LONG };
constexpr int threads_of(Walk walk) { return walk == LONG ? MOST_LONG : MOST; }
constexpr int resident(Walk walk) { return walk == LONG ? MOST_LONG : walk == TWICE ? STEP_RESIDENT : RESIDENT; }

// A thread holds N packs of its row. What is not HELD may have more than all threads hold and is walked over in tiles,
// twice: the second time backwards, from the tile that is at hand.
template <class T, int V, int N, Walk WALK>
__global__ void __launch_bounds__(threads_of(WALK), resident(WALK) / threads_of(WALK)) rmsnorm_rows(const Job job) {
  constexpr bool TILED = WALK != HELD;
  constexpr bool AHEAD = PERSISTENT && N <= 4;  // a second set of more packs would not fit in the registers
  constexpr int GROUP = TILED ? 2 : N < 4 ? N : 4;  // packs whose weights are loaded together
  __shared__ float partial[2][32];
  const int lane = threadIdx.x, tile = N * blockDim.x, packs = int(job.cols / V);
  const int last = TILED ? (packs - 1) / tile * tile : 0;  // where the last tile begins
  const bool once = last == 0;
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const T* weight = (const T*)job.weight;

  Pack<T, V> held[N], next[N];
  if (AHEAD) load_tile(held, row_of<T>(job, row), lane, row < job.rows ? packs : 0, once);

  // All threads of a block make the same number of turns; one whose row is beyond the last only takes part in sums.
  int turn = 0;
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < job.rows; first += step) {
    const int count = row < job.rows ? packs : 0;
    const T* x = row_of<T>(job, row);
    if (AHEAD) load_tile(next, row_of<T>(job, row + step), lane, row + step < job.rows ? packs : 0, once);
    else load_tile(held, x, lane, count, once);

    float sum = 0;
    for (int at = 0;; at += tile) {
      if (TILED && at > 0) load_tile(held, x, at + lane, count, false);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float v[Pack<T, V>::width];
        held[i].widen(v);
#pragma unroll
        for (int k = 0; k < V; ++k) sum += v[k] * v[k];
      }
      if (!TILED || at == last) break;
    }
    const float scale = rsqrtf(row_sum(sum, partial[turn]) / float(job.cols) + job.eps);

    T* y = (T*)job.y + row * job.cols;
    for (int at = last;; at -= tile) {
      if (TILED && at < last) load_tile(held, x, at + lane, count, false);
      Pack<T, V> w[GROUP];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i % GROUP == 0 && weight) load_tile(w, weight, at + lane + i * blockDim.x, count, false);
        const int pack = at + lane + i * blockDim.x;
        if (pack >= count) continue;
        float v[Pack<T, V>::width];
        held[i].widen(v);
#pragma unroll
        for (int k = 0; k < V; ++k) v[k] *= scale;
        if (weight) {
          float p[Pack<T, V>::width];
          w[i % GROUP].widen(p);
#pragma unroll
          for (int k = 0; k < V; ++k) v[k] *= p[k];
        }
        held[i].narrow(v);
        held[i].store(y + int64_t(pack) * V);
      }
      if (!TILED || at == 0) break;
    }
    if (AHEAD) {
#pragma unroll
      for (int i = 0; i < N; ++i) held[i] = next[i];
    }
    row += step;
    turn ^= 1;
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

template <class T, int V, int N, Walk WALK>
static cudaError_t launch(const Job& job, int threads, cudaStream_t stream) {
  const dim3 block(threads, threads <= 32 ? 128 / threads : 1);
  int64_t blocks = (job.rows + block.y - 1) / block.y;
  if (PERSISTENT) {
    int device = 0, multiprocessors = 0, resident = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, rmsnorm_rows<T, V, N, WALK>, block.x * block.y, 0);
    if (blocks > multiprocessors * resident) blocks = multiprocessors * resident;
  }
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  rmsnorm_rows<T, V, N, WALK><<<unsigned(blocks), block, 0, stream>>>(job);
  return cudaGetLastError();
}

// V elements are one pack.
constexpr int64_t TWICE_FROM = 512, TWICE_TO = 1024;  // packs of 16 bytes
template <class T, int V>
static cudaError_t choose(const Job& job, cudaStream_t stream) {
  const int64_t packs = job.cols / V;
  if (packs > 0x7fff0000) return cudaErrorInvalidValue;
  if constexpr (V > 1) {
    if (STEPS && packs >= TWICE_FROM && packs <= TWICE_TO)
      return launch<T, V, STEP_PACKS, TWICE>(job, threads_for((packs + STEPS - 1) / STEPS, STEP_PACKS, MOST), stream);
    const int threads = threads_for(packs, PACKS, MOST);
    if (int64_t(threads) * PACKS >= packs) return launch<T, V, PACKS, HELD>(job, threads, stream);
  }
  constexpr int N = V > 1 ? 8 : 16;
  return launch<T, V, N, LONG>(job, threads_for(packs, N, MOST_LONG), stream);
}

template <class T>
static int rmsnorm(const Job& job, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T);
  uintptr_t bits = (uintptr_t)job.x | (uintptr_t)job.weight | (uintptr_t)job.y | uintptr_t(job.cols * sizeof(T));
  for (int64_t stride : job.stride) bits |= uintptr_t(stride * int64_t(sizeof(T)));
  return bits % 16 == 0 ? choose<T, V>(job, stream) : choose<T, 1>(job, stream);
}

// dtype: 0 fp32, 1 fp16, 2 bf16. x is [?, size0, size1, cols] with the strides; y is contiguous.
extern "C" int rmsnorm(const void* x, const void* weight, void* y, int64_t dtype, int64_t rows, int64_t cols,
                       int64_t stride0, int64_t stride1, int64_t stride2, int64_t size0, int64_t size1, double eps,
                       cudaStream_t stream) {
  const Job job = {x, weight, y, rows, cols, {stride0, stride1, stride2}, {uint32_t(size0), uint32_t(size1)},
                   float(eps)};
  return dtype == 0 ? rmsnorm<float>(job, stream) : dtype == 1 ? rmsnorm<f16>(job, stream) : rmsnorm<bf16>(job, stream);
}
"""

lib = build(SOURCE, backend="cuda", flags=[f"-D{knob}={value}" for knob, value in CONFIG.items()])
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def kernel_fn(x, weight, eps=1e-6):
    """The normalized x, contiguous, in x's dtype; weight's shape gives the normalized dimensions (None: the last).

    Raises: TypeError for a dtype other than fp32, fp16 and bf16; ValueError when weight does not fit x.
    """
    dtype, shape, rank = DTYPES.get(x.dtype), x.shape, 1
    if dtype is None or not x.is_cuda:
        raise TypeError(f"rmsnorm takes fp32, fp16 or bf16 on a GPU, not {x.dtype} on {x.device}")
    if weight is not None:
        rank = weight.dim()
        if weight.dtype != x.dtype or weight.device != x.device:
            raise TypeError(f"weight is {weight.dtype} on {weight.device}, x is {x.dtype} on {x.device}")
        if not rank or shape[-rank:] != weight.shape:
            raise ValueError(f"weight has shape {list(weight.shape)}, x has {list(shape)}")
        weight = weight.contiguous()
    elif not shape:
        raise ValueError("x has no dimension to normalize")
    layout = _layout(shape, x.stride(), rank)
    if layout is None:
        x = x.contiguous()
        layout = _layout(shape, x.stride(), rank)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if layout[0] and layout[1]:
        lib.rmsnorm(x, weight, out, dtype, *layout, float(eps))
    return out


@functools.lru_cache(maxsize=4096)
def _layout(shape, stride, rank):
    """(rows, cols, three strides, two sizes) of rows of `rank` dimensions, or None where x must be copied first.

    Leading dimensions are joined where one stride serves both; row r is then at r // (size0 * size1), r // size1 %
    size0 and r % size1.
    """
    cols = 1
    for size, step in zip(reversed(shape[-rank:]), reversed(stride[-rank:]), strict=True):
        if size != 1 and step != cols:
            return None
        cols *= size
    rows, joined = 1, []
    for size, step in zip(reversed(shape[:-rank]), reversed(stride[:-rank]), strict=True):
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
