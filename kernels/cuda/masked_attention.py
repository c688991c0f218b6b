"""Attention with a mask or bias: softmax(q k^T * scale + mask) v, with grouped key and value heads.

q: [batch, heads, queries, head_dim]; k, v: [batch, kv_heads, keys, head_dim], fp16, bf16 or fp32; head_dim must be
contiguous, every other stride is free. mask: whatever expands to [batch, heads, queries, keys], bool (true where a key
is seen) or of q's dtype (added to the scaled score), of any strides; an expansion is read where it is, never written
out. Scores, softmax and output sums are fp32; fp32 inputs are multiplied in true fp32. A query that sees no key gets
zeros. The scores never leave the chip: a running maximum and sum per row let the keys be visited once.

Two libraries, compiled when first needed for a head_dim (rounded up to a multiple of 32), dtype and kind of mask:
- tensor: mma.sync and cp.async, for every GPU since 8.0. Prefill: four warps have 16 rows each and share key blocks.
  Decode (few queries): the four warps have the same rows, all query heads of a kv head, and take turns with the keys.
  Where tiles are too few to fill the GPU, blocks split the keys and a second launch adds up their sums in order.
  The mask of the next block comes into registers while the tensor cores have this one, and a warp skips a block of
  which its rows see nothing.
- simt: FFMA, for fp32, and for 16-bit rows of more than 256 elements.
"""

import ctypes
import functools
import math

import torch

from autokernel.native import build
from autokernel.target import target_of

KERNEL_TYPE = "masked_attention"
BACKEND = "cuda"
TUNABLES = {
    "BLOCK_SLABS": [1, 2],  # prefill: rows of a warp, in 16s
    "BLOCK_KEYS": [0, 32, 64],  # keys of a block; 0: by head_dim
    "BLOCK_DEPTH": [2, 3],  # stages of its ring
    "DECODE_KEYS": [16, 32],  # the same of decode, per warp
    "DECODE_DEPTH": [2, 3, 4],
    "DECODE_WAVES": [1, 2, 3, 4, 6],  # blocks per multiprocessor that splits aim at
}
CONFIG = {
    "BLOCK_SLABS": 1,
    "BLOCK_KEYS": 0,
    "BLOCK_DEPTH": 2,
    "DECODE_KEYS": 16,
    "DECODE_DEPTH": 2,
    "DECODE_WAVES": 3,
}

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

typedef __half f16;
typedef __nv_bfloat16 bf16;
typedef TYPE T;       // of q, k, v and the output
typedef MASK_TYPE M;  // uint8_t: not 0 where a key is seen; or T: added to the score

// What `_plan` packs. Strides are in elements and of batch, head and row; a row's elements are neighbours. The mask's
// are those of its expansion: 0 where one element serves all; its fourth is from key to key.
struct Problem {
  int64_t batch, heads, kv_heads, queries, keys, head_dim;
  int64_t q_stride[3], k_stride[3], v_stride[3], mask_stride[4];
  int64_t aligned;     // every row of q, k and v starts on 16 bytes and is a multiple of them
  int64_t pack;        // neighbouring query heads, of one kv head, whose rows are handled as one matrix
  int64_t splits;      // blocks that share the keys of a tile
  int64_t split_keys;  // keys of each
};

constexpr float LOG2_E = 1.44269504f;

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

// Scores stay in natural units up to the exponential: the lowest value of a mask times log2(e) would be infinite.
__device__ __forceinline__ float masked(float score, uint8_t seen) { return seen ? score : -INFINITY; }
__device__ __forceinline__ float masked(float score, float bias) { return score + bias; }
__device__ __forceinline__ float masked(float score, f16 bias) { return score + widen(bias); }
__device__ __forceinline__ float masked(float score, bf16 bias) { return score + widen(bias); }
__device__ __forceinline__ bool is_seen(uint8_t seen) { return seen; }
__device__ __forceinline__ bool is_seen(float bias) { return bias != -INFINITY; }
__device__ __forceinline__ bool is_seen(f16 bias) { return widen(bias) != -INFINITY; }
__device__ __forceinline__ bool is_seen(bf16 bias) { return widen(bias) != -INFINITY; }

// Fragments. The tensor cores leave a 16 x N slab of a product in a warp so: register 4i + e of a lane is row lane / 4
// (8 more for e >= 2), column 8i + 2 (lane % 4) + e % 2. A lane thus has two rows, and four lanes (a quad) share them.
// Taken two at a time, the same registers are the left operand of the next product: p v needs no exchange.

