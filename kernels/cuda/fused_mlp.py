"""Gated MLP on CUDA GPUs: (activation(x w_gate^T) * (x w_up^T)) w_down^T; fp16, bf16 or fp32, sums in fp32.

x [..., K]; w_gate, w_up [H, K]; w_down [N, H]; result [..., N]. Two kernels. The first multiplies a tile of x with rows
of both weights at once: half of its accumulators are gates, the other half the up-projections of the same hidden
units, and they lie in the same threads, so that only activation(gate) * up is written (rounded once). The second is the
product with w_down.

Hopper, 16 bit: a persistent grid of clusters. One thread of a producer warpgroup copies tiles into a ring of
shared-memory stages with the bulk tensor copy engine (in a cluster one block loads gate's rows and the other up's, each
for both); two consumer warpgroups multiply them with wgmma, either halves of one tile (coop) or a tile each (pingpong).
Tiles of the last, incomplete round are cut along K into pieces whose fp32 sums another kernel adds in a fixed order.
Other GPUs, and operands that are not aligned to 16 bytes: a tile kernel on mma.sync. Few rows: a kernel that streams
the weights once. fp32: fused multiply-adds, no TF32. The same input gives the same bits.
"""

import ctypes
import functools
from dataclasses import dataclass

import torch

from autokernel.native import build
from autokernel.target import target_of

KERNEL_TYPE = "fused_mlp"
BACKEND = "cuda"
TUNABLES = {
    # How the consumer warpgroups share the work, and the tile [rows of x, rows of weights] of a block (coop) or of a
    # warpgroup (pingpong). Half of an UP_TILE's columns are gates.
    "UP_TILE": ["coop_128x256", "coop_256x128", "pingpong_128x128", "pingpong_64x256"],
    "DOWN_TILE": ["coop_128x256", "coop_256x128", "coop_128x192", "coop_256x192", "pingpong_128x192"],
    "CLUSTER": [1, 2],  # blocks, neighbours along the rows of x, that share their tiles of the weights
    "GROUP": [4, 8, 16, 32],  # rows of clusters that are walked together, for reuse in the L2 cache
    "STAGES": [0, 3, 4, 5, 6],  # stages of the ring; 0, or more than fit: as many as fit
    "HEAD_START": [0, 1, 2],  # steps by which one half of a coop tile is ahead, to write while the other multiplies
    "STORE_BUFFERS": [1, 2],  # buffers of 16 rows by 64 columns per warp through which results are written
    "SPLIT": [0, 1, 2, 4, 8],  # pieces along K of the tiles of the last round; 0: chosen from the shape
    "SKINNY": [0, 4, 8, 16],  # up to so many rows the streaming kernel is used
}
CONFIG = {
    "UP_TILE": "coop_128x256",
    "DOWN_TILE": "coop_128x256",
    "CLUSTER": 2,
    "GROUP": 8,
    "STAGES": 0,
    "HEAD_START": 0,
    "STORE_BUFFERS": 2,
    "SPLIT": 0,
    "SKINNY": 16,
}

SOURCE = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef int64_t i64;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
struct Half {
  u16 bits;
  static constexpr CUtensorMapDataType MAP_TYPE = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
};
struct Bf16 {
  u16 bits;
  static constexpr CUtensorMapDataType MAP_TYPE = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
};

#define DEVICE __device__ __forceinline__

// Instructions ------------------------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE u32 pack(Half, float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
DEVICE u32 pack(Bf16, float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// Loads of what is read once (past the L1 cache) and of what neighbours read too.
DEVICE uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE uint4 load_shared_by_many(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Tensor cores of every GPU: d[16 x 8] += a[16 x 16] b[16 x 8].
DEVICE void mma(Half, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma(Bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&v)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&v)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
DEVICE void copy_async(u32 to, const void* from, u32 bytes) {  // 16 bytes, of which the last ones may be zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copy_word_async(u32 to, const void* from, bool in) {  // 4 bytes, or zeros
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(in ? 4 : 0) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d) : "memory");
}
DEVICE u32 cluster_rank() {
  u32 v;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
  return v;
}
DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE u32 address_in_block(u32 address, u32 rank) {  // the same variable in another block of the cluster
  u32 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(address), "r"(rank));
  return v;
}
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_init_fence() {  // makes them known to the other block and to the copy engine
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {  // arrives, too
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_arrive_cluster(u32 barrier) {  // address as from address_in_block
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {  // until the phase of that parity is complete
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
DEVICE void tensor_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
DEVICE void tensor_load(u32 to, const CUtensorMap* map, u32 barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3,%4}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
// Into the same place of every block named in `blocks`, signalling the same barrier in each.
DEVICE void tensor_load_multicast(u32 to, const CUtensorMap* map, u32 barrier, u16 blocks, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3,%4}], [%2], %5;"
               ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(blocks) : "memory");
}
DEVICE void tensor_store(const CUtensorMap* map, u32 from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];"
               ::"l"(map), "r"(from), "r"(x), "r"(y) : "memory");
}
DEVICE void tensor_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void tensor_store_wait_read() {  // until shared memory of all but these has been read
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int COUNT> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Two warpgroups that take turns: one waits until the other has passed it the turn.
DEVICE void turn_wait(int turn) { asm volatile("barrier.cta.sync %0, 256;" ::"r"(turn + 1) : "memory"); }
DEVICE void turn_pass(int turn) { asm volatile("barrier.cta.arrive %0, 256;" ::"r"(turn + 1) : "memory"); }
DEVICE void keep_order(float& v) { asm volatile("" : "+f"(v)::"memory"); }  // v is not read before this point
@WGMMA@
#endif

// The cut of the work -----------------------------------------------------------------------------------------------

// Tiles are walked in groups of `group` rows of tiles, column by column.
struct Cut {
  int rows, cols;     // tiles of a worker (a block, or a cluster) along M and along N
  int group;
  int whole;          // tiles summed in one piece; the later ones are cut into `splits` pieces along K
  int splits, items;  // items: whole tiles and pieces
  int blocks;         // steps of K in a tile
};
struct Place { int row, col, first, last, piece; };  // steps first..last of a tile; piece -1: all of them

DEVICE void find_tile(const Cut& c, int tile, Place& at) {
  const int per_group = c.group * c.cols, group = tile / per_group, first = group * c.group;
  const int height = min(c.group, c.rows - first), inside = tile - group * per_group;
  at.row = first + inside % height;
  at.col = inside / height;
}
DEVICE Place find(const Cut& c, int item) {
  Place at;
  at.first = 0, at.last = c.blocks, at.piece = -1;
  int tile = item;
  if (item >= c.whole && c.splits > 1) {
    at.piece = item - c.whole;
    tile = c.whole + at.piece / c.splits;
    const int part = at.piece % c.splits;
    at.first = (int)((i64)c.blocks * part / c.splits);
    at.last = (int)((i64)c.blocks * (part + 1) / c.splits);
  }
  find_tile(c, tile, at);
  return at;
}

// Rows of x (or of the hidden values), or rows of a weight, by k. Strides in elements.
struct Side {
  const void* data;
  i64 count, row, k;
  int k_major;  // neighbours in memory are neighbours along k (or nothing lies together)
  int vectors;  // 16 bytes may be loaded at once along the dimension that lies together
};
struct Result {
  void* data;
  i64 rows, cols, row;  // sizes, stride of a row in elements
  float* pieces;        // [piece][block of the cluster][row of the tile][column of the tile: gate's, then up's]
  int activation;
};

DEVICE void put(float* p, float v) { *p = v; }
DEVICE void put(Half* p, float v) { p->bits = (u16)pack(Half{}, v, 0.0f); }
DEVICE void put(Bf16* p, float v) { p->bits = (u16)pack(Bf16{}, v, 0.0f); }
template <class T> DEVICE void put_at(const Result& r, i64 row, i64 col, float v) {
  if (row < r.rows && col < r.cols) put((T*)r.data + row * r.row + col, v);
}

// Activations -------------------------------------------------------------------------------------------------------

enum { SILU, GELU, GELU_TANH, RELU };

// exp by one instruction is exact enough for what is rounded to 16 bits.
template <class T> DEVICE float exponential(float v) { return __expf(v); }
template <> DEVICE float exponential<float>(float v) { return expf(v); }
template <class T> DEVICE float divide(float a, float b) { return __fdividef(a, b); }
template <> DEVICE float divide<float>(float a, float b) { return a / b; }

template <class T, int KIND> DEVICE float activate(float v) {
  if constexpr (KIND == SILU) return divide<T>(v, 1.0f + exponential<T>(-v));
  if constexpr (KIND == GELU) return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
  if constexpr (KIND == GELU_TANH)  // (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
    return divide<T>(v, 1.0f + exponential<T>(-1.5957691216057308f * (v + 0.044715f * v * v * v)));
  return v < 0.0f ? 0.0f : v;  // a NaN stays one
}
// The first half of v, gates, becomes activation(gate) * up with the second half.
template <class T, int KIND, int COUNT> DEVICE void gate_with(float (&v)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) v[i] = activate<T, KIND>(v[i]) * v[i + COUNT / 2];
}
template <class T, int COUNT> DEVICE void gate(float (&v)[COUNT], int kind) {
  switch (kind) {
    case SILU: return gate_with<T, SILU>(v);
    case GELU: return gate_with<T, GELU>(v);
    case GELU_TANH: return gate_with<T, GELU_TANH>(v);
    default: return gate_with<T, RELU>(v);
  }
}
template <class T> DEVICE float gated(float gate_value, float up, int kind) {
  float v[2] = {gate_value, up};
  gate<T>(v, kind);
  return v[0];
}

