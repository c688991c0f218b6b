"""Attention: softmax(q k^T * scale) v, causal or not, with grouped key and value heads.

q: [batch, heads, queries, head_dim]; k, v: [batch, kv_heads, keys, head_dim], fp16, bf16 or fp32; head_dim must be
contiguous, every other stride is free. The mask is aligned at the top left: query i sees keys 0..i. Scores, softmax and
output sums are fp32; fp32 inputs are multiplied in true fp32. The scores never leave the chip: a running maximum and
sum per row let the keys be visited once (flash attention).

Two libraries, compiled when first needed for a head_dim (rounded up to a multiple of 32) and dtype:
- tensor: mma.sync and cp.async, for every GPU since 8.0. Prefill: four warps have 16 rows each and share key blocks.
  Decode (few queries): the four warps have the same rows, all query heads of a kv head, and take turns with the keys.
  Where tiles are too few to fill the GPU, blocks split the keys and a second launch adds up their sums in order.
- simt: FFMA, for fp32, and for 16-bit rows of more than 256 elements.
"""

import ctypes
import functools
import math

import torch

from autokernel.native import build
from autokernel.target import target_of

KERNEL_TYPE = "flash_attention"
BACKEND = "cuda"
TUNABLES = {
    "WARPGROUPS": [0, 2, 3],  # wgmma: 64 rows of a tile each; 0: by head_dim
    "BLOCK_N": [0, 64, 80, 96, 112, 128, 144, 160, 176, 192],  # keys of a block; 0: by head_dim and mask
    "STAGES": [2, 3],  # key blocks in shared memory, and as many value blocks
    "PINGPONG": [0, 1],  # 1: warpgroups take turns at issuing products
    "SCHEDULE": [0, 1, 2],  # 0: a block per tile; else a block per multiprocessor, 1: fixed tiles, 2: the next free one
    "HEAVY_FIRST": [0, 1],  # 1: under a causal mask, tiles in the order of falling work
    "SECTION_MB": [0, 8, 16, 32],  # keys and values in flight at a time, for L2; 0: all. A fixed schedule takes all
    "MAX_EXPONENT": [0, 8],  # sums are rescaled when exponentials would exceed 2^this; 0: whenever the maximum grows
    "BY_POLYNOMIAL": [0, 1, 2, 3],  # of 8 exponentials, how many are left to the FMA units
    "BLOCK_SLABS": [1, 2],  # mma.sync prefill: rows of a warp, in 16s
    "BLOCK_KEYS": [0, 32, 64],  # keys of a block; 0: by head_dim
    "BLOCK_DEPTH": [2, 3],  # stages of its ring
    "DECODE_KEYS": [16, 32],  # the same of decode, per warp
    "DECODE_DEPTH": [2, 3, 4],
    "DECODE_WAVES": [1, 2, 3, 4, 6],  # blocks per multiprocessor that splits aim at
}
CONFIG = {
    "WARPGROUPS": 0,
    "BLOCK_N": 0,
    "STAGES": 2,
    "PINGPONG": 1,
    "SCHEDULE": 2,
    "HEAVY_FIRST": 1,
    "SECTION_MB": 32,
    "MAX_EXPONENT": 8,
    "BY_POLYNOMIAL": 0,
    "BLOCK_SLABS": 1,
    "BLOCK_KEYS": 0,
    "BLOCK_DEPTH": 2,
    "DECODE_KEYS": 16,
    "DECODE_DEPTH": 2,
    "DECODE_WAVES": 3,
}

SHARED = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

typedef __half f16;
typedef __nv_bfloat16 bf16;
typedef TYPE T;  // of q, k, v and the output

// What `_plan` packs. Strides are in elements and of batch, head and row; a row's elements are neighbours.
struct Problem {
  int64_t batch, heads, kv_heads, queries, keys, head_dim;
  int64_t q_stride[3], k_stride[3], v_stride[3];
  int64_t causal;
  int64_t aligned;     // every row of q, k and v starts on 16 bytes and is a multiple of them
  int64_t pack;        // neighbouring query heads, of one kv head, whose rows are handled as one matrix
  int64_t decode;      // a warp, not a block, goes through keys on its own
  int64_t splits;      // blocks that share the keys of a tile
  int64_t split_keys;  // keys of each
  int64_t section;     // heads in flight at a time (wgmma)
  int64_t sms;
};

// ---- instructions
__device__ __forceinline__ float exp2_fast(float x) {  // two ulps, 0 below 2^-126
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
// ---- end of instructions

__device__ __forceinline__ uint32_t pair(f16, float low, float high) {
  __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t pair(bf16, float low, float high) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}
__device__ __forceinline__ void narrow(float x, float* y) { *y = x; }
__device__ __forceinline__ void narrow(float x, f16* y) { *y = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, bf16* y) { *y = __float2bfloat16_rn(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(f16 x) { return __half2float(x); }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }

// 2^x by a polynomial of degree 4 (3e-6), for units other than the one that exp2_fast keeps busy.
__device__ __forceinline__ float exp2_polynomial(float x) {
  x = fmaxf(x, -125.0f);
  float shifted = x + 12582912.0f;  // 1.5 * 2^23: the sum's low mantissa bits hold x rounded to an integer
  float rest = x - (shifted - 12582912.0f);
  float y = 9.6181291e-3f;  // 2^rest on [-1/2, 1/2]
  y = fmaf(y, rest, 5.5503324e-2f);
  y = fmaf(y, rest, 2.4022652e-1f);
  y = fmaf(y, rest, 6.9314718e-1f);
  y = fmaf(y, rest, 1.0f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

// Fragments. The tensor cores leave a 16 x N slab of a product in a warp so: register 4i + e of a lane is row lane / 4
// (8 more for e >= 2), column 8i + 2 (lane % 4) + e % 2. A lane thus has two rows, and four lanes (a quad) share them.
// Taken two at a time, the same registers are the left operand of the next product: p v needs no exchange.

// Of the lane's two rows: the largest score so far, and this lane's share of the sum of exponentials.
struct Rows {
  float top[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};
};

// Hides the columns from limit[row] on, which counts from the lane's first column.
template <int N>
__device__ __forceinline__ void hide(float (&s)[N], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -INFINITY;
}

// Turns scores into exponentials exp2(scale * (s - top)), and says by what factor earlier results have to be
// multiplied. With LAZY > 0 the maximum is kept as long as no exponential exceeds 2^LAZY, and most factors are 1.
template <int LAZY, int POLYNOMIAL, int N>
__device__ __forceinline__ void exponentials(float (&s)[N], Rows& rows, float scale, float (&factor)[2]) {
  float high[2][2] = {{rows.top[0], rows.top[0]}, {rows.top[1], rows.top[1]}};
#pragma unroll
  for (int i = 0; i < N; ++i) high[i / 2 % 2][i % 2] = fmaxf(high[i / 2 % 2][i % 2], s[i]);
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = fmaxf(high[r][0], high[r][1]);
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
    if (LAZY > 0 && (top - rows.top[r]) * scale <= float(LAZY)) top = rows.top[r];
    // A row that has seen no key yet has no maximum: 0 instead makes its exponentials 0, not NaN.
    // Products are rounded on their own, so that the factor is exactly the quotient of the two shifts.
    shift[r] = __fmul_rn(top == -INFINITY ? 0.0f : top, scale);
    factor[r] = exp2_fast(__fmul_rn(rows.top[r], scale) - shift[r]);
    rows.top[r] = top;
    rows.sum[r] *= factor[r];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float x = fmaf(s[i], scale, -shift[i / 2 % 2]);
    s[i] = i % 8 < POLYNOMIAL ? exp2_polynomial(x) : exp2_fast(x);
    rows.sum[i / 2 % 2] += s[i];
  }
}

__device__ __forceinline__ void add_up(Rows& rows) {  // makes the sums those of the whole rows
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] += __shfl_xor_sync(0xffffffff, rows.sum[r], 1);
    rows.sum[r] += __shfl_xor_sync(0xffffffff, rows.sum[r], 2);
  }
}

template <int N>
__device__ __forceinline__ void round_pairs(const float (&s)[N], uint32_t (&p)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) p[i] = pair(T(), s[2 * i], s[2 * i + 1]);
}