// Of the lane's two rows: the largest masked score so far, and this lane's share of the sum of exponentials.
struct Rows {
  float top[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};
};

// Turns masked scores into exponentials exp(x - top), and says by what factor earlier results have to be multiplied.
template <int N>
__device__ __forceinline__ void exponentials(float (&x)[N], Rows& rows, float (&factor)[2]) {
  float high[2][2] = {{rows.top[0], rows.top[0]}, {rows.top[1], rows.top[1]}};
#pragma unroll
  for (int i = 0; i < N; ++i) high[i / 2 % 2][i % 2] = fmaxf(high[i / 2 % 2][i % 2], x[i]);
  float base[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = fmaxf(high[r][0], high[r][1]);
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
    base[r] = top == -INFINITY ? 0.0f : top;  // no key seen yet: exponentials are 0, not NaN
    factor[r] = exp2_fast((rows.top[r] - base[r]) * LOG2_E);
    rows.top[r] = top;
    rows.sum[r] *= factor[r];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = exp2_fast((x[i] - base[i / 2 % 2]) * LOG2_E);
    rows.sum[i / 2 % 2] += x[i];
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
// neighbouring bytes a quad where rows are multiples of 16 bytes. A row that saw no key becomes zeros.
template <int N>
__device__ __forceinline__ void write_rows(const float (&o)[N], const Rows& rows, T* const (&out)[2], int head_dim,
                                           int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float inverse = rows.sum[r] == 0.0f ? 0.0f : 1.0f / rows.sum[r];
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
};

template <int TILE>
__device__ __forceinline__ Share share_of_block(const Problem& p) {
  Share s;
  int pack = int(p.pack);
  s.rows = pack * int(p.queries);
  int heads = int(p.heads) / pack, units = int(p.batch) * heads;
  int unit = blockIdx.x % units;
  s.first = int(blockIdx.x / units) * TILE;
  s.batch = unit / heads;
  s.head = unit % heads * pack;
  s.kv_head = s.head / int(p.heads / p.kv_heads);
  s.begin = int(blockIdx.y * p.split_keys);
  s.end = int(min(p.keys, s.begin + p.split_keys));
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
__device__ __forceinline__ const M* mask_row(const M* mask, const Problem& p, const Share& s, int row) {
  int queries = int(p.queries);
  return mask + s.batch * p.mask_stride[0] + (s.head + row / queries) * p.mask_stride[1] +
         row % queries * p.mask_stride[2];
}

// Where splits leave unnormalized sums of a row for `combine`: pitch floats of it, then (top, sum).
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

// A softmax does not mind the order of keys. Those of a block lie in shared memory such that of the OWN columns of the
// scores that a lane gets, each PIECE are neighbours in the mask: one load, and 4 PIECE neighbours a quad.
constexpr int OWN = KEYS / 4, PIECE = OWN < 8 ? OWN : 8;
__device__ __forceinline__ int key_of(int column) {  // column of the scores -> key of the block
  unsigned lane = column % 8 / 2, mine = column / 8 * 2 + column % 2;
  return mine / PIECE * (4 * PIECE) + lane * PIECE + mine % PIECE;
}

// The mask at a row's OWN columns of a lane, as it is in memory.
constexpr int IN_WORD = 4 / sizeof(M), WORDS = OWN / IN_WORD, PIECE_WORDS = PIECE / IN_WORD;
constexpr uint32_t HIDDEN = sizeof(M) == 1 ? 0 : IS_BF16 ? 0xff80ff80 : 0xfc00fc00;  // false, or -inf
struct alignas(4 * PIECE_WORDS) Piece {
  uint32_t word[PIECE_WORDS];
};

__device__ __forceinline__ void set_bits(uint32_t& word, int at, uint8_t x) {
  word = (word & ~(0xffu << 8 * at)) | uint32_t(x) << 8 * at;
}
__device__ __forceinline__ void set_bits(uint32_t& word, int at, f16 x) {
  word = (word & ~(0xffffu << 16 * at)) | uint32_t(__half_as_ushort(x)) << 16 * at;
}
__device__ __forceinline__ void set_bits(uint32_t& word, int at, bf16 x) {
  word = (word & ~(0xffffu << 16 * at)) | uint32_t(__bfloat16_as_ushort(x)) << 16 * at;
}

// `row` is null for one that does not exist; no key from `keys` on does. wide: pieces may be loaded as a whole.
__device__ __forceinline__ void load_mask(uint32_t (&to)[WORDS], const M* row, int first, int keys, int64_t stride,
                                          bool wide) {
#pragma unroll
  for (int i = 0; i < OWN / PIECE; ++i) {
    int column = first + i * 4 * PIECE;
    Piece piece;
    if (row && wide && column + PIECE <= keys) {
      piece = *reinterpret_cast<const Piece*>(row + column);
    } else {
      const M* from = row + column * stride;
      int count = row ? keys - column : 0;
#pragma unroll
      for (int j = 0; j < PIECE_WORDS; ++j) {
        piece.word[j] = HIDDEN;
#pragma unroll
        for (int e = 0; e < IN_WORD; ++e, from += stride)
          if (j * IN_WORD + e < count) set_bits(piece.word[j], e, *from);
      }
    }
#pragma unroll
    for (int j = 0; j < PIECE_WORDS; ++j) to[i * PIECE_WORDS + j] = piece.word[j];
  }
}

__device__ __forceinline__ void unpack(f16, uint32_t word, float (&x)[2]) {
  float2 both = __half22float2(*reinterpret_cast<__half2*>(&word));
  x[0] = both.x;
  x[1] = both.y;
}
__device__ __forceinline__ void unpack(bf16, uint32_t word, float (&x)[2]) {
  x[0] = __uint_as_float(word << 16);
  x[1] = __uint_as_float(word & 0xffff0000);
}

// Scores -> scaled and masked scores.
__device__ __forceinline__ void apply_mask(float (&s)[KEYS / 2], const uint32_t (&mask)[2][WORDS], float scale) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i += 2) {  // the columns 2 * pair and 2 * pair + 1 of the lane's
    int row = i / 2 % 2, pair = i / 4;
    if constexpr (sizeof(M) == 1) {
      uint32_t seen = mask[row][pair / 2] >> (16 * (pair % 2));
      s[i] = seen & 0xff ? s[i] * scale : -INFINITY;
      s[i + 1] = seen & 0xff00 ? s[i + 1] * scale : -INFINITY;
    } else {
      float bias[2];
      unpack(T(), mask[row][pair], bias);
      s[i] = fmaf(s[i], scale, bias[0]);
      s[i + 1] = fmaf(s[i + 1], scale, bias[1]);
    }
  }
}

__global__ void __launch_bounds__(128) attention(const T* q, const T* k, const T* v, const M* mask, T* out,
                                                 float* work, const Problem p, float scale, bool wide) {
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
  auto prefetch = [&](int block, bool seen) {
    if (block < blocks && seen) {
      T* stage = ring + block % DEPTH * STAGE;
      int first = begin + block * STEP, count = int(p.keys) - first;
      fill<KEYS, THREADS>(stage, thread, p, k, [&](int i) {
        return key_of(i) < count ? keys_of_head + (first + key_of(i)) * p.k_stride[2] : nullptr;
      });
      fill<KEYS, THREADS>(stage + KEYS * PITCH, thread, p, v, [&](int i) {
        return key_of(i) < count ? values_of_head + (first + key_of(i)) * p.v_stride[2] : nullptr;
      });
    }
    copies_commit();  // an empty group, too, so that the count of groups stays that of blocks
  };

  fill<ROWS, 128>(queries, threadIdx.x, p, q, [&](int i) {
    return share.first + i < share.rows ? query_row(q, p, share, share.first + i) : nullptr;
  });
  copies_commit();
  for (int block = 0; block < DEPTH - 1; ++block) prefetch(block, true);

  int first_row = TEAM == 4 ? warp * 16 * SLABS : 0;  // of this warp, in the tile
  const M* mask_rows[SLABS][2];
#pragma unroll
  for (int i = 0; i < SLABS * 2; ++i) {
    int row = share.first + first_row + 16 * (i / 2) + 8 * (i % 2) + lane / 4;
    mask_rows[i / 2][i % 2] = row < share.rows ? mask_row(mask, p, share, row) : nullptr;
  }
  // The masks of this block and the next ones wait in registers. A warp on its own (decode) knows them when it asks for
  // the keys and values, and asks for none that it will not see: most of a cache may still be empty.
  constexpr int QUEUE = TEAM == 4 ? 1 : DEPTH;
  uint32_t masks[QUEUE][SLABS][2][WORDS] = {};
  auto load_masks = [&](int block, uint32_t (&to)[SLABS][2][WORDS]) {
    if (block >= blocks) return;
    int first = begin + block * STEP + lane % 4 * PIECE;
#pragma unroll
    for (int i = 0; i < SLABS * 2; ++i)
      load_mask(to[i / 2][i % 2], mask_rows[i / 2][i % 2], first, int(p.keys), p.mask_stride[3], wide);
  };
  auto next_masks = [&](int block) {  // that of `block` is done with
#pragma unroll
    for (int n = 0; n < QUEUE - 1; ++n)
#pragma unroll
      for (int i = 0; i < SLABS * 2 * WORDS; ++i)
        masks[n][i / (2 * WORDS)][i / WORDS % 2][i % WORDS] = masks[n + 1][i / (2 * WORDS)][i / WORDS % 2][i % WORDS];
    load_masks(block + QUEUE, masks[QUEUE - 1]);
  };
  auto any_seen = [&](const uint32_t (&of)[SLABS][2][WORDS]) {  // by the warp
    uint32_t different = 0;
#pragma unroll
    for (int i = 0; i < SLABS * 2 * WORDS; ++i) different |= of[i / (2 * WORDS)][i / WORDS % 2][i % WORDS] ^ HIDDEN;
    return bool(__any_sync(0xffffffff, different != 0));
  };
#pragma unroll
  for (int n = 0; n < QUEUE; ++n) load_masks(n, masks[n]);

  copies_wait<DEPTH - 1>();  // the queries have come
  __syncthreads();
  float o[SLABS][HEAD / 2] = {};
  Rows rows[SLABS];

  for (int block = 0; block < blocks; ++block) {
    copies_wait<DEPTH - 2>();  // this block has come, for this thread
    if (TEAM == 4) __syncthreads();
    else __syncwarp();  // for all of the team; and all have left the previous block, whose stage is filled next
    prefetch(block + DEPTH - 1, TEAM == 4 || any_seen(masks[QUEUE - 1]));
    if (!any_seen(masks[0])) {
      next_masks(block);
      continue;
    }
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
#pragma unroll
    for (int t = 0; t < SLABS; ++t) apply_mask(s[t], masks[0][t], scale);
    next_masks(block);
    uint32_t probabilities[SLABS][KEYS / 4];
#pragma unroll
    for (int t = 0; t < SLABS; ++t) {
      float factor[2];
      exponentials(s[t], rows[t], factor);
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
              make_float2(rows[t].top[r], rows[t].sum[r]);
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
          stats[warp][row][0] = rows[t].top[i / 2];
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
        float factor = stats[w][row][1] == 0.0f ? 0.0f : exp2_fast((stats[w][row][0] - top) * LOG2_E);  // saw no key
        total += factor * stats[w][row][1];
        sum += factor * sums[(w * ROWS + row) * HEAD + column];
      }
      int64_t of_all = output_row(p, share, share.first + row);
      if (p.splits == 1) {
        narrow(total == 0.0f ? 0.0f : sum / total, out + of_all * head_dim + column);
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

__global__ void __launch_bounds__(128, 3) attention(const T* q, const T* k, const T* v, const M* mask, T* out,
                                                    float* work, const Problem p, float scale) {
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
  __shared__ const M* mask_rows[ROWS];
  if (threadIdx.x < ROWS) {
    int row = share.first + threadIdx.x;
    query_rows[threadIdx.x] = row < share.rows ? query_row(q, p, share, row) : nullptr;
    mask_rows[threadIdx.x] = row < share.rows ? mask_row(mask, p, share, row) : nullptr;
  }
  __syncthreads();

  float o[8][COLUMNS / 16] = {}, top[8], sum[8] = {};
#pragma unroll
  for (int r = 0; r < 8; ++r) top[r] = -INFINITY;

  for (int first = share.begin; first < share.end; first += KEYS) {
    bool seen = false;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const M* of_row = mask_rows[y + r];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int key = first + x + 16 * j;
        if (of_row && key < keys) seen |= is_seen(of_row[key * p.mask_stride[3]]);
      }
    }
    if (!__syncthreads_or(seen)) continue;  // reading the mask twice costs less than 32 registers

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
      const M* of_row = mask_rows[y + r];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int key = first + x + 16 * j;
        s[r][j] = of_row && key < keys ? masked(s[r][j] * scale, of_row[key * p.mask_stride[3]]) : -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float high = top[r];
#pragma unroll
      for (int j = 0; j < 4; ++j) high = fmaxf(high, s[r][j]);
#pragma unroll
      for (int lanes = 8; lanes > 0; lanes /= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, lanes));
      float base = high == -INFINITY ? 0.0f : high;  // no key seen yet: exponentials are 0, not NaN
      float factor = exp2f((top[r] - base) * LOG2_E);
      top[r] = high;
      sum[r] *= factor;
#pragma unroll
      for (int j = 0; j < COLUMNS / 16; ++j) o[r][j] *= factor;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float e = exp2f((s[r][j] - base) * LOG2_E);
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
      if (p.splits == 1) narrow(sum[r] == 0.0f ? 0.0f : o[r][j] / sum[r], out + row * head_dim + column);
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
    return make_float2(stats.y == 0.0f ? 0.0f : exp2f((stats.x - top) * LOG2_E), stats.y);  // saw no key
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
      narrow(total == 0.0f ? 0.0f : sum / total, out + row * head_dim + column);
    }
    __syncthreads();
  }
}