// Adds the pieces of tile whole + blockIdx.x / cluster, in order.
template <class T, bool GATED>
__global__ void __launch_bounds__(256, 4)
    add_pieces(const Cut cut, const Result r, int cluster, int tile_rows, int tile_cols) {
  Place at;
  const int tile = blockIdx.x / cluster, rank = blockIdx.x % cluster, cols = GATED ? tile_cols / 2 : tile_cols;
  find_tile(cut, cut.whole + tile, at);
  const int index = (blockIdx.y * 256 + threadIdx.x) * 4;
  if (index >= tile_rows * cols) return;
  const int row = index / cols, col = index % cols;
  const i64 size = (i64)tile_rows * tile_cols;
  const float* from = r.pieces + ((i64)tile * cut.splits * cluster + rank) * size + row * tile_cols + col;
  auto sum = [&](const float* p) {
    float4 v = *(const float4*)p;
    for (int s = 1; s < cut.splits; ++s) {
      const float4 more = *(const float4*)(p + s * cluster * size);
      v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
    }
    return v;
  };
  float4 v = sum(from);
  if constexpr (GATED) {
    const float4 up = sum(from + cols);
    v.x = gated<T>(v.x, up.x, r.activation), v.y = gated<T>(v.y, up.y, r.activation);
    v.z = gated<T>(v.z, up.z, r.activation), v.w = gated<T>(v.w, up.w, r.activation);
  }
  const i64 to_row = ((i64)at.row * cluster + rank) * tile_rows + row, to_col = (i64)at.col * cols + col;
  put_at<T>(r, to_row, to_col, v.x);
  put_at<T>(r, to_row, to_col + 1, v.y);
  put_at<T>(r, to_row, to_col + 2, v.z);
  put_at<T>(r, to_row, to_col + 3, v.w);
}

// Hopper, 16 bit ----------------------------------------------------------------------------------------------------

const int STEP = 64;             // k of a stage: rows of 128 bytes, the width of the swizzle
const int SHARED_BYTES = 227 << 10;
const int STORE_BYTES = 16 * STEP * 2;  // a warp's rows by 64 columns of the result

template <int ROWS_, int COLS_, bool PINGPONG_, int CLUSTER_> struct Tile {
  static constexpr int ROWS = ROWS_, COLS = COLS_, CLUSTER = CLUSTER_;  // ROWS: of a warpgroup
  static constexpr bool PINGPONG = PINGPONG_;
  static constexpr int BLOCK_ROWS = PINGPONG ? ROWS : 2 * ROWS;
  static constexpr int A_BYTES = BLOCK_ROWS * STEP * 2, B_BYTES = COLS * STEP * 2, STAGE_BYTES = A_BYTES + B_BYTES;
  static constexpr int STORES = 8 * STORE_BUFFERS * STORE_BYTES;
  static constexpr int FIT = (SHARED_BYTES - 1024 - 256 - STORES) / STAGE_BYTES;  // for alignment and for barriers
  static constexpr int STAGES = STAGES_WANTED > 0 && STAGES_WANTED < FIT ? STAGES_WANTED : FIT;
  static constexpr int SHARED = 1024 + STAGES * STAGE_BYTES + STORES + 16 * STAGES;
};
const int THREADS = 384;  // one producer warpgroup, two consumers