template <int N>
__device__ __forceinline__ void multiply(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) o[i] *= factor[i / 2 % 2];
}

// Lane t of a quad gives word u to lane u, which keeps it as word t.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
  bool high = lane & 2, odd = lane & 1;
  uint32_t first = __shfl_xor_sync(0xffffffff, high ? w[0] : w[2], 2);
  uint32_t second = __shfl_xor_sync(0xffffffff, high ? w[1] : w[3], 2);
  (high ? w[0] : w[2]) = first;
  (high ? w[1] : w[3]) = second;
  first = __shfl_xor_sync(0xffffffff, odd ? w[0] : w[1], 1);
  second = __shfl_xor_sync(0xffffffff, odd ? w[2] : w[3], 1);
  (odd ? w[0] : w[1]) = first;
  (odd ? w[2] : w[3]) = second;
}

// Writes the slab divided by the sums to the lane's two rows (null: not part of the output), 16 bytes a lane and 64
// neighbouring bytes a quad where rows are multiples of 16 bytes.
template <int N>
__device__ __forceinline__ void write_rows(const float (&o)[N], const Rows& rows, T* const (&out)[2], int head_dim,
                                           int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float inverse = 1.0f / rows.sum[r];
    if (head_dim % 8 == 0) {
#pragma unroll
      for (int i = 0; i < N / 16; ++i) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int at = 16 * i + 4 * j + 2 * r;
          w[j] = pair(T(), o[at] * inverse, o[at + 1] * inverse);
        }
        transpose_quad(w, lane);
        int column = 32 * i + 8 * (lane % 4);
        if (out[r] && column < head_dim)
          *reinterpret_cast<uint4*>(out[r] + column) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        int column = i / 2 * 8 + 2 * (lane % 4) + i % 2;
        if (out[r] && column < head_dim) narrow(o[i / 2 * 4 + 2 * r + i % 2] * inverse, out[r] + column);
      }
    }
  }
}

// ---- launch
template <auto KERNEL, class... A>
static int launch(dim3 grid, int threads, int shared_bytes, cudaStream_t stream, const A&... arguments) {
  static uint64_t allowed = 0;  // devices that know of the size
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (!(allowed >> device % 64 & 1)) {
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(KERNEL), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 shared_bytes);
    if (error != cudaSuccess) return error;
    if (device < 64) allowed |= uint64_t(1) << device;
  }
  KERNEL<<<grid, threads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}