extern "C" int attend(const T* q, const T* k, const T* v, const M* mask, T* out, float* work, const Problem* problem,
                      double scale, cudaStream_t stream) {
  const Problem& p = *problem;
  int64_t tiles = (p.pack * p.queries + ROWS - 1) / ROWS, units = p.batch * (p.heads / p.pack);
  dim3 grid(unsigned(tiles * units), unsigned(p.splits));
#if SIMT
  grid.z = unsigned((p.head_dim + COLUMNS - 1) / COLUMNS);
  int status = launch<attention>(grid, 128, BYTES, stream, q, k, v, mask, out, work, p, float(scale));
#else
  bool wide = p.mask_stride[3] == 1 && reinterpret_cast<uintptr_t>(mask) % sizeof(Piece) == 0;
  for (int i = 0; i < 3; ++i) wide = wide && p.mask_stride[i] % PIECE == 0;
  int status = launch<attention>(grid, 128, BYTES, stream, q, k, v, mask, out, work, p, float(scale), wide);
#endif
  if (status != cudaSuccess || p.splits == 1) return status;
  return launch<combine>(dim3(unsigned(p.batch * p.heads * p.queries)), 256, 0, stream, out, work, p);
}
"""

TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "float"}


def _build(dtype, head, seen, **macros):
    """`seen`: whether the mask is bool."""
    macros = {"TYPE": TYPES[dtype], "MASK_TYPE": "uint8_t" if seen else TYPES[dtype], "HEAD": head, **macros}
    flags = [f"-D{name}={value if isinstance(value, str) else int(value)}" for name, value in macros.items()]
    return build(SOURCE, backend="cuda", flags=flags)


@functools.cache
def _simt_library(dtype, head, seen):
    """For fp32, and rows of any length."""
    return _build(dtype, head, seen, SIMT=True)


@functools.cache
def _tensor_library(dtype, head, seen, team, slabs, keys, depth):
    """For 16-bit rows of up to `head` elements."""
    tile = {"TEAM": team, "SLABS": slabs, "KEYS": keys, "DEPTH": depth}
    return _build(dtype, head, seen, SIMT=False, IS_BF16=dtype == torch.bfloat16, **tile)


def _tile(head, decode, shared_bytes):
    """(warps that share a ring, 16s of rows of a warp, keys of a block, stages); None if shared memory is too small."""
    if decode:
        tile = 1, 1, CONFIG["DECODE_KEYS"], CONFIG["DECODE_DEPTH"]
        return tile if _tile_bytes(head, *tile) <= shared_bytes else None
    keys = CONFIG["BLOCK_KEYS"] or (64 if head <= 128 else 32)
    tile = 4, CONFIG["BLOCK_SLABS"], keys, CONFIG["BLOCK_DEPTH"]
    return tile if _tile_bytes(head, *tile) <= shared_bytes else (4, 1, 32, 2)


def _tile_bytes(head, team, slabs, keys, depth):
    """Shared memory of a block: queries, and rings of keys and values, in rows padded by 16 bytes; 512 for sums."""
    return 2 * (head + 8) * (16 * slabs * team + 4 // team * depth * 2 * keys) + (512 if team == 1 else 0)


class _Plan:
    """How a call of given shapes, strides and dtypes is made. `mask_stride` is that of the expanded mask."""

    def __init__(self, shapes, strides, mask_stride, dtypes, target, aligned):
        _check(shapes, dtypes)
        batch, heads, queries, head_dim = shapes[0]
        kv_heads, keys = shapes[1][1:3]
        dtype, seen = dtypes[0], dtypes[3] == torch.bool
        simt = dtype == torch.float32 or head_dim > 256
        head = min(-(-head_dim // 32) * 32, 128 if simt else 256)
        group = heads // kv_heads
        # A layout that the kernel does not read, or not 16 bytes at a time, is worth a copy.
        aligned = aligned and all(
            size == 1 or step % 8 == 0
            for shape, stride in zip(shapes, strides, strict=False)
            for size, step in zip(shape[:3], stride[:3], strict=True)
        )
        wide = head_dim % 8 == 0  # whole 16-byte pieces
        self.copied = any(stride[3] != 1 for stride in strides) or (not simt and wide and not aligned)
        if self.copied:
            return
        tile = _tile(head, True, target.shared_bytes) if not simt and group * queries <= 32 else None
        decode = tile is not None
        tile = tile or _tile(head, False, target.shared_bytes)
        rows = 64 if simt else 16 if decode else 64 * tile[1]
        pack = group if decode or 2 * queries <= rows else 1
        tiles = -(-pack * queries // rows) * batch * heads // pack
        splits, split_keys = _splits(tiles, keys, target.sms, decode)
        self.work = splits * batch * heads * queries * (-(-head_dim // 4) * 4 + 2) if splits > 1 else 0
        library = _simt_library(dtype, head, seen) if simt else _tensor_library(dtype, head, seen, *tile)
        self.function = library.attend
        numbers = [batch, heads, kv_heads, queries, keys, head_dim]
        for stride in strides:
            numbers += stride[:3]
        sizes = batch, heads, queries, keys
        numbers += [0 if size == 1 else step for size, step in zip(sizes[:3], mask_stride[:3], strict=True)]
        numbers += [mask_stride[3] if keys > 1 else 1]
        numbers += [wide, pack, splits, split_keys]
        self.problem = (ctypes.c_int64 * len(numbers))(*numbers)
        self.address = ctypes.addressof(self.problem)
        self.scale = 1 / math.sqrt(head_dim)


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


def _check(shapes, dtypes):
    """Shapes and dtypes are of q, k, v and the mask, which may have been expanded."""
    q, k, v, mask = shapes
    dtype = dtypes[0]
    if dtype not in TYPES or any(other != dtype for other in dtypes[1:3]):
        raise TypeError(f"attention takes fp16, bf16 or fp32, the same for q, k and v, not {_listed(dtypes[:3])}")
    if dtypes[3] not in (torch.bool, dtype):
        raise TypeError(f"mask is {dtypes[3]}, expected torch.bool or {dtype}, the dtype of q")
    fits = len(q) == len(k) == 4 and k == v and q[0] == k[0] and q[3] == k[3]
    if not fits or (k[1] and q[1] % k[1]):
        raise ValueError(f"q, k, v have shapes {_listed(map(list, shapes[:3]))}")
    full = [*q[:3], k[2]]
    if len(mask) > 4 or any(size not in (1, of) for size, of in zip(reversed(mask), reversed(full), strict=False)):
        raise ValueError(f"mask has shape {list(mask)}, which does not expand to {full}")


def _listed(values):
    return ", ".join(map(str, values))


def kernel_fn(q, k, v, mask, scale=None):
    """Attention of q over the keys that the mask shows or favours: a contiguous tensor like q.

    Raises: TypeError or ValueError for arguments that do not fit together.
    """
    dtypes = q.dtype, k.dtype, v.dtype, mask.dtype
    if q.numel() == 0 or k.numel() == 0:
        _check((q.shape, k.shape, v.shape, mask.shape), dtypes)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # a sum over no key
    try:
        full = mask.expand(*q.shape[:3], k.shape[2])  # a view: strides of 0 where it repeats
    except (RuntimeError, IndexError):
        _check((q.shape, k.shape, v.shape, mask.shape), dtypes)
        raise
    shapes, strides = (q.shape, k.shape, v.shape, full.shape), (q.stride(), k.stride(), v.stride())
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    plan = _plan(shapes, strides, full.stride(), dtypes, target_of(q), aligned)
    if plan.copied:
        return kernel_fn(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)), mask, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    work = torch.empty(plan.work, dtype=torch.float32, device=q.device) if plan.work else None
    plan.function(q, k, v, full, out, work, plan.address, plan.scale if scale is None else float(scale))
    return out