// result = a b^T; gated: activation(a b^T) * (a up^T), the columns of a tile being half b's and half up's.
template <class T, bool GATED, class Tile>
__global__ void __launch_bounds__(THREADS, 1)
    product_tensor(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                   const __grid_constant__ CUtensorMap map_up, const __grid_constant__ CUtensorMap map_out,
                   const Cut cut, const Result r, int tensor_out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int CLUSTER = Tile::CLUSTER, STAGES = Tile::STAGES, COLS = Tile::COLS, ROWS = Tile::ROWS;
  constexpr int OUT_COLS = GATED ? COLS / 2 : COLS;
  static_assert(OUT_COLS % 64 == 0, "results are written 64 columns at a time");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  // The swizzle is a function of the address, so tiles start at multiples of its period of 1024 bytes.
  const u32 ring = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const u32 stores = ring + STAGES * Tile::STAGE_BYTES;
  const u32 full = stores + Tile::STORES, empty = full + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int worker = blockIdx.x / CLUSTER, workers = gridDim.x / CLUSTER;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);  // the producer's arrival, with the bytes that it expects
      // Each consuming warp of every block that this block's share of B goes to.
      barrier_init(empty + 8 * s, CLUSTER * (Tile::PINGPONG ? 4 : 8));
    }
    barrier_init_fence();
    tensor_prefetch(&map_a);
    tensor_prefetch(&map_b);
    if (GATED) tensor_prefetch(&map_up);
    if (tensor_out) tensor_prefetch(&map_out);
  }
  if constexpr (CLUSTER > 1) cluster_barrier();  // nobody signals a barrier that is not there yet
  else __syncthreads();

  if (warp < 4) {
    fewer_registers<40>();
    if (threadIdx.x == 0) {
      int stage = 0;
      u32 parity = 1;  // of the phase before the first: a fresh barrier counts it as complete
      for (int item = worker; item < cut.items; item += workers) {
        const Place at = find(cut, item);
        const int m = (at.row * CLUSTER + rank) * Tile::BLOCK_ROWS, n = at.col * OUT_COLS;
        for (int step = at.first; step < at.last; ++step) {
          const u32 a = ring + stage * Tile::STAGE_BYTES, b = a + Tile::A_BYTES, ready = full + 8 * stage;
          const int k = step * STEP;
          barrier_wait(empty + 8 * stage, parity);
          // All of A and of B, whoever loads it; what lies beyond the tensor arrives as zeros and counts.
          barrier_expect(ready, Tile::STAGE_BYTES);
          tensor_load(a, &map_a, ready, k, m);
          // B is loaded in halves. In a cluster each block loads one, for both.
#pragma unroll
          for (int i = 0; i < 2 / CLUSTER; ++i) {
            const int half = CLUSTER > 1 ? rank : i;
            const CUtensorMap* map = GATED && half ? &map_up : &map_b;
            const u32 to = b + half * (COLS / 2) * 128;
            const int y = n + (GATED ? 0 : half * (COLS / 2));
            if constexpr (CLUSTER > 1) tensor_load_multicast(to, map, ready, (1 << CLUSTER) - 1, k, y);
            else tensor_load(to, map, ready, k, y);
          }
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    more_registers<232>();
    const int group = warp / 4 - 1, quarter = warp % 4;  // warpgroup; its warp, which holds rows 16 * quarter..
    const u32 released = CLUSTER > 1 ? address_in_block(empty, lane % CLUSTER) : empty;
    const u32 buffers = stores + (warp - 4) * STORE_BUFFERS * STORE_BYTES;
    // Descriptors: 128-byte swizzle, 8 rows of 128 bytes to the next 8; the other distance is not used.
    constexpr u64 FORM = (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16;
    constexpr int NEXT = 32 >> 4;  // to the next 16 of k
    auto release = [&](int stage) {
      if constexpr (CLUSTER > 1) {
        if (lane < CLUSTER) barrier_arrive_cluster(released + 8 * stage);
      } else if (lane == 0) {
        barrier_arrive(released + 8 * stage);
      }
    };
    float sums[ROWS / 64][COLS / 2];
    u32 steps = 0;  // of all items so far: which stage comes next, and which of its phases
    int buffer = 0;
    int turn = 0;
    // A wait for a stage can only tell a phase from the one before it. So a warpgroup starts on its tile when the other
    // has seen all of its own stages filled.
    if (Tile::PINGPONG && group == 1) turn_pass(0);
    // Halves of one tile: with a head start of some steps, one half writes its result while the other still multiplies.
    const bool ahead = !Tile::PINGPONG && HEAD_START > 0;
    if (ahead && group == 1) turn_wait(1);
    Place next = find(cut, worker);
    for (int item = worker; item < cut.items; item += workers) {
      const Place at = next;
      const int length = at.last - at.first;
      if (Tile::PINGPONG && turn++ % 2 != group) {
        steps += length;
        next = find(cut, min(item + workers, cut.items - 1));
        continue;
      }
      if (Tile::PINGPONG) turn_wait(group);
      int stage = steps % STAGES;
      u32 parity = steps / STAGES & 1;
      steps += length;
      const u32 first_row = Tile::PINGPONG ? 0 : group * ROWS;
      int before = 0;  // the stage whose products are still running
      for (int step = 0; step < length; ++step) {
        const u32 a = ring + stage * Tile::STAGE_BYTES + first_row * 128;
        const u64 desc_a = FORM | a >> 4, desc_b = FORM | (ring + stage * Tile::STAGE_BYTES + Tile::A_BYTES) >> 4;
        barrier_wait(full + 8 * stage, parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEP / 16; ++k)
#pragma unroll
          for (int m = 0; m < ROWS / 64; ++m)
            wgmma(T{}, sums[m], desc_a + m * (8192 >> 4) + k * NEXT, desc_b + k * NEXT, step + k > 0);
        wgmma_commit();
        if (ahead && group == 0 && item == worker && step == min(HEAD_START, length) - 1) turn_pass(1);
        // Divisions, behind the tensor cores' back.
        if (step == 0) next = find(cut, min(item + workers, cut.items - 1));
        wgmma_wait<1>();  // the step before this one is done: its stage may be filled again
        if (step > 0) release(before);
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if (Tile::PINGPONG && item + workers < cut.items) turn_pass(1 - group);
      wgmma_wait<0>();
      release(before);
#pragma unroll
      for (int m = 0; m < ROWS / 64; ++m)
#pragma unroll
        for (int i = 0; i < COLS / 2; ++i) keep_order(sums[m][i]);

      // Lane 4 r + c of a warp holds, of each 8 columns, columns 2 c and 2 c + 1 of rows r and r + 8.
      const int block_row = (at.row * CLUSTER + rank) * Tile::BLOCK_ROWS;
      if (at.piece >= 0) {
        const i64 piece = (i64)at.piece * CLUSTER + rank;
        const int tile_row = first_row + quarter * 16 + lane / 4;
        float* to = r.pieces + (piece * Tile::BLOCK_ROWS + tile_row) * COLS + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < ROWS / 64; ++m)
#pragma unroll
          for (int j = 0; j < COLS / 8; ++j) {
            float* at_row = to + m * 64 * COLS + j * 8;
            *(float2*)at_row = make_float2(sums[m][4 * j], sums[m][4 * j + 1]);
            *(float2*)(at_row + 8 * COLS) = make_float2(sums[m][4 * j + 2], sums[m][4 * j + 3]);
          }
        continue;
      }
#pragma unroll
      for (int m = 0; m < ROWS / 64; ++m) {
        if constexpr (GATED) gate<T>(sums[m], r.activation);  // a lane holds gate and up of the same hidden unit
#pragma unroll
        for (int part = 0; part < OUT_COLS / 64; ++part) {
          const u32 to = buffers + buffer * STORE_BYTES;
          if (lane == 0) tensor_store_wait_read<STORE_BUFFERS - 1>();  // what this buffer held has been read
          __syncwarp();
          const int r8 = lane % 16, half = lane / 16;  // the row and the 8 columns whose address this lane gives
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float* v = &sums[m][part * 32 + j * 8];
            store_matrices(to + r8 * 128 + (((2 * j + half) ^ (r8 % 8)) << 4), pack(T{}, v[0], v[1]),
                           pack(T{}, v[2], v[3]), pack(T{}, v[4], v[5]), pack(T{}, v[6], v[7]));
          }
          const int row = block_row + first_row + m * 64 + quarter * 16, col = at.col * OUT_COLS + part * 64;
          if (tensor_out) {
            async_proxy_fence();  // every lane's writes come before the copy engine's reads
            __syncwarp();
            if (lane == 0) {
              tensor_store(&map_out, to, col, row);
              tensor_store_commit();
            }
          } else {
            __syncwarp();
            const u16* from = (const u16*)(dynamic_shared + (to - shared_address(dynamic_shared)));
            for (int i = lane; i < 16 * 64; i += 32) {
              const int y = i / 64, x = i % 64;
              if (row + y < r.rows && col + x < r.cols)
                ((u16*)r.data)[(row + y) * r.row + (col + x)] = from[y * 64 + (((x / 8) ^ (y % 8)) << 3) + x % 8];
            }
            __syncwarp();
          }
          buffer = buffer + 1 == STORE_BUFFERS ? 0 : buffer + 1;
        }
      }
    }
    if (lane == 0) tensor_store_wait_read<0>();  // shared memory must outlive the copies out of it
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_barrier();  // the other block may still signal this one's barriers
#endif
}

// Any GPU, 16 bit ---------------------------------------------------------------------------------------------------

const int G_TILE = 128, G_STEP = 32, G_STAGES = 3;
const int G_K_PITCH = G_STEP * 2 + 16;  // bytes; 16 more keep ldmatrix off equal banks
const int G_SIDE_BYTES = G_TILE * G_K_PITCH;
const int G_SHARED = G_STAGES * 2 * G_SIDE_BYTES;

// Copies ROWS rows by 32 k's of one operand, step by step, into shared memory, with zeros beyond its edges: as
// [row][k], or as [k][row] (smaller) where rows lie together.
template <int ROWS> struct Loader {
  static constexpr int ROW_PITCH = ROWS * 2 + 16;
  const Side& s;
  const u16* from;  // of this thread's first element in the first step
  int row, k;       // and its place in the tile; the next ones are `more` rows or k's further
  int rows_left;    // from that row to the edge
  DEVICE Loader(const Side& side, i64 row0, i64 k0) : s(side) {
    const int i = threadIdx.x;
    if (s.vectors) row = s.k_major ? i / 4 : i % (ROWS / 8) * 8, k = s.k_major ? i % 4 * 8 : i / (ROWS / 8);
    else row = s.k_major ? i / G_STEP : i % ROWS, k = s.k_major ? i % G_STEP : i / ROWS;
    from = (const u16*)s.data + (row0 + row) * s.row + (k0 + k) * s.k;
    rows_left = (int)min(s.count - row0 - row, (i64)ROWS);
  }
  DEVICE void load(unsigned char* to, i64 steps, i64 k_left) const {  // k_left: of this step and the later ones
    const u16* p = from + steps * G_STEP * s.k;
    const int pitch = s.k_major ? G_K_PITCH : ROW_PITCH, left = (int)min(k_left, (i64)G_STEP) - k;
    to += s.k_major ? row * pitch + k * 2 : k * pitch + row * 2;
    if (s.vectors) {
      const int more = s.k_major ? 64 : 2048 / ROWS;  // 256 threads by 8 elements further
#pragma unroll
      for (int c = 0; c < ROWS / 64; ++c) {
        const int there = s.k_major ? (c * more < rows_left ? left : 0) : (c * more < left ? rows_left : 0);
        const int count = max(min(there, 8), 0);
        copy_async(shared_address(to + c * more * pitch), count ? p + c * more * (s.k_major ? s.row : s.k) : s.data,
                   count * 2);
      }
    } else {
      const int more = s.k_major ? 256 / G_STEP : 256 / ROWS;
#pragma unroll 4
      for (int c = 0; c < ROWS * G_STEP / 256; ++c) {
        const bool in = s.k_major ? c * more < rows_left && left > 0 : c * more < left && rows_left > 0;
        *(u16*)(to + c * more * pitch) = in ? p[c * more * (s.k_major ? s.row : s.k)] : (u16)0;
      }
    }
  }
};
// Where a lane reads 16 rows by 16 k's, in the order of mma's first operand.
struct Fragments {
  u32 base, next_rows, next_k;  // from 16 rows, or 16 k's, to the next
  int k_major;
  template <int ROWS> static DEVICE Fragments of(const Side& s, u32 tile, int row, int lane) {
    constexpr int PITCH = Loader<ROWS>::ROW_PITCH;
    const int a = lane % 16, b = lane / 16 * 8;
    if (s.k_major) return {tile + (row + a) * G_K_PITCH + b * 2, 16 * G_K_PITCH, 32, 1};
    return {tile + (lane % 8 + b) * PITCH + (row + lane / 8 % 2 * 8) * 2, 32, 16 * PITCH, 0};
  }
  DEVICE void load(u32 (&v)[4], u32 stage, int rows, int k) const {
    const u32 address = base + stage + rows * next_rows + k * next_k;
    if (k_major) load_matrices(v, address);
    else load_matrices_transposed(v, address);
  }
};

template <class T, bool GATED>
__global__ void __launch_bounds__(256, 2)
    product_any(const Side a, const Side b, const Side up, i64 K, const Cut cut, const Result r) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  constexpr int COLS = GATED ? 64 : 128;  // of a tile of the result, and of each of B's operands in it
  constexpr int HALF = 64 * G_K_PITCH;    // from gate's columns in a stage to up's
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int wm = warp % 2 * 64, wn = warp / 2 * (COLS / 4);  // a warp: 64 rows by 32 columns, or by 16 of each operand
  const Place at = find(cut, blockIdx.x);
  const i64 row0 = (i64)at.row * G_TILE, col0 = (i64)at.col * COLS, k0 = (i64)at.first * G_STEP;
  const Loader<128> load_a(a, row0, k0);
  const Loader<COLS> load_b(b, col0, k0), load_up(GATED ? up : b, col0, k0);
  const u32 base = shared_address(dynamic_shared), side = base + G_SIDE_BYTES;
  const Fragments from_a = Fragments::of<128>(a, base, wm, lane);
  const Fragments from_b = Fragments::of<COLS>(b, side, wn, lane);
  const Fragments from_up = GATED ? Fragments::of<COLS>(up, side + HALF, wn, lane) : from_b;
  const int steps = at.last - at.first;
  auto load = [&](int step) {
    if (step < steps) {
      unsigned char* to = dynamic_shared + step % G_STAGES * 2 * G_SIDE_BYTES;
      const i64 k_left = K - k0 - (i64)step * G_STEP;
      load_a.load(to, step, k_left);
      load_b.load(to + G_SIDE_BYTES, step, k_left);
      if constexpr (GATED) load_up.load(to + G_SIDE_BYTES + HALF, step, k_left);
    }
    copy_commit();  // one group a step, even an empty one, so that counting groups counts steps
  };
  float sums[4][4][4] = {};
  for (int s = 0; s < G_STAGES - 1; ++s) load(s);
  for (int step = 0; step < steps; ++step) {
    copy_wait<G_STAGES - 2>();
    __syncthreads();  // this step's tiles are there, and everybody is done with the step before
    load(step + G_STAGES - 1);
    const u32 stage = step % G_STAGES * 2 * G_SIDE_BYTES;
#pragma unroll
    for (int k = 0; k < G_STEP / 16; ++k) {
      u32 x[4][4], y[2][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) from_a.load(x[m], stage, m, k);
      from_b.load(y[0], stage, 0, k);
      if constexpr (GATED) from_up.load(y[1], stage, 0, k);
      else from_b.load(y[1], stage, 1, k);
      // y[n]: columns 0-7 and 8-15 at k 0-7, then both at k 8-15.
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) mma(T{}, sums[m][n], x[m], y[n / 2][n % 2], y[n / 2][n % 2 + 2]);
    }
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = sums[m][i / 4][i % 4];
    if (GATED && at.piece < 0) gate<T>(v, r.activation);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int n = i / 4, row = wm + m * 16 + lane / 4 + i % 4 / 2 * 8;
      const int col = (GATED ? n / 2 * 64 + n % 2 * 8 : n * 8) + wn + lane % 4 * 2 + i % 2;
      if (at.piece >= 0) r.pieces[((i64)at.piece * G_TILE + row) * G_TILE + col] = v[i];
      else if (!GATED || n < 2) put_at<T>(r, row0 + row, col0 + col, v[i]);
    }
  }
}