// ---- end of launch
"""

GENERAL = r"""
// ---- instructions
__device__ __forceinline__ void copy_16(void* to, const void* from, bool inside) {  // zeros where not inside
  int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
#define MMA(C_TYPE, PTX_TYPE)                                                                                         \
  __device__ __forceinline__ void mma(C_TYPE, float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {                \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." PTX_TYPE "." PTX_TYPE                                       \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                               \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                     \
  }
MMA(f16, "f16")
MMA(bf16, "bf16")
// ---- end of instructions

// A block's share of the work: rows from `first` on of one unit (`pack` query heads), keys begin..end.
struct Share {
  int batch, head, kv_head;  // head: the unit's first
  int first, rows;           // of the unit
  int begin, end;
  int seen_by_all;           // this many keys are visible to every row
};

template <int TILE>
__device__ __forceinline__ Share share_of_block(const Problem& p) {
  Share s;
  int queries = int(p.queries), keys = int(p.keys), pack = int(p.pack);
  s.rows = pack * queries;
  int tiles = (s.rows + TILE - 1) / TILE, heads = int(p.heads) / pack;
  int units = int(p.batch) * heads;
  int unit = blockIdx.x % units;
  s.first = (tiles - 1 - int(blockIdx.x / units)) * TILE;  // under a causal mask the last rows are the most work
  s.batch = unit / heads;
  s.head = unit % heads * pack;
  s.kv_head = s.head / int(p.heads / p.kv_heads);
  s.begin = int(blockIdx.y * p.split_keys);
  s.end = s.seen_by_all = keys;
  if (p.causal) {
    int last = min(s.first + TILE, s.rows) - 1;
    bool one_head = s.first / queries == last / queries;
    s.end = min(keys, one_head ? last % queries + 1 : queries);
    s.seen_by_all = min(keys, one_head ? s.first % queries + 1 : 1);
  }
  s.end = int(min(int64_t(s.end), s.begin + p.split_keys));
  return s;
}

// Row of the unit -> row of q and of the output, counted through all heads.
__device__ __forceinline__ int64_t output_row(const Problem& p, const Share& s, int row) {
  int queries = int(p.queries);
  return (int64_t(s.batch) * p.heads + s.head + row / queries) * queries + row % queries;
}
__device__ __forceinline__ const T* query_row(const T* q, const Problem& p, const Share& s, int row) {
  int queries = int(p.queries);
  return q + s.batch * p.q_stride[0] + (s.head + row / queries) * p.q_stride[1] + row % queries * p.q_stride[2];
}

// Where splits leave unnormalized sums of a row for `combine`: pitch floats of it, then (top * scale, sum).
__device__ __forceinline__ int pitch_of(int head_dim) { return (head_dim + 3) / 4 * 4; }
__device__ __forceinline__ float* partial_row(float* work, const Problem& p, int64_t split, int64_t row) {
  return work + (split * p.batch * p.heads * p.queries + row) * pitch_of(int(p.head_dim));
}
__device__ __forceinline__ float* partial_stats(float* work, const Problem& p, int64_t split, int64_t row) {
  int64_t rows = p.batch * p.heads * p.queries;
  return work + p.splits * rows * pitch_of(int(p.head_dim)) + 2 * (split * rows + row);
}

#if !SIMT
constexpr int PITCH = HEAD + 8;  // elements of a row in shared memory; 16 bytes more keep ldmatrix off one bank

// Fills COUNT rows with asynchronous copies, or with plain ones where 16-byte copies are impossible.
// row_at(i): where row i lies, or null for one that does not exist and is filled with zeros.
template <int COUNT, int THREADS, class At>
__device__ __forceinline__ void fill(T* tile, int thread, const Problem& p, const T* anything, At row_at) {
  int head_dim = int(p.head_dim);
  if (p.aligned) {
    constexpr int PIECES = HEAD / 8;
#pragma unroll
    for (int i = thread; i < COUNT * PIECES; i += THREADS) {
      int column = i % PIECES * 8;
      const T* row = row_at(i / PIECES);
      bool inside = row && column < head_dim;
      copy_16(tile + i / PIECES * PITCH + column, inside ? row + column : anything, inside);
    }
  } else {
    for (int i = thread; i < COUNT * HEAD; i += THREADS) {
      int column = i % HEAD;
      const T* row = row_at(i / HEAD);
      tile[i / HEAD * PITCH + column] = row && column < head_dim ? row[column] : T(0.0f);
    }
  }
}

// TEAM warps go through the same keys in step. 4: each has rows of its own (prefill). 1: all four have the same rows
// and every fourth block of keys, each with a ring of its own, and add up their results at the end (decode).
constexpr int ROWS = 16 * SLABS * TEAM, RINGS = 4 / TEAM, THREADS = 32 * TEAM;
constexpr int STAGE = 2 * KEYS * PITCH;  // elements: keys, then values
constexpr int BYTES = (ROWS * PITCH + RINGS * DEPTH * STAGE) * 2;
static_assert(TEAM == 4 || RINGS * DEPTH * STAGE * 2 >= 4 * ROWS * HEAD * 4, "no room to add up the warps' results");

__global__ void __launch_bounds__(128) attention(const T* q, const T* k, const T* v, T* out, float* work,
                                                 const Problem p, float scale, int sign) {
  extern __shared__ __align__(1024) uint8_t storage[];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int team = TEAM == 4 ? 0 : warp, thread = TEAM == 4 ? threadIdx.x : lane;
  T* queries = reinterpret_cast<T*>(storage);
  T* ring = queries + ROWS * PITCH + team * DEPTH * STAGE;
  const Share share = share_of_block<ROWS>(p);
  const T* keys_of_head = k + share.batch * p.k_stride[0] + share.kv_head * p.k_stride[1];
  const T* values_of_head = v + share.batch * p.v_stride[0] + share.kv_head * p.v_stride[1];

  constexpr int STEP = KEYS * RINGS;
  int begin = share.begin + team * KEYS;
  int blocks = max(0, (share.end - begin + STEP - 1) / STEP);
  auto prefetch = [&](int block) {
    if (block < blocks) {
      T* stage = ring + block % DEPTH * STAGE;
      int first = begin + block * STEP, count = int(p.keys) - first;
      fill<KEYS, THREADS>(stage, thread, p, k, [&](int i) {
        return i < count ? keys_of_head + (first + i) * p.k_stride[2] : nullptr;
      });
      fill<KEYS, THREADS>(stage + KEYS * PITCH, thread, p, v, [&](int i) {
        return i < count ? values_of_head + (first + i) * p.v_stride[2] : nullptr;
      });
    }
    copies_commit();  // an empty group, too, so that the count of groups stays that of blocks
  };

  fill<ROWS, 128>(queries, threadIdx.x, p, q, [&](int i) {
    return share.first + i < share.rows ? query_row(q, p, share, share.first + i) : nullptr;
  });
  copies_commit();
  for (int block = 0; block < DEPTH - 1; ++block) prefetch(block);
  copies_wait<DEPTH - 1>();  // the queries have come
  __syncthreads();
  if (sign) {  // a scale below 0 is that of the negated queries (1), a scale of 0 that of no queries (2)
    uint32_t* words = reinterpret_cast<uint32_t*>(queries);
    for (int i = threadIdx.x; i < ROWS * PITCH / 2; i += 128) words[i] = sign == 1 ? words[i] ^ 0x80008000u : 0;
    __syncthreads();
  }

  int first_row = TEAM == 4 ? warp * 16 * SLABS : 0;  // of this warp, in the tile
  int limit[SLABS][2];                                // keys that the lane's rows see
#pragma unroll
  for (int i = 0; i < SLABS * 2; ++i) {
    int row = share.first + first_row + 16 * (i / 2) + 8 * (i % 2) + lane / 4;
    limit[i / 2][i % 2] = p.causal ? min(int(p.keys), row % int(p.queries) + 1) : int(p.keys);
  }
  float o[SLABS][HEAD / 2] = {};
  Rows rows[SLABS];

  for (int block = 0; block < blocks; ++block) {
    copies_wait<DEPTH - 2>();  // this block has come, for this thread
    if (TEAM == 4) __syncthreads();
    else __syncwarp();  // for all of the team; and all have left the previous block, whose stage is filled next
    prefetch(block + DEPTH - 1);
    const T* key_tile = ring + block % DEPTH * STAGE;
    const T* value_tile = key_tile + KEYS * PITCH;

    float s[SLABS][KEYS / 2] = {};
#pragma unroll
    for (int d = 0; d < HEAD / 16; ++d) {
      uint32_t a[SLABS][4];
#pragma unroll
      for (int t = 0; t < SLABS; ++t)  // rows 0-7, 8-15, then the same of the next 8 columns
        load_matrices(a[t], queries + (first_row + 16 * t + lane % 16) * PITCH + 16 * d + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        uint32_t b[4];  // keys 0-7: columns 0-7, 8-15; keys 8-15: the same
        load_matrices(b, key_tile + (16 * n + lane % 8 + lane / 16 * 8) * PITCH + 16 * d + lane / 8 % 2 * 8);
#pragma unroll
        for (int t = 0; t < SLABS; ++t) {
          mma(T(), s[t] + 8 * n, a[t], b[0], b[1]);
          mma(T(), s[t] + 8 * n + 4, a[t], b[2], b[3]);
        }
      }
    }
    int first_key = begin + block * STEP;
    uint32_t probabilities[SLABS][KEYS / 4];
#pragma unroll
    for (int t = 0; t < SLABS; ++t) {
      if (first_key + KEYS > share.seen_by_all) {
        int from = first_key + 2 * (lane % 4);
        const int visible[2] = {limit[t][0] - from, limit[t][1] - from};
        hide(s[t], visible);
      }
      float factor[2];
      exponentials<0, 0>(s[t], rows[t], scale, factor);
      multiply(o[t], factor);
      round_pairs(s[t], probabilities[t]);
    }
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
#pragma unroll
      for (int d = 0; d < HEAD / 16; ++d) {
        uint32_t b[4];  // columns 0-7: keys 0-7, 8-15; columns 8-15: the same
        load_transposed(b, value_tile + (16 * n + lane % 16) * PITCH + 16 * d + lane / 16 * 8);
#pragma unroll
        for (int t = 0; t < SLABS; ++t) {
          mma(T(), o[t] + 8 * d, probabilities[t] + 4 * n, b[0], b[1]);
          mma(T(), o[t] + 8 * d + 4, probabilities[t] + 4 * n, b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int t = 0; t < SLABS; ++t) add_up(rows[t]);
  int head_dim = int(p.head_dim);
  if constexpr (TEAM == 4) {
#pragma unroll
    for (int t = 0; t < SLABS; ++t) {
      T* to[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int row = share.first + first_row + 16 * t + 8 * r + lane / 4;
        to[r] = nullptr;
        if (row >= share.rows) continue;
        int64_t of_all = output_row(p, share, row);
        to[r] = out + of_all * head_dim;
        if (p.splits == 1) continue;
        float* sums = partial_row(work, p, blockIdx.y, of_all);
#pragma unroll
        for (int i = 0; i < HEAD / 8; ++i) {
          int column = 8 * i + 2 * (lane % 4);  // even, and the pitch is: a pair lies in the row or outside
          if (column < head_dim)
            *reinterpret_cast<float2*>(sums + column) = make_float2(o[t][4 * i + 2 * r], o[t][4 * i + 2 * r + 1]);
        }
        if (lane % 4 == 0)
          *reinterpret_cast<float2*>(partial_stats(work, p, blockIdx.y, of_all)) =
              make_float2(__fmul_rn(rows[t].top[r], scale), rows[t].sum[r]);
      }
      if (p.splits == 1) write_rows(o[t], rows[t], to, head_dim, lane);
    }
  } else {
    // The rings are done with: each warp leaves its sums there, and all add them up in the order of the warps.
    float* sums = reinterpret_cast<float*>(queries + ROWS * PITCH);
    __shared__ float stats[4][ROWS][2];
    __syncthreads();
#pragma unroll
    for (int t = 0; t < SLABS; ++t)
#pragma unroll
      for (int i = 0; i < HEAD / 2; ++i) {
        int row = 16 * t + i / 2 % 2 * 8 + lane / 4, column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        sums[(warp * ROWS + row) * HEAD + column] = o[t][i];
        if (i % 2 == 0 && i < 4 && lane % 4 == 0) {
          stats[warp][row][0] = __fmul_rn(rows[t].top[i / 2], scale);
          stats[warp][row][1] = rows[t].sum[i / 2];
        }
      }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * HEAD; i += 128) {
      int row = i / HEAD, column = i % HEAD;
      if (share.first + row >= share.rows || column >= head_dim) continue;
      float top = -INFINITY, total = 0.0f, sum = 0.0f;
      for (int w = 0; w < 4; ++w) top = fmaxf(top, stats[w][row][0]);
      for (int w = 0; w < 4; ++w) {
        float factor = stats[w][row][1] == 0.0f ? 0.0f : exp2_fast(stats[w][row][0] - top);  // 0: saw no key
        total += factor * stats[w][row][1];
        sum += factor * sums[(w * ROWS + row) * HEAD + column];
      }
      int64_t of_all = output_row(p, share, share.first + row);
      if (p.splits == 1) {
        narrow(sum / total, out + of_all * head_dim + column);
        continue;
      }
      partial_row(work, p, blockIdx.y, of_all)[column] = sum;
      if (column == 0)
        *reinterpret_cast<float2*>(partial_stats(work, p, blockIdx.y, of_all)) = make_float2(top, total);
    }
  }
}
#else
// True fp32 (and 16-bit rows too wide for the registers of the above): a thread has 8 rows x 4 keys of the scores, then
// 8 rows x COLUMNS / 16 columns of the output. blockIdx.z: which COLUMNS of the output; scores are computed for each.
constexpr int ROWS = 64, KEYS = 64, DEPTH = 32, COLUMNS = HEAD < 128 ? HEAD : 128;
constexpr int PITCH = DEPTH + 4, SCORE_PITCH = KEYS + 4;  // 16-byte reads down a column touch all banks
constexpr int BYTES = 4 * ((ROWS + KEYS) * PITCH + ROWS * SCORE_PITCH + KEYS * COLUMNS);

__global__ void __launch_bounds__(128, 3) attention(const T* q, const T* k, const T* v, T* out, float* work,
                                                    const Problem p, float scale) {
  extern __shared__ __align__(1024) uint8_t storage[];
  float* query_tile = reinterpret_cast<float*>(storage);
  float* key_tile = query_tile + ROWS * PITCH;
  float* scores = key_tile + KEYS * PITCH;
  float* value_tile = scores + ROWS * SCORE_PITCH;
  int x = threadIdx.x % 16, y = threadIdx.x / 16 * 8;  // keys and columns: x, x + 16 ..; rows: y to y + 7
  const Share share = share_of_block<ROWS>(p);
  const T* keys_of_head = k + share.batch * p.k_stride[0] + share.kv_head * p.k_stride[1];
  const T* values_of_head = v + share.batch * p.v_stride[0] + share.kv_head * p.v_stride[1];
  int head_dim = int(p.head_dim), keys = int(p.keys), first_column = blockIdx.z * COLUMNS;

  __shared__ const T* query_rows[ROWS];
  __shared__ int limits[ROWS];  // keys that a row sees
  if (threadIdx.x < ROWS) {
    int row = share.first + threadIdx.x;
    query_rows[threadIdx.x] = row < share.rows ? query_row(q, p, share, row) : nullptr;
    limits[threadIdx.x] = p.causal ? min(keys, row % int(p.queries) + 1) : keys;
  }

  float o[8][COLUMNS / 16] = {}, top[8], sum[8] = {};
#pragma unroll
  for (int r = 0; r < 8; ++r) top[r] = -INFINITY;

  for (int first = share.begin; first < share.end; first += KEYS) {
    float s[8][4] = {};
    for (int d = 0; d < head_dim; d += DEPTH) {
      __syncthreads();  // the previous tiles have been read
      int column = d + threadIdx.x % DEPTH;
#pragma unroll 4
      for (int row = threadIdx.x / DEPTH; row < ROWS; row += 128 / DEPTH) {
        const T* from = query_rows[row];
        query_tile[row * PITCH + column - d] = from && column < head_dim ? widen(from[column]) : 0.0f;
      }
#pragma unroll 4
      for (int row = threadIdx.x / DEPTH; row < KEYS; row += 128 / DEPTH) {
        bool inside = first + row < keys && column < head_dim;
        const T* from = keys_of_head + (first + row) * p.k_stride[2] + column;
        key_tile[row * PITCH + column - d] = inside ? widen(*from) : 0.0f;
      }
      if (d == 0) {
#pragma unroll 8
        for (int i = threadIdx.x; i < KEYS * COLUMNS; i += 128) {
          int row = i / COLUMNS, of_value = first_column + i % COLUMNS;
          bool inside = first + row < keys && of_value < head_dim;
          value_tile[i] = inside ? widen(values_of_head[(first + row) * p.v_stride[2] + of_value]) : 0.0f;
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int e = 0; e < DEPTH; e += 4) {
        float4 b[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) b[j] = *reinterpret_cast<float4*>(key_tile + (x + 16 * j) * PITCH + e);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          float4 a = *reinterpret_cast<float4*>(query_tile + (y + r) * PITCH + e);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            s[r][j] = fmaf(a.x, b[j].x, s[r][j]);
            s[r][j] = fmaf(a.y, b[j].y, s[r][j]);
            s[r][j] = fmaf(a.z, b[j].z, s[r][j]);
            s[r][j] = fmaf(a.w, b[j].w, s[r][j]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float high = top[r];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[r][j] = first + x + 16 * j < limits[y + r] ? s[r][j] * scale : -INFINITY;
        high = fmaxf(high, s[r][j]);
      }
#pragma unroll
      for (int lanes = 8; lanes > 0; lanes /= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, lanes));
      float base = high == -INFINITY ? 0.0f : high;  // no key seen yet: exponentials are 0, not NaN
      float factor = exp2f(top[r] - base);
      top[r] = high;
      sum[r] *= factor;
#pragma unroll
      for (int j = 0; j < COLUMNS / 16; ++j) o[r][j] *= factor;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float e = exp2f(s[r][j] - base);
        sum[r] += e;
        scores[(y + r) * SCORE_PITCH + x + 16 * j] = e;
      }
    }
    __syncwarp();  // a row is written and read by the same half warp
#pragma unroll 1
    for (int key = 0; key < KEYS; key += 4) {
      float a[8][4];
#pragma unroll
      for (int r = 0; r < 8; ++r)
        *reinterpret_cast<float4*>(a[r]) = *reinterpret_cast<float4*>(scores + (y + r) * SCORE_PITCH + key);
#pragma unroll
      for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int j = 0; j < COLUMNS / 32; ++j) {
          float2 b = *reinterpret_cast<float2*>(value_tile + (key + u) * COLUMNS + 2 * x + 32 * j);
#pragma unroll
          for (int r = 0; r < 8; ++r) {
            o[r][2 * j] = fmaf(a[r][u], b.x, o[r][2 * j]);
            o[r][2 * j + 1] = fmaf(a[r][u], b.y, o[r][2 * j + 1]);
          }
        }
    }
  }

#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], lanes);
    if (share.first + y + r >= share.rows) continue;
    int64_t row = output_row(p, share, share.first + y + r);
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j) {
      int column = first_column + 2 * x + j / 2 * 32 + j % 2;
      if (column >= head_dim) continue;
      if (p.splits == 1) narrow(o[r][j] / sum[r], out + row * head_dim + column);
      else partial_row(work, p, blockIdx.y, row)[column] = o[r][j];
    }
    if (p.splits > 1 && x == 0 && blockIdx.z == 0)
      *reinterpret_cast<float2*>(partial_stats(work, p, blockIdx.y, row)) = make_float2(top[r], sum[r]);
  }
}
#endif

// Adds up what the splits of a row left, in an order that does not depend on when they ran. One block a row.
__global__ void __launch_bounds__(256) combine(T* out, float* work, const Problem p) {
  __shared__ float sums[8][128];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, splits = int(p.splits), head_dim = int(p.head_dim);
  int64_t row = blockIdx.x;
  float top = -INFINITY, total = 0.0f;
  for (int s = lane; s < splits; s += 32) top = fmaxf(top, partial_stats(work, p, s, row)[0]);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, lanes));
  auto weight = [&](int split) {
    float2 stats = *reinterpret_cast<float2*>(partial_stats(work, p, split, row));
    return make_float2(stats.y == 0.0f ? 0.0f : exp2f(stats.x - top), stats.y);  // 0: the split saw no key
  };
  for (int s = lane; s < splits; s += 32) {
    float2 w = weight(s);
    total += w.x * w.y;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(0xffffffff, total, lanes);
  for (int first = 0; first < head_dim; first += 128) {
    float4 mine = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (first + 4 * lane < head_dim) {
#pragma unroll 4
      for (int s = warp; s < splits; s += 8) {
        float4 part = *reinterpret_cast<float4*>(partial_row(work, p, s, row) + first + 4 * lane);
        float w = weight(s).x;
        mine.x = fmaf(w, part.x, mine.x);
        mine.y = fmaf(w, part.y, mine.y);
        mine.z = fmaf(w, part.z, mine.z);
        mine.w = fmaf(w, part.w, mine.w);
      }
    }
    *reinterpret_cast<float4*>(&sums[warp][4 * lane]) = mine;
    __syncthreads();
    int column = first + threadIdx.x;
    if (threadIdx.x < 128 && column < head_dim) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) sum += sums[w][threadIdx.x];
      narrow(sum / total, out + row * head_dim + column);
    }
    __syncthreads();
  }
}

// `of_scores` includes log2(e): the exponentials are powers of two.
extern "C" int attend(const T* q, const T* k, const T* v, T* out, float* work, const Problem* problem, double of_scores,
                      cudaStream_t stream) {
  const Problem& p = *problem;
  float scale = float(of_scores);
  int64_t tiles = (p.pack * p.queries + ROWS - 1) / ROWS, units = p.batch * (p.heads / p.pack);
  dim3 grid(unsigned(tiles * units), unsigned(p.splits));
#if SIMT
  grid.z = unsigned((p.head_dim + COLUMNS - 1) / COLUMNS);
  int status = launch<attention>(grid, 128, BYTES, stream, q, k, v, out, work, p, scale);
#else
  int sign = scale < 0.0f ? 1 : scale == 0.0f ? 2 : 0;
  scale = sign == 2 ? 1.0f : fabsf(scale);
  int status = launch<attention>(grid, 128, BYTES, stream, q, k, v, out, work, p, scale, sign);
#endif
  if (status != cudaSuccess || p.splits == 1) return status;
  return launch<combine>(dim3(unsigned(p.batch * p.heads * p.queries)), 256, 0, stream, out, work, p);
}
"""

WGMMA = r"""
#include <cuda.h>

// ---- instructions
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_ready() {  // their state is visible to the copy engine, too
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {  // arrives, and announces bytes
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Until the phase of this parity is over. That of parity 1 is over before the first.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred over;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@over bra through;\nbra again;\nthrough:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void tensor_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tensor_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row,
                                            int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head),
      "r"(batch) : "memory");
}
template <int COUNT>
__device__ __forceinline__ void set_registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void set_registers_less() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of a product's registers to before the wait for it.
template <int N>
__device__ __forceinline__ void settle(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
// ---- end of instructions

// Tiles in shared memory are chunks of COLUMNS elements of head_dim, each a matrix of ROW_BYTES (128 or 64) by rows.
// The copy engine permutes the 16-byte pieces within every 8 rows (bits 4-6 of the address ^= bits 7-9, or with rows of
// 64 bytes bits 4-5 ^= bits 7-8), and the tensor cores undo it: both take the bits from the address, so that a chunk
// has to start on 8 rows, while a product may start at any piece of the first row.
constexpr int COLUMNS = HEAD % 64 == 0 ? 64 : 32, CHUNKS = HEAD / COLUMNS, ROW_BYTES = 2 * COLUMNS;
constexpr int BLOCK_M = 64 * WARPGROUPS;
constexpr int Q_BYTES = BLOCK_M * HEAD * 2, KV_BYTES = BLOCK_N * HEAD * 2;
constexpr int BARRIERS = Q_BYTES + 2 * STAGES * KV_BYTES;  // offset of the barriers
constexpr int SHARED_BYTES = 1024 + BARRIERS + 8 * (2 + 4 * STAGES) + 8;
static_assert(BLOCK_N % 16 == 0 && SHARED_BYTES <= 227 * 1024, "the tiles do not fit in shared memory");

// Operand descriptors: address / 16 (bits 0-13), leading offset / 16 (16-29), stride offset / 16 (32-45), swizzle
// (62-63: 1 is 128 bytes, 2 is 64). The stride offset leads from 8 rows to the next 8. q and k have the summed
// dimension along rows: the leading offset is not used. v has the output's columns along rows (the "transposed"
// operand): its leading offset leads from one chunk of columns to the next.
constexpr uint64_t SWIZZLE = uint64_t(ROW_BYTES == 128 ? 1 : 2) << 62;
constexpr uint64_t ALONG = SWIZZLE | uint64_t(8 * ROW_BYTES / 16) << 32 | uint64_t(1) << 16;
constexpr uint64_t ACROSS = SWIZZLE | uint64_t(8 * ROW_BYTES / 16) << 32 | uint64_t(BLOCK_N * ROW_BYTES / 16) << 16;

// At launch all warpgroups have the same share of the register file, in steps of 8 a thread: the producer gives most of
// its share to the consumers. More than was given at launch would be waited for in vain.
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 32, CONSUMER_REGISTERS = WARPGROUPS == 2 ? 232 : 160;
constexpr int LAUNCH_REGISTERS = 512 / (WARPGROUPS + 1) / 8 * 8;
static_assert(PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS == (WARPGROUPS + 1) * LAUNCH_REGISTERS, "");

struct Tiles {
  int queries, keys, heads, group, head_dim;
  int rows;     // tiles along the queries
  int pairs;    // of batch and head
  int section;  // as many pairs are worked on at a time, so that their keys and values stay in L2
  int count;    // rows * pairs
};
struct Tile { int row, head, batch; };

// Sections one after the other; in a section the heaviest tiles of all its heads first.
__device__ __forceinline__ Tile tile_at(const Tiles& p, int index) {
  int per_section = p.section * p.rows, section = index / per_section, rest = index - section * per_section;
  int width = min(p.section, p.pairs - section * p.section), row = rest / width;
  int pair = section * p.section + rest - row * width;
  return {CAUSAL && HEAVY_FIRST ? p.rows - 1 - row : row, pair % p.heads, pair / p.heads};
}
__device__ __forceinline__ int blocks_of(const Tiles& p, const Tile& tile) {
  int seen = CAUSAL ? min(p.keys, (tile.row + 1) * BLOCK_M) : p.keys;
  return (seen + BLOCK_N - 1) / BLOCK_N;
}

// Addresses in shared memory. Every buffer has a barrier that says it is full and one that says it is free again:
// full[i] completes when the producer's one arrival and all announced bytes have come; free[i] when all consumer warps
// have arrived after the products that read it. Waiting starts with parity 0 for full and parity 1 for free.
struct Storage {
  uint32_t base;
  __device__ uint32_t q() const { return base; }
  __device__ uint32_t k(int stage) const { return base + Q_BYTES + stage * KV_BYTES; }
  __device__ uint32_t v(int stage) const { return base + Q_BYTES + (STAGES + stage) * KV_BYTES; }
  __device__ uint32_t q_full() const { return base + BARRIERS; }
  __device__ uint32_t q_free() const { return base + BARRIERS + 8; }
  __device__ uint32_t k_full(int stage) const { return base + BARRIERS + 16 + 8 * stage; }
  __device__ uint32_t k_free(int stage) const { return base + BARRIERS + 16 + 8 * (STAGES + stage); }
  __device__ uint32_t v_full(int stage) const { return base + BARRIERS + 16 + 8 * (2 * STAGES + stage); }
  __device__ uint32_t v_free(int stage) const { return base + BARRIERS + 16 + 8 * (3 * STAGES + stage); }
};
constexpr int ANNOUNCED = BARRIERS + 8 * (2 + 4 * STAGES);  // offset of the index of the tile whose q is there

struct Ring {  // where in a ring of stages, and the parity of its full barriers this time round
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap* map, uint32_t barrier, int rows, int first,
                                          int head, int batch) {
  barrier_expect(barrier, rows * HEAD * 2);  // what lies outside the tensor is filled with zeros, and counts
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk)
    tensor_load(to + chunk * rows * ROW_BYTES, map, barrier, chunk * COLUMNS, first, head, batch);
}