// fp32 --------------------------------------------------------------------------------------------------------------

const int F_TILE = 128, F_STEP = 16, F_PITCH = F_TILE + 4;
const int F_SHARED = 2 * 2 * F_STEP * F_PITCH * 4;

// Copies ROWS rows by 16 k's of one operand, step by step, into shared memory as [k][row]. The copies are asynchronous
// whatever the strides: single elements where 16 bytes do not lie together along the rows.
template <int ROWS> struct Loader32 {
  const Side& s;
  const float* from;
  int row, k, rows_left;  // as in Loader
  bool wide;
  DEVICE Loader32(const Side& side, i64 row0, i64 k0) : s(side), wide(side.vectors && !side.k_major) {
    const int i = threadIdx.x;
    row = wide ? i % (ROWS / 4) * 4 : s.k_major ? i / F_STEP : i % ROWS;
    k = wide ? i / (ROWS / 4) : s.k_major ? i % F_STEP : i / ROWS;
    from = (const float*)s.data + (row0 + row) * s.row + (k0 + k) * s.k;
    rows_left = (int)min(s.count - row0 - row, (i64)ROWS);
  }
  DEVICE void load(float (*to)[F_PITCH], int first_row, i64 steps, i64 k_left) const {
    const float* p = from + steps * F_STEP * s.k;
    const int left = (int)min(k_left, (i64)F_STEP) - k;
    to = (float(*)[F_PITCH])(&to[k][first_row + row]);
    if (wide) {
      constexpr int MORE = 1024 / ROWS;  // k's from one copy of a thread to the next
#pragma unroll
      for (int c = 0; c < ROWS / 64; ++c) {
        const int count = c * MORE < left ? max(min(rows_left, 4), 0) : 0;
        copy_async(shared_address(to[c * MORE]), count ? p + c * MORE * s.k : s.data, count * 4);
      }
    } else if (s.k_major) {
#pragma unroll
      for (int c = 0; c < ROWS / 16; ++c) {
        const bool in = c * 16 < rows_left && left > 0;
        copy_word_async(shared_address(&to[0][c * 16]), in ? p + c * 16 * s.row : s.data, in);
      }
    } else {
      constexpr int MORE = 256 / ROWS;
#pragma unroll
      for (int c = 0; c < ROWS / 16; ++c) {
        const bool in = c * MORE < left && rows_left > 0;
        copy_word_async(shared_address(to[c * MORE]), in ? p + c * MORE * s.k : s.data, in);
      }
    }
  }
};

template <bool GATED>
__global__ void __launch_bounds__(256, 2)
    product_fp32(const Side a, const Side b, const Side up, i64 K, const Cut cut, const Result r) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  auto tiles = (float(*)[2][F_STEP][F_PITCH])dynamic_shared;  // [buffer][operand]
  constexpr int COLS = GATED ? 64 : 128;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const Place at = find(cut, blockIdx.x);
  const i64 row0 = (i64)at.row * F_TILE, col0 = (i64)at.col * COLS, k0 = (i64)at.first * F_STEP;
  const Loader32<128> load_a(a, row0, k0);
  const Loader32<COLS> load_b(b, col0, k0), load_up(GATED ? up : b, col0, k0);
  const int steps = at.last - at.first;
  auto load = [&](int step) {
    const i64 k_left = K - k0 - (i64)step * F_STEP;
    load_a.load(tiles[step % 2][0], 0, step, k_left);
    load_b.load(tiles[step % 2][1], 0, step, k_left);
    if constexpr (GATED) load_up.load(tiles[step % 2][1], 64, step, k_left);
    copy_commit();
  };
  load(0);
  float sums[8][8] = {};  // rows 4 ty.. and 64 + 4 ty.., columns alike: a gate's, then the same ones of up
  for (int step = 0; step < steps; ++step) {
    copy_wait<0>();
    __syncthreads();  // this step's tiles are there, and everybody is done with the other buffer
    if (step + 1 < steps) load(step + 1);
    const int now = step % 2;
#pragma unroll
    for (int k = 0; k < F_STEP; ++k) {
      float x[8], y[8];
      *(float4*)x = *(const float4*)&tiles[now][0][k][ty * 4];
      *(float4*)(x + 4) = *(const float4*)&tiles[now][0][k][64 + ty * 4];
      *(float4*)y = *(const float4*)&tiles[now][1][k][tx * 4];
      *(float4*)(y + 4) = *(const float4*)&tiles[now][1][k][64 + tx * 4];
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i / 4 * 64 + ty * 4 + i % 4;
    if (GATED && at.piece < 0) gate<float>(sums[i], r.activation);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int col = j / 4 * 64 + tx * 4 + j % 4;
      if (at.piece >= 0) r.pieces[((i64)at.piece * F_TILE + row) * F_TILE + col] = sums[i][j];
      else if (!GATED || j < 4) put_at<float>(r, row0 + row, col0 + col, sums[i][j]);
    }
  }
}

// Few rows ----------------------------------------------------------------------------------------------------------

// Up to 16 rows x times many weight rows w, which are read once; k lies together in both. The tensor cores' 16 rows are
// the weights, their 8 columns are rows of x. Eight warps of a block take every eighth part of k, and their sums are
// added in order. Which k is which is free as long as both operands agree: a lane takes 8 neighbours of k for two
// products.
const int S_STEP = 1024;  // k of a block's step: 8 warps by 128
const int S_COLS = 16;    // of a tile of the result

template <class T, bool GATED>
__global__ void __launch_bounds__(256)
    product_skinny(const Side x, const Side w, const Side up, i64 K, const Cut cut, const Result r) {
  constexpr int SIDES = GATED ? 2 : 1, UNROLL = GATED ? 2 : 4;  // runs of 32 k's in flight
  __shared__ float parts[8][SIDES][16][17];                     // [warp][weight][its row][row of x]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Place at = find(cut, blockIdx.x);
  const i64 n0 = (i64)at.col * S_COLS, last = min((i64)at.last * S_STEP, K);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  float sums[SIDES][2][4] = {};
  for (i64 k0 = (i64)at.first * S_STEP + warp * (32 * UNROLL); k0 < last; k0 += 8 * 32 * UNROLL) {
    uint4 xv[UNROLL][2], wv[UNROLL][SIDES][2];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 k = k0 + u * 32 + t * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const i64 n = n0 + g + 8 * i;
#pragma unroll
        for (int q = 0; q < SIDES; ++q) {
          const Side& s = q ? up : w;
          wv[u][q][i] = k < last && n < s.count ? load_stream((const u16*)s.data + n * s.row + k) : zero;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        xv[u][i] = k < last && g + 8 * i < x.count
                       ? load_shared_by_many((const u16*)x.data + (g + 8 * i) * x.row + k) : zero;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int q = 0; q < SIDES; ++q) {
        const uint4 lo = wv[u][q][0], hi = wv[u][q][1], x0 = xv[u][0], x1 = xv[u][1];
        const u32 a0[4] = {lo.x, hi.x, lo.y, hi.y}, a1[4] = {lo.z, hi.z, lo.w, hi.w};
        mma(T{}, sums[q][0], a0, x0.x, x0.y);
        mma(T{}, sums[q][0], a1, x0.z, x0.w);
        if (x.count > 8) {
          mma(T{}, sums[q][1], a0, x1.x, x1.y);
          mma(T{}, sums[q][1], a1, x1.z, x1.w);
        }
      }
  }
#pragma unroll
  for (int q = 0; q < SIDES; ++q)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) parts[warp][q][g + i / 2 * 8][half * 8 + 2 * t + i % 2] = sums[q][half][i];
  __syncthreads();
  const int col = threadIdx.x % 16, row = threadIdx.x / 16;
  float sum[2];