// One thread. It alone knows which tile is next, and announces each beside its q; -1 is the end.
__device__ __forceinline__ void produce(const CUtensorMap* q_map, const CUtensorMap* k_map, const CUtensorMap* v_map,
                                        const Tiles& p, int* counter, const Storage& shared, volatile int* announced) {
  Ring k_ring, v_ring;
  int index = blockIdx.x;
  for (int round = 0;; ++round) {
    barrier_wait(shared.q_free(), round & 1 ^ 1);
    if (index >= p.count) break;
    Tile tile = tile_at(p, index);
    *announced = index;  // the arrival that follows makes it visible to those who wait for it
    load_tile(shared.q(), q_map, shared.q_full(), BLOCK_M, tile.row * BLOCK_M, tile.head, tile.batch);
    int blocks = gridDim.x;
    if (SCHEDULE == 0) index = p.count;
    else if (SCHEDULE == 2 && counter) index = blocks + atomicAdd(counter, 1);
    else index = (round + 1) * blocks + (round & 1 ? blockIdx.x : blocks - 1 - blockIdx.x);  // to and fro

    int kv_head = tile.head / p.group, last = blocks_of(p, tile) - 1;
    auto load_k = [&](int block) {
      int stage = k_ring.stage;
      barrier_wait(shared.k_free(stage), k_ring.parity ^ 1);
      load_tile(shared.k(stage), k_map, shared.k_full(stage), BLOCK_N, block * BLOCK_N, kv_head, tile.batch);
      k_ring.advance();
    };
    auto load_v = [&](int block) {
      int stage = v_ring.stage;
      barrier_wait(shared.v_free(stage), v_ring.parity ^ 1);
      load_tile(shared.v(stage), v_map, shared.v_full(stage), BLOCK_N, block * BLOCK_N, kv_head, tile.batch);
      v_ring.advance();
    };
    load_k(last);
#pragma unroll 1
    for (int block = last; block > 0; --block) {  // in the order of use
      load_k(block - 1);
      load_v(block);
    }
    load_v(0);
  }
  *announced = -1;
  barrier_arrive(shared.q_full());
}