#pragma unroll
  for (int q = 0; q < SIDES; ++q) {
    sum[q] = parts[0][q][col][row];
#pragma unroll
    for (int p = 1; p < 8; ++p) sum[q] += parts[p][q][col][row];
    if (at.piece >= 0) r.pieces[((i64)at.piece * 16 + row) * (16 * SIDES) + q * 16 + col] = sum[q];
  }
  if (at.piece < 0) put_at<T>(r, row, n0 + col, GATED ? gated<T>(sum[0], sum[1], r.activation) : sum[0]);
}

// The same for fp32: a warp takes two weight rows, its lanes take k.
const int SF_ROWS = 8;  // rows of x at a time

template <bool GATED>
__global__ void __launch_bounds__(256)
    skinny_fp32(const Side x, const Side w, const Side up, i64 K, const Cut cut, const Result r) {
  constexpr int SIDES = GATED ? 2 : 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Place at = find(cut, blockIdx.x);
  const i64 n0 = (i64)at.col * S_COLS + warp * 2, last = min((i64)at.last * S_STEP, K);
  for (i64 m0 = 0; m0 < x.count; m0 += SF_ROWS) {
    float sums[SF_ROWS][2][SIDES] = {};
    for (i64 k = (i64)at.first * S_STEP + lane * 4; k < last; k += 128) {
      uint4 wv[2][SIDES];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int q = 0; q < SIDES; ++q) {
          const Side& s = q ? up : w;
          wv[i][q] = make_uint4(0, 0, 0, 0);
          if (n0 + i < s.count) wv[i][q] = load_stream((const float*)s.data + (n0 + i) * s.row + k);
        }
#pragma unroll
      for (int m = 0; m < SF_ROWS; ++m) {
        float4 v = make_float4(0, 0, 0, 0);
        if (m0 + m < x.count) v = *(const float4*)((const float*)x.data + (m0 + m) * x.row + k);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int q = 0; q < SIDES; ++q) {
            float& sum = sums[m][i][q];
            sum = fmaf(v.x, __uint_as_float(wv[i][q].x), sum);
            sum = fmaf(v.y, __uint_as_float(wv[i][q].y), sum);
            sum = fmaf(v.z, __uint_as_float(wv[i][q].z), sum);
            sum = fmaf(v.w, __uint_as_float(wv[i][q].w), sum);
          }
      }
    }
#pragma unroll
    for (int m = 0; m < SF_ROWS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int q = 0; q < SIDES; ++q) {
          float& sum = sums[m][i][q];
#pragma unroll
          for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
          if (lane == 0 && at.piece >= 0)
            r.pieces[((i64)at.piece * 16 + m0 + m) * (16 * SIDES) + q * 16 + warp * 2 + i] = sum;
        }
        if (lane == 0 && at.piece < 0)
          put_at<float>(r, m0 + m, n0 + i,
                        GATED ? gated<float>(sums[m][i][0], sums[m][i][SIDES - 1], r.activation) : sums[m][i][0]);
      }
  }
}

// Launches ----------------------------------------------------------------------------------------------------------