// scores = q k^T of this warpgroup's 64 rows; 16 elements of head_dim are 32 bytes, within a swizzled row.
__device__ __forceinline__ void multiply_keys(float (&s)[BLOCK_N / 2], uint32_t q, uint32_t k) {
  uint64_t a = ALONG | q >> 4, b = ALONG | k >> 4;
#pragma unroll
  for (int d = 0; d < HEAD / 16; ++d) {
    constexpr int PER_CHUNK = COLUMNS / 16;
    int inside = d % PER_CHUNK * 32, chunk = d / PER_CHUNK * ROW_BYTES;
    wgmma_scores(s, a + (chunk * BLOCK_M + inside) / 16, b + (chunk * BLOCK_N + inside) / 16, d > 0);
  }
}
// o += p v; 16 keys are 16 rows of v.
__device__ __forceinline__ void multiply_values(float (&o)[HEAD / 2], const uint32_t (&p)[BLOCK_N / 4], uint32_t v) {
  uint64_t b = ACROSS | v >> 4;
#pragma unroll
  for (int n = 0; n < BLOCK_N / 16; ++n) wgmma_output(o, p + 4 * n, b + n * 16 * ROW_BYTES / 16);
}

// A warpgroup with 64 rows of each tile. Key blocks go from the last to the first, so that the masked ones come first.
// The products of a block's scores and of the previous block's probabilities are issued together; while the latter
// runs, the scores that have come are turned into probabilities. With PINGPONG the warpgroups take turns at issuing, so
// that one's products run during the other's exponentials.
__device__ __forceinline__ void consume(const Tiles& p, const Storage& shared, volatile int* announced, T* out,
                                        float scale) {
  // Broadcasts tell the compiler that a warp is of one mind about what loops depend on; else it serializes wgmma.
  const int group = __shfl_sync(0xffffffff, int(threadIdx.x) / 128 - 1, 0);
  const int lane = threadIdx.x % 32, row_in_group = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint32_t q = shared.q() + group * 64 * ROW_BYTES;
  // Turn barriers: a group waits at its own, with the arrival of the group before it. The first turn is group 0's.
  auto await_turn = [&] { if (PINGPONG) named_sync(1 + group, 256); };
  auto pass_turn = [&] { if (PINGPONG) named_arrive(1 + (group + 1) % WARPGROUPS, 256); };
  auto release = [&](uint32_t barrier) { if (lane == 0) barrier_arrive(barrier); };
  if (group == WARPGROUPS - 1) pass_turn();

  Ring k_ring, v_ring;
  for (uint32_t parity = 0;; parity ^= 1) {
    barrier_wait(shared.q_full(), parity);
    const int index = __shfl_sync(0xffffffff, *announced, 0);
    if (index < 0) break;
    const Tile tile = tile_at(p, index);
    const int first_row = tile.row * BLOCK_M + group * 64, row = first_row + row_in_group;
    const int blocks = blocks_of(p, tile);
    const int seen_by_all = (CAUSAL ? min(p.keys, first_row + 1) : p.keys) / BLOCK_N;  // blocks; others need the mask
    int own = CAUSAL ? min(blocks, (first_row + 63) / BLOCK_N + 1) : blocks;           // blocks that some row sees
    if (first_row >= p.queries) own = 1;                                               // no rows: finish soon
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) limit[r] = (CAUSAL ? min(p.keys, row + 8 * r + 1) : p.keys) - 2 * (lane % 4);

    for (int block = blocks; block > own; --block) {  // the other groups' blocks
      barrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
      release(shared.k_free(k_ring.stage));
      k_ring.advance();
      barrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
      release(shared.v_free(v_ring.stage));
      v_ring.advance();
      await_turn();
      pass_turn();
    }

    float s[BLOCK_N / 2], o[HEAD / 2], factor[2];
    uint32_t probabilities[BLOCK_N / 4];
    Rows rows;
#pragma unroll
    for (int i = 0; i < HEAD / 2; ++i) o[i] = 0.0f;
    auto mask = [&](int block) {
      const int visible[2] = {limit[0] - block * BLOCK_N, limit[1] - block * BLOCK_N};
      hide(s, visible);
    };

    int block = own - 1;
    barrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
    wgmma_fence();  // registers that products read or write are settled
    multiply_keys(s, q, shared.k(k_ring.stage));
    wgmma_commit();
    wgmma_wait<0>();
    settle(s);
    release(shared.k_free(k_ring.stage));
    k_ring.advance();
    if (block == 0) release(shared.q_free());
    if (block >= seen_by_all) mask(block);
    exponentials<MAX_EXPONENT, BY_POLYNOMIAL>(s, rows, scale, factor);
    round_pairs(s, probabilities);

    while (--block >= 0) {
      barrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
      await_turn();
      wgmma_fence();
      multiply_keys(s, q, shared.k(k_ring.stage));
      wgmma_commit();
      barrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
      wgmma_fence();
      multiply_values(o, probabilities, shared.v(v_ring.stage));
      wgmma_commit();
      pass_turn();
      wgmma_wait<1>();  // the scores
      settle(s);
      release(shared.k_free(k_ring.stage));
      k_ring.advance();
      if (block == 0) release(shared.q_free());  // the producer may load the next tile's
      if (block >= seen_by_all) mask(block);
      exponentials<MAX_EXPONENT, BY_POLYNOMIAL>(s, rows, scale, factor);
      // The assembler moves the wait to before the exponentials, unless a branch that depends on them is between.
      if (rows.sum[0] + rows.sum[1] < 0.0f) __nanosleep(1);  // never
      wgmma_wait<0>();  // the output so far
      settle(o);
      release(shared.v_free(v_ring.stage));
      v_ring.advance();
      if (MAX_EXPONENT == 0 || __any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f)) multiply(o, factor);
      round_pairs(s, probabilities);
    }
    barrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
    wgmma_fence();
    multiply_values(o, probabilities, shared.v(v_ring.stage));
    wgmma_commit();
    add_up(rows);
    wgmma_wait<0>();
    settle(o);
    release(shared.v_free(v_ring.stage));
    v_ring.advance();

    T* of_head = out + (int64_t(tile.batch) * p.heads + tile.head) * p.queries * p.head_dim;
    T* const to[2] = {row < p.queries ? of_head + int64_t(row) * p.head_dim : nullptr,
                      row + 8 < p.queries ? of_head + int64_t(row + 8) * p.head_dim : nullptr};
    write_rows(o, rows, to, p.head_dim, lane);
  }
}