template <class... P, class... A>
static cudaError_t launch(void (*kernel)(P...), dim3 grid, int threads, int shared, int cluster, cudaStream_t stream,
                          const A&... args) {
  if (shared > 48 << 10) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static Encode find_encode() {  // a driver function, found at run time so that no driver library is linked
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  return (Encode)found;
}

// A matrix of 16-bit elements, contiguous along `cols`. False when the driver refuses such a tensor.
template <class T>
static bool encode(CUtensorMap* map, const void* data, i64 cols, i64 rows, i64 pitch, int box_rows) {
  static const Encode function = find_encode();
  const cuuint64_t size[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, stride[1] = {(cuuint64_t)pitch * 2};
  const cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, one[2] = {1, 1};
  return function && function(map, T::MAP_TYPE, 2, (void*)data, size, stride, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// What Python decided for a call: both products, in the order of _Stage.fields.
struct StagePlan {
  i64 path, M, N, K;
  i64 a_row, a_k, a_k_major, a_vectors;
  i64 b_row, b_k, b_k_major, b_vectors;
  i64 up_row, up_k, up_k_major, up_vectors;
  i64 out_row;
  i64 rows, cols, group, whole, splits, items, blocks, workers;
};
struct Plan {
  i64 type, activation;
  StagePlan up, down;
};
enum { TENSOR, TENSOR_SMALL, ANY, FP32, SKINNY_ROWS };

struct Call {
  Side a, b, up;
  Cut cut;
  Result r;
  const StagePlan& p;
  cudaStream_t stream;
};

template <class T, bool GATED>
static cudaError_t finish(const Call& c, cudaError_t error, int cluster, int tile_rows, int tile_cols) {
  if (error != cudaSuccess || c.cut.splits == 1) return error;
  const int tiles = (c.cut.items - c.cut.whole) / c.cut.splits * cluster;
  const int elements = tile_rows * tile_cols / (GATED ? 2 : 1);
  return launch(add_pieces<T, GATED>, dim3(tiles, (elements + 1023) / 1024), 256, 0, 1, c.stream, c.cut, c.r, cluster,
                tile_rows, tile_cols);
}

template <class T, bool GATED, class Tile> static cudaError_t run_tensor(const Call& c) {
  CUtensorMap a, b, up = {}, out = {};
  const bool tensor_out = c.r.row % 8 == 0;  // rows of the result start at multiples of 16 bytes
  const bool taken = encode<T>(&a, c.a.data, c.p.K, c.p.M, c.a.row, Tile::BLOCK_ROWS) &&
                     encode<T>(&b, c.b.data, c.p.K, c.p.N, c.b.row, Tile::COLS / 2) &&
                     (!GATED || encode<T>(&up, c.up.data, c.p.K, c.p.N, c.up.row, Tile::COLS / 2)) &&
                     (!tensor_out || encode<T>(&out, c.r.data, c.p.N, c.p.M, c.r.row, 16));
  if (!taken) return cudaErrorNotSupported;
  const int blocks = (int)(c.p.workers < c.p.items ? c.p.workers : c.p.items) * Tile::CLUSTER;
  const cudaError_t error = launch(product_tensor<T, GATED, Tile>, dim3(blocks), THREADS, Tile::SHARED, Tile::CLUSTER,
                                   c.stream, a, b, up, out, c.cut, c.r, (int)tensor_out);
  return finish<T, GATED>(c, error, Tile::CLUSTER, Tile::BLOCK_ROWS, Tile::COLS);
}

template <class T, bool GATED, class Large> static cudaError_t run(const Call& c) {
  switch (c.p.path) {
    case TENSOR: return run_tensor<T, GATED, Large>(c);
    case TENSOR_SMALL: return run_tensor<T, GATED, Tile<64, 128, false, 1>>(c);
    case ANY: {
      const cudaError_t error = launch(product_any<T, GATED>, dim3(c.cut.items), 256, G_SHARED, 1, c.stream, c.a, c.b,
                                       c.up, c.p.K, c.cut, c.r);
      return finish<T, GATED>(c, error, 1, G_TILE, G_TILE);
    }
    default: {
      const cudaError_t error = launch(product_skinny<T, GATED>, dim3(c.cut.items), 256, 0, 1, c.stream, c.a, c.b, c.up,
                                       c.p.K, c.cut, c.r);
      return finish<T, GATED>(c, error, 1, 16, GATED ? 2 * S_COLS : S_COLS);
    }
  }
}
template <bool GATED> static cudaError_t run_fp32(const Call& c) {
  const bool skinny = c.p.path == SKINNY_ROWS;
  const cudaError_t error = launch(skinny ? skinny_fp32<GATED> : product_fp32<GATED>, dim3(c.cut.items), 256,
                                   skinny ? 0 : F_SHARED, 1, c.stream, c.a, c.b, c.up, c.p.K, c.cut, c.r);
  if (skinny) return finish<float, GATED>(c, error, 1, 16, GATED ? 2 * S_COLS : S_COLS);
  return finish<float, GATED>(c, error, 1, F_TILE, F_TILE);
}

static Call call_of(const StagePlan& p, const void* a, const void* b, const void* up, void* out, float* pieces,
                    i64 activation, cudaStream_t stream) {
  return {
      {a, p.M, p.a_row, p.a_k, (int)p.a_k_major, (int)p.a_vectors},
      {b, p.N, p.b_row, p.b_k, (int)p.b_k_major, (int)p.b_vectors},
      {up, p.N, p.up_row, p.up_k, (int)p.up_k_major, (int)p.up_vectors},
      {(int)p.rows, (int)p.cols, (int)p.group, (int)p.whole, (int)p.splits, (int)p.items, (int)p.blocks},
      {out, p.M, p.N, p.out_row, pieces, (int)activation},
      p,
      stream,
  };
}

typedef Tile<UP_ROWS, UP_COLS, UP_PINGPONG, TILE_CLUSTER> UpTile;
typedef Tile<DOWN_ROWS, DOWN_COLS, DOWN_PINGPONG, TILE_CLUSTER> DownTile;

extern "C" int fused_mlp(const void* x, const void* gate, const void* up, const void* down, void* hidden, void* out,
                         float* pieces, const Plan* p, cudaStream_t stream) {
  const Call first = call_of(p->up, x, gate, up, hidden, pieces, p->activation, stream);
  const Call second = call_of(p->down, hidden, down, down, out, pieces, p->activation, stream);
  cudaError_t error;
  switch (p->type) {
    case 0:
      error = run<Half, true, UpTile>(first);
      return error == cudaSuccess ? run<Half, false, DownTile>(second) : error;
    case 1:
      error = run<Bf16, true, UpTile>(first);
      return error == cudaSuccess ? run<Bf16, false, DownTile>(second) : error;
    default:
      error = run_fp32<true>(first);
      return error == cudaSuccess ? run_fp32<false>(second) : error;
  }
}
"""


def _wgmma(columns):
    """C++ functions d[64 x columns] (+)= a[64 x 16] b[columns x 16]^T with both operands in shared memory."""
    count = columns // 2
    sums = ",".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    text = ""
    for name, kind in (("Half", "f16"), ("Bf16", "bf16")):
        text += f"""
DEVICE void wgmma({name}, float (&d)[{count}], u64 a, u64 b, bool add) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
               "{{{sums}}}, "
               "%{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
               : {operands}
               : "l"(a), "l"(b), "r"((int)add));
}}"""
    return text


def _tile(name):
    """(rows of a warpgroup, columns, pingpong) of a tile's name."""
    mode, size = name.split("_")
    rows, cols = map(int, size.split("x"))
    pingpong = mode == "pingpong"
    return (rows if pingpong else rows // 2), cols, pingpong


@functools.cache
def _library():
    macros = {
        "TILE_CLUSTER": CONFIG["CLUSTER"],
        "STAGES_WANTED": CONFIG["STAGES"],
        "HEAD_START": CONFIG["HEAD_START"],
        "STORE_BUFFERS": CONFIG["STORE_BUFFERS"],
    }
    widths = {SMALL[1]}
    for stage in ("UP", "DOWN"):
        rows, cols, pingpong = _tile(CONFIG[f"{stage}_TILE"])
        macros |= {f"{stage}_ROWS": rows, f"{stage}_COLS": cols, f"{stage}_PINGPONG": int(pingpong)}
        widths.add(cols)
    source = SOURCE.replace("@WGMMA@", "".join(_wgmma(n) for n in sorted(widths)))
    return build(source, backend="cuda", flags=[f"-D{name}={value}" for name, value in macros.items()])


DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
TENSOR, TENSOR_SMALL, ANY, FP32, SKINNY = range(5)
SMALL = (128, 128)  # tile of the products that are too small for CONFIG's
SMALL_SLOWDOWN = 1.3  # of its multiplications: more bytes per operation
PIECES_CYCLES, PIECES_BYTES = 5000, 2000  # what partial sums cost: a launch, and bytes written and added per cycle
SKINNY_COLS = 16


def _ceil(a, b):
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class _Side:
    """Rows of x, of the hidden values or of a weight, by k: size and strides in elements."""

    count: int
    row: int
    k: int
    k_major: bool  # k lies together in memory
    vectors: bool  # 16 bytes may be loaded at once
    tensor: bool  # fit for the bulk tensor copy engine

    def fields(self):
        return (self.row, self.k, self.k_major, self.vectors)


def _side(count, inner, row, k, aligned, width):
    """`width` elements are 16 bytes; `aligned`: the data starts at a multiple of them."""
    if inner == 1:  # the stride of a dimension of size 1 means nothing: choose one that keeps everything aligned
        k = _ceil(count, width) * width if row == 1 and count > 1 else 1
    if count == 1:
        row = _ceil(inner, width) * width
    k_major = k == 1 or row != 1
    unit, pitch = (k, row) if k_major else (row, k)
    vectors = aligned and unit == 1 and pitch % width == 0
    return _Side(count, row, k, k_major, vectors, vectors and k_major and pitch >= inner)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The tiles of one kernel, `whole` in one piece, the later ones in `splits` pieces along K."""

    rows: int
    cols: int
    whole: int
    splits: int
    items: int
    blocks: int
    workers: int
    cycles: float
    floats: int  # of all pieces

    def fields(self):
        return (self.rows, self.cols, CONFIG["GROUP"], self.whole, self.splits, self.items, self.blocks, self.workers)


def _cut(rows, cols, blocks, workers, block_cycles, piece):
    """The fastest cut of rows x cols tiles and `blocks` steps of k: only the last round may be split.

    A worker takes `block_cycles` for a step, and a tile has `piece` sums.
    """
    tiles = rows * cols
    rest = tiles % workers

    def cycles(splits):
        rounds = _ceil(rest * splits, workers) * _ceil(blocks, splits)
        pieces = PIECES_CYCLES + rest * splits * piece * 4 / PIECES_BYTES if splits > 1 else 0
        return rounds * block_cycles + pieces

    most = max(min(blocks, 64, 3 * workers // rest), 1) if rest else 1
    splits = min(CONFIG["SPLIT"], most) or min(range(1, most + 1), key=cycles)
    whole = tiles if splits == 1 else tiles - rest
    items = whole + (tiles - whole) * splits
    total = tiles // workers * blocks * block_cycles + cycles(splits)
    return _Cut(rows, cols, whole, splits, items, blocks, workers, total, (items - whole) * piece)


def _tensor_cut(m, n, k, rows, cols, cluster, slowdown, sms):
    block_cycles = rows * cols * 64 / 2048 * slowdown  # multiply-adds of a multiprocessor's tensor cores in a cycle
    tiles, piece = (_ceil(m, rows * cluster), _ceil(n, cols)), cluster * rows * cols
    return _cut(*tiles, _ceil(k, 64), max(sms // cluster, 1), block_cycles, piece)


def _stage(tile, a, weights, k, out_row, itemsize, target):
    """(numbers for the library, floats for partial sums) of one product: a times one weight, or gate and up."""
    m, n, sms = a.count, weights[0].count * len(weights), target.sms
    operands = (a, *weights)
    if m <= CONFIG["SKINNY"] and k % (16 // itemsize) == 0 and all(s.vectors and s.k_major for s in operands):
        cols = SKINNY_COLS * len(weights)
        path, cut = SKINNY, _cut(1, _ceil(n, cols), _ceil(k, 1024), 2 * sms, 4000, 16 * cols)
    elif itemsize == 4:
        path, cut = FP32, _cut(_ceil(m, 128), _ceil(n, 128), _ceil(k, 16), 2 * sms, 4096, 128 * 128)
    elif target.has_wgmma and all(s.tensor for s in operands):
        rows, cols, pingpong = _tile(tile)
        rows, cluster = (rows if pingpong else 2 * rows), CONFIG["CLUSTER"]
        path, cut = TENSOR, _tensor_cut(m, n, k, rows, cols, cluster, 1.0, sms)
        small = _tensor_cut(m, n, k, *SMALL, 1, SMALL_SLOWDOWN, sms)
        if small.cycles < cut.cycles:
            path, cut = TENSOR_SMALL, small
    else:
        path, cut = ANY, _cut(_ceil(m, 128), _ceil(n, 128), _ceil(k, 32), 2 * sms, 1024, 128 * 128)
    sides = (*a.fields(), *weights[0].fields(), *weights[-1].fields())
    return (path, m, weights[0].count, k, *sides, out_row, *cut.fields()), cut.floats


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a call needs: shapes, floats for partial sums, and the numbers that the library reads."""

    shape: tuple
    hidden: tuple = ()
    empty: bool = False  # no element, or nothing to add up
    copies: bool = False  # rows of x that do not lie evenly
    pieces: int = 0
    numbers: ctypes.Array | None = None
    address: int = 0


@functools.lru_cache(maxsize=4096)
def _plan(shapes, strides, aligned, dtype, activation, device):
    """`shapes`, `strides`, and whether the data starts at a multiple of 16 bytes: of x, w_gate, w_up and w_down."""
    x_shape, gate_shape, up_shape, down_shape = shapes
    x_stride, gate_stride, up_stride, down_stride = strides
    (features, hidden), inner = down_shape, x_shape[-1]
    shape = (*x_shape[:-1], features)
    if gate_shape != up_shape or gate_shape != (hidden, inner):
        raise ValueError(
            f"fused_mlp: x {tuple(x_shape)}, w_gate {tuple(gate_shape)}, w_up {tuple(up_shape)} and "
            f"w_down {tuple(down_shape)} do not belong together"
        )
    if 0 in shape or inner == 0 or hidden == 0:
        return _Plan(shape, empty=True)
    rows = _rows(x_shape[:-1], x_stride[:-1])
    if rows is None:
        return _Plan(shape, copies=True)
    (m, row), width, target = rows, 16 // dtype.itemsize, target_of(torch.empty(0, device=device))
    x = _side(m, inner, row, x_stride[-1], aligned[0], width)
    gate, up = (_side(hidden, inner, *stride, aligned[i], width) for i, stride in ((1, gate_stride), (2, up_stride)))
    down = _side(features, hidden, *down_stride, aligned[3], width)
    pitch = _ceil(hidden, width) * width  # of the hidden values: rows that start at multiples of 16 bytes
    middle = _side(m, hidden, pitch, 1, True, width)
    first, pieces = _stage(CONFIG["UP_TILE"], x, (gate, up), inner, pitch, dtype.itemsize, target)
    second, more = _stage(CONFIG["DOWN_TILE"], middle, (down,), hidden, features, dtype.itemsize, target)
    values = (DTYPES[dtype], ACTIVATIONS[activation], *first, *second)
    numbers = (ctypes.c_int64 * len(values))(*values)
    return _Plan(shape, (m, pitch), pieces=max(pieces, more), numbers=numbers, address=ctypes.addressof(numbers))


def _rows(shape, stride):
    """(count, stride) of the rows of x, or None when they do not lie evenly."""
    count, step = 1, 0
    for size, gap in zip(reversed(shape), reversed(stride), strict=True):
        if size == 1:
            continue
        if count > 1 and gap != count * step:
            return None
        count, step = count * size, step if count > 1 else gap
    return count, step


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    """(activation(x w_gate^T) * (x w_up^T)) w_down^T for x [..., K], w_gate and w_up [H, K], w_down [N, H] -> [..., N].

    Raises: KeyError for another activation than silu, gelu, gelu_tanh and relu; TypeError for tensors that are not of
    one dtype (fp16, bf16, fp32); ValueError for shapes that do not belong together.
    """
    dtype = x.dtype
    if dtype not in DTYPES or not dtype == w_gate.dtype == w_up.dtype == w_down.dtype:
        raise TypeError(f"fused_mlp takes fp16, bf16 or fp32 tensors of one dtype, got {dtype}, {w_gate.dtype}, ...")
    weights = (w_gate, w_up, w_down)
    shapes = x.shape, w_gate.shape, w_up.shape, w_down.shape
    strides = x.stride(), w_gate.stride(), w_up.stride(), w_down.stride()
    aligned = tuple([t.data_ptr() % 16 == 0 for t in (x, *weights)])
    plan = _plan(shapes, strides, aligned, dtype, activation, x.device)
    if plan.empty:
        return torch.zeros(plan.shape, dtype=dtype, device=x.device)
    if plan.copies:
        return kernel_fn(x.contiguous(), *weights, activation)
    out = torch.empty(plan.shape, dtype=dtype, device=x.device)
    hidden = torch.empty(plan.hidden, dtype=dtype, device=x.device)
    pieces = torch.empty(plan.pieces, dtype=torch.float32, device=x.device) if plan.pieces else None
    _library().fused_mlp(x, *weights, hidden, out, pieces, plan.address)
    return out