__global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
    attention(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ CUtensorMap v_map, const Tiles p, int* counter, T* out, float scale) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t storage[];
  uint32_t offset = (1024 - shared_address(storage) % 1024) % 1024;
  Storage shared = {shared_address(storage) + offset};
  volatile int* announced = reinterpret_cast<volatile int*>(storage + offset + ANNOUNCED);
  if (threadIdx.x == 0) {
    tensor_prefetch(&q_map);
    tensor_prefetch(&k_map);
    tensor_prefetch(&v_map);
    barrier_init(shared.q_full(), 1);
    barrier_init(shared.q_free(), 4 * WARPGROUPS);
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.k_full(stage), 1);
      barrier_init(shared.v_full(stage), 1);
      barrier_init(shared.k_free(stage), 4 * WARPGROUPS);
      barrier_init(shared.v_free(stage), 4 * WARPGROUPS);
    }
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    set_registers_less<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(&q_map, &k_map, &v_map, p, counter, shared, announced);
  } else {
    set_registers_more<CONSUMER_REGISTERS>();
    consume(p, shared, announced, out, scale);
  }
#endif
}

// ---- launch
// A map of [batch, head, row, head_dim] from which the copy engine takes boxes of `box_rows` rows by `columns`.
static int make_map(CUtensorMap* map, const T* base, const int64_t* stride, int64_t batch, int64_t heads, int64_t rows,
                    int64_t head_dim, int box_rows, int columns) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (!encode) {
    cudaDriverEntryPointQueryResult found;
    void* function = nullptr;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                                         &found);
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    encode = reinterpret_cast<decltype(encode)>(function);
  }
  const cuuint64_t sizes[4] = {cuuint64_t(head_dim), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(batch)};
  cuuint64_t steps[3];
  for (int i = 0; i < 3; ++i) steps[i] = sizes[i + 1] == 1 ? 1024 : stride[2 - i] * sizeof(T);  // of one: any will do
  const cuuint32_t box[4] = {cuuint32_t(columns), cuuint32_t(box_rows), 1, 1}, every[4] = {1, 1, 1, 1};
  CUresult status = encode(map, IS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                           const_cast<T*>(base), sizes, steps, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
static int clear(int* counter, cudaStream_t stream) { return cudaMemsetAsync(counter, 0, sizeof(int), stream); }
// ---- end of launch

// `scale` is positive and includes log2(e).
extern "C" int attend(const T* q, const T* k, const T* v, T* out, int* counter, const Problem* problem, double scale,
                      cudaStream_t stream) {
  const Problem& p = *problem;
  CUtensorMap maps[3];
  int status = make_map(maps, q, p.q_stride, p.batch, p.heads, p.queries, p.head_dim, BLOCK_M, COLUMNS);
  if (!status) status = make_map(maps + 1, k, p.k_stride, p.batch, p.kv_heads, p.keys, p.head_dim, BLOCK_N, COLUMNS);
  if (!status) status = make_map(maps + 2, v, p.v_stride, p.batch, p.kv_heads, p.keys, p.head_dim, BLOCK_N, COLUMNS);
  if (status) return status;
  Tiles tiles;
  tiles.queries = int(p.queries);
  tiles.keys = int(p.keys);
  tiles.heads = int(p.heads);
  tiles.group = int(p.heads / p.kv_heads);
  tiles.head_dim = int(p.head_dim);
  tiles.rows = int((p.queries + BLOCK_M - 1) / BLOCK_M);
  tiles.pairs = int(p.batch * p.heads);
  tiles.section = int(p.section < tiles.pairs ? p.section : tiles.pairs);
  tiles.count = tiles.rows * tiles.pairs;
  int blocks = SCHEDULE == 0 || tiles.count < p.sms ? tiles.count : int(p.sms);
  if (counter && (status = clear(counter, stream))) return status;
  return launch<attention>(dim3(blocks), 128 * (WARPGROUPS + 1), SHARED_BYTES, stream, maps[0], maps[1], maps[2], tiles,
                           counter, out, float(scale));
}
"""

TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "float"}
LOG2_E = 1.4426950408889634
WGMMA_QUERIES = 64  # fewer leave most of its tile empty


def _wgmma(name, columns, kind, registers):
    """The function `name` that issues a product with `columns` columns; its left operand is in registers or not."""
    count = columns // 2
    outputs = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if registers:  # d += a b, with b's columns along its rows in memory
        parameters, values = "const uint32_t* a, uint64_t b", ", ".join(f'"r"(a[{i}])' for i in range(4)) + ', "l"(b)'
        inputs = f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, 1, 1, 1, 1"
        before = ""
    else:  # d = a b, or d += a b
        parameters, values = "uint64_t a, uint64_t b, bool add", '"l"(a), "l"(b), "r"(int(add))'
        inputs = f"%{count}, %{count + 1}, add, 1, 1, 0, 0"
        before = f".reg .pred add;\\nsetp.ne.b32 add, %{count + 2}, 0;\\n"
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
    return f"""
__device__ __forceinline__ void {name}(float (&d)[{count}], {parameters}) {{
  asm volatile("{{\\n{before}{instruction} {{{outputs}}}, {inputs};\\n}}" : {operands} : {values});
}}
"""


def _build(source, dtype, head, **macros):
    macros = {"TYPE": TYPES[dtype], "HEAD": head, **macros}
    flags = [f"-D{name}={value if isinstance(value, str) else int(value)}" for name, value in macros.items()]
    return build(source, backend="cuda", flags=flags)


@functools.cache
def _simt_library(dtype, head):
    """For fp32, and rows of any length."""
    return _build(SHARED + GENERAL, dtype, head, SIMT=True)


@functools.cache
def _tensor_library(dtype, head, decode):
    """For 16-bit rows of up to `head` elements, on any GPU."""
    prefill = {
        "TEAM": 4,
        "SLABS": CONFIG["BLOCK_SLABS"],
        "KEYS": CONFIG["BLOCK_KEYS"] or (64 if head <= 128 else 32),
        "DEPTH": CONFIG["BLOCK_DEPTH"],
    }
    of_warps = {"TEAM": 1, "SLABS": 1, "KEYS": CONFIG["DECODE_KEYS"], "DEPTH": CONFIG["DECODE_DEPTH"]}
    return _build(SHARED + GENERAL, dtype, head, SIMT=False, **(of_warps if decode else prefill))


def _decode_bytes(head):
    """Shared memory of a decode block: queries, and four rings of keys and values; rows are padded by 16 bytes."""
    return 2 * (head + 8) * (16 + 4 * CONFIG["DECODE_DEPTH"] * 2 * CONFIG["DECODE_KEYS"]) + 512


def _warpgroups(head):
    return CONFIG["WARPGROUPS"] or (3 if head <= 64 else 2)


@functools.cache
def _wgmma_library(dtype, head, causal):
    """The same for prefill in 16 bits on compute capability 9.0."""
    keys = CONFIG["BLOCK_N"] or _block_n(head, causal)
    products = _wgmma("wgmma_scores", keys, TYPES[dtype], False) + _wgmma("wgmma_output", head, TYPES[dtype], True)
    return _build(
        SHARED + "// ---- instructions" + products + "// ---- end of instructions\n" + WGMMA,
        dtype,
        head,
        IS_BF16=dtype == torch.bfloat16,
        CAUSAL=causal,
        BLOCK_N=keys,
        WARPGROUPS=_warpgroups(head),
        STAGES=CONFIG["STAGES"],
        SCHEDULE=CONFIG["SCHEDULE"],
        PINGPONG=CONFIG["PINGPONG"],
        HEAVY_FIRST=CONFIG["HEAVY_FIRST"],
        MAX_EXPONENT=CONFIG["MAX_EXPONENT"],
        BY_POLYNOMIAL=CONFIG["BY_POLYNOMIAL"],
    )


def _block_n(head, causal):
    """Keys of a block by what registers and shared memory hold; small ones waste less at the diagonal."""
    if head == 128 and not causal:
        return 176
    return 128 if head <= 160 else 112 if head <= 192 else 80


class _Plan:
    """How a call of given shapes, strides and dtype is made."""

    def __init__(self, q, k, v, q_stride, k_stride, v_stride, dtype, causal, target, aligned, positive):
        batch, heads, queries, head_dim = q
        kv_heads, keys = k[1], k[2]
        if causal:
            keys = min(keys, queries)  # no query sees more
        strides = (q_stride, k_stride, v_stride)
        simt = dtype == torch.float32 or head_dim > 256
        head = min(-(-head_dim // 32) * 32, 128 if simt else 256)
        group = heads // kv_heads
        wgmma = target.has_wgmma and not simt and head_dim % 8 == 0 and positive and queries >= WGMMA_QUERIES
        tiles = batch * heads * -(-queries // (64 * _warpgroups(head)))
        wgmma = wgmma and (3 * tiles >= target.sms or keys < 2048)  # else it is better to split the keys
        # A layout that the kernel does not read, or not 16 bytes at a time, is worth a copy.
        aligned = (
            aligned
            and all(
                size == 1 or (step % 8 == 0 and (step or not wgmma))  # the copy engine takes no stride of 0
                for shape, stride in zip((q, k, v), strides, strict=True)
                for size, step in zip(shape[:3], stride[:3], strict=True)
            )
        )
        wide = head_dim % 8 == 0  # whole 16-byte pieces
        self.copied = any(stride[3] != 1 for stride in strides) or (not simt and wide and not aligned)
        if self.copied:
            return
        decode = not wgmma and not simt and group * queries <= 32 and _decode_bytes(head) <= target.shared_bytes
        rows = 64 if simt else 16 if decode else 64 * CONFIG["BLOCK_SLABS"]
        pack = group if decode or (not wgmma and 2 * queries <= rows) else 1
        splits, split_keys, section, self.counter, self.work = 1, keys, 1, 0, 0
        if wgmma:
            # Up to two tiles a block, the first block having the lightest second one is the best there is.
            self.counter = CONFIG["SCHEDULE"] == 2 and tiles > 2 * target.sms
            section = batch * heads
            if CONFIG["SECTION_MB"] and (self.counter or CONFIG["SCHEDULE"] == 0):
                section = max(1, (CONFIG["SECTION_MB"] << 20) // (4 * keys * head_dim)) * group
            self.function = _wgmma_library(dtype, head, causal).attend
        else:
            splits, split_keys = _splits(-(-pack * queries // rows) * batch * heads // pack, keys, target.sms, decode)
            if splits > 1:
                self.work = splits * batch * heads * queries * (-(-head_dim // 4) * 4 + 2)
            self.function = (_simt_library(dtype, head) if simt else _tensor_library(dtype, head, decode)).attend
        numbers = [batch, heads, kv_heads, queries, keys, head_dim]
        for stride in strides:
            numbers += stride[:3]
        numbers += [causal, wide, pack, decode, splits, split_keys, section, target.sms]
        self.problem = (ctypes.c_int64 * len(numbers))(*numbers)
        self.address = ctypes.addressof(self.problem)
        self.scale = LOG2_E / math.sqrt(head_dim)


def _splits(tiles, keys, sms, decode):
    """(number of splits, keys of each), so that all multiprocessors have work."""
    step = 4 * CONFIG["DECODE_KEYS"] if decode else 64  # a split is whole turns of the warps, or whole key blocks
    wanted = sms * CONFIG["DECODE_WAVES"] // tiles if decode or tiles < sms else 1
    wanted = max(1, min(wanted, keys // (4 * step)))
    split_keys = -(-keys // (wanted * step)) * step
    return -(-keys // split_keys), split_keys


@functools.lru_cache(maxsize=1024)
def _plan(*of_call):
    return _Plan(*of_call)


def _check(q, k, v):
    if q.dtype not in TYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"attention takes fp16, bf16 or fp32, the same for all, not {q.dtype}, {k.dtype}, {v.dtype}")
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or (k.shape[1] and q.shape[1] % k.shape[1]):
        raise ValueError(f"q, k, v have shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")


def kernel_fn(q, k, v, causal=True, scale=None):
    """Attention of q over k and v: a contiguous tensor like q.

    Raises: TypeError or ValueError for arguments that do not fit together.
    """
    if q.numel() == 0 or k.numel() == 0:
        _check(q, k, v)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # a sum over no key
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    of_call = q.dtype, causal, target_of(q), aligned, scale is None or scale > 0
    plan = _plan(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), *of_call)
    if plan.copied:
        return kernel_fn(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)), causal, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    work = None
    if plan.work:
        work = torch.empty(plan.work, dtype=torch.float32, device=q.device)
    elif plan.counter:
        work = torch.empty(1, dtype=torch.int32, device=q.device)
    plan.function(q, k, v, out, work, plan.address, plan.scale if scale is None else scale * LOG2_E)
    return out
