"""matmul on CUDA GPUs: out[..., M, N] = a[..., M, K] @ b[..., K, N]; fp16, bf16 or fp32, any strides, sums in fp32.

Hopper, 16 bit: a persistent grid of clusters. One thread of a producer warpgroup copies tiles of A and B into a ring of
shared-memory stages with the bulk tensor copy engine (both blocks of a cluster share the tile of B); two consumer
warpgroups multiply them with wgmma, either halves of one tile (coop) or a tile each, so that one writes its result
while the other multiplies (pingpong). Operands may lie along K or along M/N: the matrix descriptor says which, nothing
is transposed or copied. Tiles of the last, incomplete round are cut along K into pieces whose fp32 sums a second kernel
adds in a fixed order. Other GPUs, and operands that are not aligned to 16 bytes: a tile kernel on mma.sync. Few rows
(or columns): a kernel that streams the other operand once. fp32: fused multiply-adds, no TF32. Every result is
rounded once, and the same input gives the same bits.
"""

import ctypes
import functools
import math
from dataclasses import dataclass

import torch

from autokernel.native import build
from autokernel.target import target_of

KERNEL_TYPE = "matmul"
BACKEND = "cuda"
TUNABLES = {
    # How the consumer warpgroups share the work, and the tile [rows of A, columns of B] of a block (coop) or warpgroup.
    "TILE": [
        "coop_128x256",
        "coop_256x128",
        "coop_128x192",
        "coop_256x192",
        "pingpong_128x192",
        "pingpong_128x128",
        "pingpong_64x256",
    ],
    "CLUSTER": [1, 2],  # blocks, neighbours along M, that share their tiles of a B that lies along K
    "GROUP": [4, 8, 16, 32],  # rows of clusters that are walked together, for reuse in the L2 cache
    "STAGES": [0, 3, 4, 5, 6],  # stages of the ring; 0, or more than fit: as many as fit
    "HEAD_START": [0, 1, 2],  # steps by which one half of a coop tile is ahead, to write while the other multiplies
    "STORE_BUFFERS": [1, 2],  # buffers of 16 rows by 64 columns per warp through which results are written
    "SPLIT": [0, 1, 2, 4, 8],  # pieces along K of the tiles of the last round; 0: chosen from the shape
    "SKINNY": [0, 4, 8, 16],  # up to so many rows or columns the streaming kernel is used
}
CONFIG = {
    "TILE": "coop_128x256",
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
DEVICE void tensor_load(u32 to, const CUtensorMap* map, u32 barrier, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3,%4,%5,%6}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// Into the same place of every block named in `blocks`, signalling the same barrier in each.
DEVICE void tensor_load_multicast(u32 to, const CUtensorMap* map, u32 barrier, u16 blocks, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3,%4,%5,%6}], [%2], %7;"
               ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(blocks) : "memory");
}
DEVICE void tensor_store(const CUtensorMap* map, u32 from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];"
               ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z) : "memory");
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

// Tiles are counted batch by batch; within a batch `group` rows of tiles are walked column by column.
struct Cut {
  int rows, cols;     // tiles of a worker (a block, or a cluster) along M and along N
  int group;
  int whole;          // tiles summed in one piece; the later ones are cut into `splits` pieces along K
  int splits, items;  // items: whole tiles and pieces
  int blocks;         // steps of K in a tile
  int size1, size2;   // batch sizes but the outermost
};
struct Place { int row, col, batch, first, last, piece; };  // steps first..last of a tile; piece -1: all of them

DEVICE void find_tile(const Cut& c, int tile, Place& at) {
  const int per_batch = c.rows * c.cols;
  at.batch = tile < per_batch ? 0 : tile / per_batch;
  tile -= at.batch * per_batch;
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

// Rows of A, or columns of B, by k. Strides in elements.
struct Side {
  const void* data;
  i64 count, row, k, batch[3];
  int k_major;  // neighbours in memory are neighbours along k (or nothing lies together)
  int vectors;  // 16 bytes may be loaded at once along the dimension that lies together
};
DEVICE i64 batch_offset(const Side& s, const Cut& c, int batch) {
  const int inner = batch % c.size2, rest = batch / c.size2;
  return inner * s.batch[2] + rest % c.size1 * s.batch[1] + rest / c.size1 * s.batch[0];
}
struct Result {
  void* data;
  i64 rows, cols, row, col, batch;  // sizes, strides in elements
  float* pieces;                    // [piece][block of the cluster][row of the tile][column of the tile]
};

DEVICE void put(float* p, float v) { *p = v; }
DEVICE void put(Half* p, float v) { p->bits = (u16)pack(Half{}, v, 0.0f); }
DEVICE void put(Bf16* p, float v) { p->bits = (u16)pack(Bf16{}, v, 0.0f); }
template <class T> DEVICE void put_at(const Result& r, int batch, i64 row, i64 col, float v) {
  if (row < r.rows && col < r.cols) put((T*)r.data + batch * r.batch + row * r.row + col * r.col, v);
}

// Adds the pieces of tile whole + blockIdx.x / cluster, in order.
template <class T>
__global__ void __launch_bounds__(256)
    add_pieces(const Cut cut, const Result r, int cluster, int tile_rows, int tile_cols) {
  Place at;
  const int tile = blockIdx.x / cluster, rank = blockIdx.x % cluster;
  find_tile(cut, cut.whole + tile, at);
  const i64 size = (i64)tile_rows * tile_cols, index = ((i64)blockIdx.y * 256 + threadIdx.x) * 4;
  if (index >= size) return;
  const float* from = r.pieces + ((i64)tile * cut.splits * cluster + rank) * size + index;
  float4 sum = *(const float4*)from;
  for (int s = 1; s < cut.splits; ++s) {
    const float4 more = *(const float4*)(from + s * cluster * size);
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  const i64 row = ((i64)at.row * cluster + rank) * tile_rows + index / tile_cols;
  const i64 col = (i64)at.col * tile_cols + index % tile_cols;
  put_at<T>(r, at.batch, row, col, sum.x);
  put_at<T>(r, at.batch, row, col + 1, sum.y);
  put_at<T>(r, at.batch, row, col + 2, sum.z);
  put_at<T>(r, at.batch, row, col + 3, sum.w);
}

// Hopper, 16 bit ----------------------------------------------------------------------------------------------------

const int STEP = 64;             // k of a stage: rows of 128 bytes, the width of the swizzle
const int SHARED_BYTES = 227 << 10;
const int STORE_BYTES = 16 * STEP * 2;  // a warp's rows by 64 columns of the result

template <int ROWS_, int COLS_, bool PINGPONG_, int CLUSTER_> struct Tile {
  using Alone = Tile<ROWS_, COLS_, PINGPONG_, 1>;
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

struct Batches { int a_inner, a_outer, b_inner, b_outer; };  // 0 where an operand is the same along that dimension

// The maps' dimensions are the contiguous one, the other one, and two of batches; the result's are N, M, batch.
template <class T, bool A_K, bool B_K, class Tile>
__global__ void __launch_bounds__(THREADS, 1)
    product_tensor(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                   const __grid_constant__ CUtensorMap map_out, const Cut cut, const Batches batches, const Result r,
                   int tensor_out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int CLUSTER = Tile::CLUSTER, STAGES = Tile::STAGES, COLS = Tile::COLS, ROWS = Tile::ROWS;
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
        const int m = (at.row * CLUSTER + rank) * Tile::BLOCK_ROWS, n = at.col * COLS;
        const int inner = at.batch % cut.size2, outer = at.batch / cut.size2;
        const int ai = inner * batches.a_inner, ao = outer * batches.a_outer;
        const int bi = inner * batches.b_inner, bo = outer * batches.b_outer;
        for (int step = at.first; step < at.last; ++step) {
          const u32 a = ring + stage * Tile::STAGE_BYTES, b = a + Tile::A_BYTES, ready = full + 8 * stage;
          const int k = step * STEP;
          barrier_wait(empty + 8 * stage, parity);
          // All of A and of B, whoever loads it; what lies beyond the tensor arrives as zeros and counts.
          barrier_expect(ready, Tile::STAGE_BYTES);
          if constexpr (A_K) {
            tensor_load(a, &map_a, ready, k, m, ai, ao);
          } else {
#pragma unroll
            for (int i = 0; i < Tile::BLOCK_ROWS / 64; ++i)
              tensor_load(a + i * 8192, &map_a, ready, m + 64 * i, k, ai, ao);
          }
          // A block loads its share of B, of the columns or (below) of the k's, for all blocks of the cluster.
          constexpr int PARTS = B_K ? 1 : COLS / 64;
#pragma unroll
          for (int i = 0; i < PARTS; ++i) {
            const u32 to = b + (B_K ? rank * (COLS / CLUSTER) * 128 : i * 8192 + rank * (STEP / CLUSTER) * 128);
            const int x = B_K ? k : n + 64 * i, y = B_K ? n + rank * (COLS / CLUSTER) : k + rank * (STEP / CLUSTER);
            if constexpr (CLUSTER > 1) tensor_load_multicast(to, &map_b, ready, (1 << CLUSTER) - 1, x, y, bi, bo);
            else tensor_load(to, &map_b, ready, x, y, bi, bo);
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
    // Descriptors: 128-byte swizzle; 8 rows of 128 bytes to the next 8 (of M/N, or of k when M/N lies together); in the
    // latter case also the distance between 64 of M/N and the next 64.
    constexpr u64 SWIZZLED = (u64)1 << 62 | (u64)(1024 >> 4) << 32;
    constexpr u64 A_FORM = SWIZZLED | (u64)(A_K ? 1 : 8192 >> 4) << 16;
    constexpr u64 B_FORM = SWIZZLED | (u64)(B_K ? 1 : 8192 >> 4) << 16;
    constexpr int A_NEXT = (A_K ? 32 : 2048) >> 4, B_NEXT = (B_K ? 32 : 2048) >> 4;  // to the next 16 of k
    auto release = [&](int stage) {
      if constexpr (CLUSTER > 1) {
        if (lane < CLUSTER) barrier_arrive_cluster(released + 8 * stage);
      } else if (lane == 0) {
        barrier_arrive(released + 8 * stage);
      }
    };
    float sums[ROWS / 64][COLS / 2];
    u32 steps = 0;   // of all items so far: which stage comes next, and which of its phases
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
        const u64 desc_a = A_FORM | a >> 4, desc_b = B_FORM | (ring + stage * Tile::STAGE_BYTES + Tile::A_BYTES) >> 4;
        barrier_wait(full + 8 * stage, parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEP / 16; ++k)
#pragma unroll
          for (int m = 0; m < ROWS / 64; ++m)
            wgmma<A_K, B_K>(T{}, sums[m], desc_a + m * (8192 >> 4) + k * A_NEXT, desc_b + k * B_NEXT, step + k > 0);
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
      for (int m = 0; m < ROWS / 64; ++m)
#pragma unroll
        for (int part = 0; part < COLS / 64; ++part) {
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
          const int row = block_row + first_row + m * 64 + quarter * 16, col = at.col * COLS + part * 64;
          if (tensor_out) {
            async_proxy_fence();  // every lane's writes come before the copy engine's reads
            __syncwarp();
            if (lane == 0) {
              tensor_store(&map_out, to, col, row, at.batch);
              tensor_store_commit();
            }
          } else {
            __syncwarp();
            const u16* from = (const u16*)(dynamic_shared + (to - shared_address(dynamic_shared)));
            u16* out = (u16*)r.data + at.batch * r.batch;
            for (int i = lane; i < 16 * 64; i += 32) {
              const int y = i / 64, x = i % 64;
              if (row + y < r.rows && col + x < r.cols)
                out[(row + y) * r.row + (col + x)] = from[y * 64 + (((x / 8) ^ (y % 8)) << 3) + x % 8];
            }
            __syncwarp();
          }
          buffer = buffer + 1 == STORE_BUFFERS ? 0 : buffer + 1;
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
const int G_K_PITCH = G_STEP * 2 + 16, G_ROW_PITCH = G_TILE * 2 + 16;  // bytes; 16 more keep ldmatrix off equal banks
const int G_SIDE_BYTES = G_TILE * G_K_PITCH;                           // [row][k]; [k][row] is smaller
const int G_SHARED = G_STAGES * 2 * G_SIDE_BYTES;

// Copies 128 rows by 32 k's of one operand, step by step, into shared memory, with zeros beyond its edges.
struct Loader {
  const Side& s;
  const u16* from;  // of this thread's first element in the first step
  int row, k;       // and its place in the tile; the next ones are `more` rows or k's further
  int rows_left;    // from that row to the edge
  DEVICE Loader(const Side& side, i64 offset, i64 row0, i64 k0) : s(side) {
    const int i = threadIdx.x;
    if (s.vectors) row = s.k_major ? i / 4 : i % 16 * 8, k = s.k_major ? i % 4 * 8 : i / 16;
    else row = s.k_major ? i / G_STEP : i % G_TILE, k = s.k_major ? i % G_STEP : i / G_TILE;
    from = (const u16*)s.data + offset + (row0 + row) * s.row + (k0 + k) * s.k;
    rows_left = (int)min(s.count - row0 - row, (i64)G_TILE);
  }
  DEVICE void load(unsigned char* to, i64 steps, i64 k_left) const {  // k_left: of this step and the later ones
    const u16* p = from + steps * G_STEP * s.k;
    const int pitch = s.k_major ? G_K_PITCH : G_ROW_PITCH, left = (int)min(k_left, (i64)G_STEP) - k;
    to += s.k_major ? row * pitch + k * 2 : k * pitch + row * 2;
    if (s.vectors) {
      const int more = s.k_major ? 64 : 16;  // 256 threads by 8 elements further
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int there = s.k_major ? (c * more < rows_left ? left : 0) : (c * more < left ? rows_left : 0);
        const int count = max(min(there, 8), 0);
        copy_async(shared_address(to + c * more * pitch), count ? p + c * more * (s.k_major ? s.row : s.k) : s.data,
                   count * 2);
      }
    } else {
      const int more = s.k_major ? 256 / G_STEP : 256 / G_TILE;
#pragma unroll 4
      for (int c = 0; c < G_TILE * G_STEP / 256; ++c) {
        const bool in = s.k_major ? c * more < rows_left && left > 0 : c * more < left && rows_left > 0;
        *(u16*)(to + c * more * pitch) = in ? p[c * more * (s.k_major ? s.row : s.k)] : (u16)0;
      }
    }
  }
};
// Where a lane's matrix row starts for 16 rows by 16 k's, in the order of mma's first operand.
DEVICE u32 lane_offset(const Side& s, int row, int lane) {
  const int a = lane % 16, b = lane / 16 * 8;
  return s.k_major ? (row + a) * G_K_PITCH + b * 2 : (lane % 8 + b) * G_ROW_PITCH + (row + lane / 8 % 2 * 8) * 2;
}

template <class T>
__global__ void __launch_bounds__(256, 2)
    product_any(const Side a, const Side b, i64 K, const Cut cut, const Result r) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int wm = warp % 2 * 64, wn = warp / 2 * 32;
  const Place at = find(cut, blockIdx.x);
  const i64 row0 = (i64)at.row * G_TILE, col0 = (i64)at.col * G_TILE;
  const i64 k0 = (i64)at.first * G_STEP;
  const Loader load_a(a, batch_offset(a, cut, at.batch), row0, k0);
  const Loader load_b(b, batch_offset(b, cut, at.batch), col0, k0);
  const int steps = at.last - at.first;
  const u32 base = shared_address(dynamic_shared);
  const u32 a_lane = lane_offset(a, wm, lane), b_lane = lane_offset(b, wn, lane);
  const u32 a_row = a.k_major ? 16 * G_K_PITCH : 32, a_k = a.k_major ? 32 : 16 * G_ROW_PITCH;
  const u32 b_row = b.k_major ? 16 * G_K_PITCH : 32, b_k = b.k_major ? 32 : 16 * G_ROW_PITCH;
  auto load = [&](int step) {
    if (step < steps) {
      unsigned char* to = dynamic_shared + step % G_STAGES * 2 * G_SIDE_BYTES;
      const i64 k_left = K - k0 - (i64)step * G_STEP;
      load_a.load(to, step, k_left);
      load_b.load(to + G_SIDE_BYTES, step, k_left);
    }
    copy_commit();  // one group a step, even an empty one, so that counting groups counts steps
  };
  float sums[4][4][4] = {};
  for (int s = 0; s < G_STAGES - 1; ++s) load(s);
  for (int step = 0; step < steps; ++step) {
    copy_wait<G_STAGES - 2>();
    __syncthreads();  // this step's tiles are there, and everybody is done with the step before
    load(step + G_STAGES - 1);
    const u32 a_tile = base + step % G_STAGES * 2 * G_SIDE_BYTES + a_lane;
    const u32 b_tile = base + step % G_STAGES * 2 * G_SIDE_BYTES + G_SIDE_BYTES + b_lane;
#pragma unroll
    for (int k = 0; k < G_STEP / 16; ++k) {
      u32 x[4][4], y[2][4];
#pragma unroll
      for (int m = 0; m < 4; ++m)
        if (a.k_major) load_matrices(x[m], a_tile + m * a_row + k * a_k);
        else load_matrices_transposed(x[m], a_tile + m * a_row + k * a_k);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (b.k_major) load_matrices(y[n], b_tile + n * b_row + k * b_k);
        else load_matrices_transposed(y[n], b_tile + n * b_row + k * b_k);
      // y[n]: columns 0-7 and 8-15 at k 0-7, then both at k 8-15.
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) mma(T{}, sums[m][n], x[m], y[n / 2][n % 2], y[n / 2][n % 2 + 2]);
    }
  }
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = wm + m * 16 + lane / 4 + i / 2 * 8, col = wn + n * 8 + lane % 4 * 2 + i % 2;
        if (at.piece >= 0) r.pieces[((i64)at.piece * G_TILE + row) * G_TILE + col] = sums[m][n][i];
        else put_at<T>(r, at.batch, row0 + row, col0 + col, sums[m][n][i]);
      }
}

// fp32 --------------------------------------------------------------------------------------------------------------

const int F_TILE = 128, F_STEP = 16, F_PITCH = F_TILE + 4;
const int F_SHARED = 2 * 2 * F_STEP * F_PITCH * 4;

// Copies 128 rows by 16 k's of one operand, step by step, into shared memory as [k][row]. The copies are asynchronous
// whatever the strides: single elements where 16 bytes do not lie together along the rows.
struct Loader32 {
  const Side& s;
  const float* from;
  int row, k, rows_left;  // as in Loader
  bool wide;
  DEVICE Loader32(const Side& side, i64 offset, i64 row0, i64 k0) : s(side), wide(side.vectors && !side.k_major) {
    const int i = threadIdx.x;
    row = wide ? i % 32 * 4 : s.k_major ? i / F_STEP : i % F_TILE;
    k = wide ? i / 32 : s.k_major ? i % F_STEP : i / F_TILE;
    from = (const float*)s.data + offset + (row0 + row) * s.row + (k0 + k) * s.k;
    rows_left = (int)min(s.count - row0 - row, (i64)F_TILE);
  }
  DEVICE void load(float (*to)[F_PITCH], i64 steps, i64 k_left) const {
    const float* p = from + steps * F_STEP * s.k;
    const int left = (int)min(k_left, (i64)F_STEP) - k;
    if (wide) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int count = c * 8 < left ? max(min(rows_left, 4), 0) : 0;
        copy_async(shared_address(&to[k + c * 8][row]), count ? p + c * 8 * s.k : s.data, count * 4);
      }
    } else if (s.k_major) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const bool in = c * 16 < rows_left && left > 0;
        copy_word_async(shared_address(&to[k][row + c * 16]), in ? p + c * 16 * s.row : s.data, in);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const bool in = c * 2 < left && rows_left > 0;
        copy_word_async(shared_address(&to[k + c * 2][row]), in ? p + c * 2 * s.k : s.data, in);
      }
    }
  }
};

__global__ void __launch_bounds__(256, 2)
    product_fp32(const Side a, const Side b, i64 K, const Cut cut, const Result r) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  auto tiles = (float(*)[2][F_STEP][F_PITCH])dynamic_shared;  // [buffer][operand]
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const Place at = find(cut, blockIdx.x);
  const i64 row0 = (i64)at.row * F_TILE, col0 = (i64)at.col * F_TILE, k0 = (i64)at.first * F_STEP;
  const Loader32 load_a(a, batch_offset(a, cut, at.batch), row0, k0);
  const Loader32 load_b(b, batch_offset(b, cut, at.batch), col0, k0);
  const int steps = at.last - at.first;
  auto load = [&](int step) {
    const i64 k_left = K - k0 - (i64)step * F_STEP;
    load_a.load(tiles[step % 2][0], step, k_left);
    load_b.load(tiles[step % 2][1], step, k_left);
    copy_commit();
  };
  load(0);
  float sums[8][8] = {};  // rows 4 ty.. and 64 + 4 ty.., columns alike
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
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = i / 4 * 64 + ty * 4 + i % 4, col = j / 4 * 64 + tx * 4 + j % 4;
      if (at.piece >= 0) r.pieces[((i64)at.piece * F_TILE + row) * F_TILE + col] = sums[i][j];
      else put_at<float>(r, at.batch, row0 + row, col0 + col, sums[i][j]);
    }
}

// Few rows ----------------------------------------------------------------------------------------------------------

// Up to 16 rows x (k lies together) times many weight rows w, which are read once. The tensor cores' 16 rows are the
// weights, their 8 columns are rows of x. Eight warps of a block take every eighth part of k, and their sums are added
// in order. Which k is which is free as long as both operands agree: a lane takes 8 neighbours of k for two products.
const int S_STEP = 1024;  // k of a block's step: 8 warps by 128

template <class T, bool W_K>
__global__ void __launch_bounds__(256)
    product_skinny(const Side x, const Side w, i64 K, const Cut cut, const Result r) {
  constexpr int TILES = W_K ? 1 : 4;           // of 16 weight rows
  constexpr int UNROLL = W_K ? 4 : 2;          // runs of 32 k's in flight
  __shared__ float parts[8][16 * TILES][17];   // [warp][weight row][row of x]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Place at = find(cut, blockIdx.x);
  const i64 n0 = (i64)at.col * 16 * TILES;
  const u16* xs = (const u16*)x.data + batch_offset(x, cut, at.batch);
  const u16* ws = (const u16*)w.data + batch_offset(w, cut, at.batch);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const i64 last = min((i64)at.last * S_STEP, K);
  float sums[TILES][2][4] = {};
  for (i64 k0 = (i64)at.first * S_STEP + warp * (32 * UNROLL); k0 < last; k0 += 8 * 32 * UNROLL) {
    uint4 xv[UNROLL][2], wv[UNROLL][W_K ? 2 : 8];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 k = k0 + u * 32 + t * 8;
      const bool in = k < last;
      if constexpr (W_K) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          wv[u][i] = in && n0 + g + 8 * i < w.count ? load_stream(ws + (n0 + g + 8 * i) * w.row + k) : zero;
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          wv[u][i] = in && n0 + g * 8 < w.count ? load_stream(ws + (k + i) * w.k + n0 + g * 8) : zero;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        xv[u][i] = in && g + 8 * i < x.count ? load_shared_by_many(xs + (g + 8 * i) * x.row + k) : zero;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // the first and the last four of the lane's k's
        const u32 b[2][2] = {{h ? xv[u][0].z : xv[u][0].x, h ? xv[u][0].w : xv[u][0].y},
                             {h ? xv[u][1].z : xv[u][1].x, h ? xv[u][1].w : xv[u][1].y}};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          u32 a[4];
          if constexpr (W_K) {
            a[0] = h ? wv[u][0].z : wv[u][0].x, a[1] = h ? wv[u][1].z : wv[u][1].x;
            a[2] = h ? wv[u][0].w : wv[u][0].y, a[3] = h ? wv[u][1].w : wv[u][1].y;
          } else {
            // Weight rows 2 tile and 2 tile + 1 of the lane's eight lie in one word of each k: pair k with k + 1.
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const uint4 v0 = wv[u][4 * h + i / 2 * 2], v1 = wv[u][4 * h + i / 2 * 2 + 1];
              const u32 low = tile == 0 ? v0.x : tile == 1 ? v0.y : tile == 2 ? v0.z : v0.w;
              const u32 high = tile == 0 ? v1.x : tile == 1 ? v1.y : tile == 2 ? v1.z : v1.w;
              a[i] = __byte_perm(low, high, i % 2 ? 0x7632 : 0x5410);
            }
          }
          mma(T{}, sums[tile][0], a, b[0][0], b[0][1]);
          if (x.count > 8) mma(T{}, sums[tile][1], a, b[1][0], b[1][1]);
        }
      }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        parts[warp][W_K ? g + i / 2 * 8 : g * 8 + 2 * tile + i / 2][half * 8 + 2 * t + i % 2] = sums[tile][half][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 256 * TILES; i += 256) {
    const int col = i % (16 * TILES), row = i / (16 * TILES);
    float sum = parts[0][col][row];
#pragma unroll
    for (int p = 1; p < 8; ++p) sum += parts[p][col][row];
    if (at.piece >= 0) r.pieces[((i64)at.piece * 16 + row) * 16 * TILES + col] = sum;
    else put_at<T>(r, at.batch, row, n0 + col, sum);
  }
}

// The same for fp32. Weights along k: a warp takes two weight rows, its lanes take k; else a lane takes four weight
// rows and the eight warps take parts of k.
const int SF_ROWS = 8;  // rows of x at a time

template <bool W_K>
__global__ void __launch_bounds__(256) skinny_fp32(const Side x, const Side w, i64 K, const Cut cut, const Result r) {
  constexpr int COLS = W_K ? 16 : 128, MINE = W_K ? 2 : 4;
  __shared__ __align__(16) float parts[8][SF_ROWS][W_K ? 1 : COLS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Place at = find(cut, blockIdx.x);
  const i64 n0 = (i64)at.col * COLS, n = n0 + (W_K ? warp * 2 : lane * 4), last = min((i64)at.last * S_STEP, K);
  const float* xs = (const float*)x.data + batch_offset(x, cut, at.batch);
  const float* ws = (const float*)w.data + batch_offset(w, cut, at.batch);
  const float4 zero = make_float4(0, 0, 0, 0);
  for (i64 m0 = 0; m0 < x.count; m0 += SF_ROWS) {
    float sums[SF_ROWS][MINE] = {};
    // Four k's a turn: neighbours of a lane, or the same for all lanes.
    const i64 first = (i64)at.first * S_STEP + (W_K ? lane : warp) * 4, stride = W_K ? 128 : 32;
#pragma unroll 2
    for (i64 k = first; k < last; k += stride) {
      float4 wv[4];
#pragma unroll
      for (int i = 0; i < (W_K ? 2 : 4); ++i) {
        const bool in = W_K ? n + i < w.count : n < w.count;
        const uint4 v = in ? load_stream(ws + (W_K ? (n + i) * w.row + k : (k + i) * w.k + n)) : make_uint4(0, 0, 0, 0);
        wv[i] = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
      }
#pragma unroll
      for (int m = 0; m < SF_ROWS; ++m) {
        const float4 v = m0 + m < x.count ? *(const float4*)(xs + (m0 + m) * x.row + k) : zero;
        if constexpr (W_K) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            sums[m][i] = fmaf(v.x, wv[i].x, fmaf(v.y, wv[i].y, fmaf(v.z, wv[i].z, fmaf(v.w, wv[i].w, sums[m][i]))));
        } else {
          sums[m][0] = fmaf(v.x, wv[0].x, fmaf(v.y, wv[1].x, fmaf(v.z, wv[2].x, fmaf(v.w, wv[3].x, sums[m][0]))));
          sums[m][1] = fmaf(v.x, wv[0].y, fmaf(v.y, wv[1].y, fmaf(v.z, wv[2].y, fmaf(v.w, wv[3].y, sums[m][1]))));
          sums[m][2] = fmaf(v.x, wv[0].z, fmaf(v.y, wv[1].z, fmaf(v.z, wv[2].z, fmaf(v.w, wv[3].z, sums[m][2]))));
          sums[m][3] = fmaf(v.x, wv[0].w, fmaf(v.y, wv[1].w, fmaf(v.z, wv[2].w, fmaf(v.w, wv[3].w, sums[m][3]))));
        }
      }
    }
    auto finish = [&](i64 row, i64 col, float sum) {  // of the tile of 16 rows
      if (at.piece >= 0) r.pieces[((i64)at.piece * 16 + row) * COLS + col] = sum;
      else put_at<float>(r, at.batch, row, n0 + col, sum);
    };
    if constexpr (W_K) {
#pragma unroll
      for (int m = 0; m < SF_ROWS; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float sum = sums[m][i];
#pragma unroll
          for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
          if (lane == 0) finish(m0 + m, warp * 2 + i, sum);
        }
    } else {
#pragma unroll
      for (int m = 0; m < SF_ROWS; ++m)
        *(float4*)&parts[warp][m][lane * 4] = make_float4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
      __syncthreads();
      for (int i = threadIdx.x; i < SF_ROWS * COLS; i += 256) {
        float sum = parts[0][i / COLS][i % COLS];
        for (int p = 1; p < 8; ++p) sum += parts[p][i / COLS][i % COLS];
        finish(m0 + i / COLS, i % COLS, sum);
      }
      __syncthreads();
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

// Sizes and strides (in elements; the first one is 1) of a tensor of 16-bit elements, contiguous dimension first. False
// when the driver refuses such a tensor.
template <class T>
static bool encode(CUtensorMap* map, const void* data, int rank, const i64* sizes, const i64* strides, int box0,
                   int box1) {
  static const Encode function = find_encode();
  cuuint64_t size[4], stride[4];
  const cuuint32_t box[4] = {(cuuint32_t)box0, (cuuint32_t)box1, 1, 1}, one[4] = {1, 1, 1, 1};
  for (int i = 0; i < rank; ++i) size[i] = sizes[i], stride[i] = strides[i] * 2;
  return function && function(map, T::MAP_TYPE, rank, (void*)data, size, stride + 1, box, one,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// What Python decided for a call, in the order of its _FIELDS.
struct Plan {
  i64 path, type, swap;
  i64 M, N, K, batch0, batch1, batch2;
  i64 a_row, a_k, a_batch0, a_batch1, a_batch2, a_k_major, a_vectors;
  i64 b_row, b_k, b_batch0, b_batch1, b_batch2, b_k_major, b_vectors;
  i64 out_row, out_col, out_batch;
  i64 rows, cols, group, whole, splits, items, blocks, workers;
};
enum { TENSOR, TENSOR_SMALL, ANY, FP32, SKINNY_ROWS };

struct Call {
  Side a, b;
  Cut cut;
  Result r;
  const Plan& p;
  cudaStream_t stream;
};

template <class T> static cudaError_t finish(const Call& c, int cluster, int tile_rows, int tile_cols) {
  if (c.cut.splits == 1) return cudaSuccess;
  const int tiles = (c.cut.items - c.cut.whole) / c.cut.splits * cluster;
  return launch(add_pieces<T>, dim3(tiles, (tile_rows * tile_cols + 1023) / 1024), 256, 0, 1, c.stream, c.cut, c.r,
                cluster, tile_rows, tile_cols);
}

template <class T> static bool encode_side(CUtensorMap* map, const Side& s, const Plan& p, int rows, int steps) {
  const i64 K = p.K, sizes[4] = {s.k_major ? K : s.count, s.k_major ? s.count : K, s.batch[2] ? p.batch2 : 1,
                                 s.batch[1] ? p.batch1 : 1};
  // The stride of a dimension of size 1 means nothing, but must be a valid one.
  const i64 strides[4] = {1, s.k_major ? s.row : s.k, s.batch[2] ? s.batch[2] : 8, s.batch[1] ? s.batch[1] : 8};
  return encode<T>(map, s.data, 4, sizes, strides, 64, s.k_major ? rows : steps);
}

template <class T, bool A_K, bool B_K, class Tile> static cudaError_t run_tensor(const Call& c, bool& refused) {
  CUtensorMap a, b, out = {};
  const i64 sizes[3] = {c.p.N, c.p.M, c.p.batch1 * c.p.batch2}, strides[3] = {1, c.r.row, c.r.batch};
  const bool tensor_out = c.p.N % 8 == 0;  // rows of the result start at multiples of 16 bytes
  refused = !encode_side<T>(&a, c.a, c.p, Tile::BLOCK_ROWS, STEP) ||
            !encode_side<T>(&b, c.b, c.p, Tile::COLS / Tile::CLUSTER, STEP / Tile::CLUSTER) ||
            (tensor_out && !encode<T>(&out, c.r.data, 3, sizes, strides, 64, 16));
  if (refused) return cudaSuccess;
  const Batches batches = {c.a.batch[2] != 0, c.a.batch[1] != 0, c.b.batch[2] != 0, c.b.batch[1] != 0};
  const int blocks = (int)(c.p.workers < c.p.items ? c.p.workers : c.p.items) * Tile::CLUSTER;
  cudaError_t error = launch(product_tensor<T, A_K, B_K, Tile>, dim3(blocks), THREADS, Tile::SHARED, Tile::CLUSTER,
                             c.stream, a, b, out, c.cut, batches, c.r, (int)tensor_out);
  return error == cudaSuccess ? finish<T>(c, Tile::CLUSTER, Tile::BLOCK_ROWS, Tile::COLS) : error;
}
// Blocks share only a B that lies along K: sharing one that lies along N gave wrong products on an H200.
template <class T, class Tile> static cudaError_t run_tensor(const Call& c, bool& refused) {
  if (c.a.k_major && c.b.k_major) return run_tensor<T, true, true, Tile>(c, refused);
  if (c.a.k_major) return run_tensor<T, true, false, typename Tile::Alone>(c, refused);
  if (c.b.k_major) return run_tensor<T, false, true, Tile>(c, refused);
  return run_tensor<T, false, false, typename Tile::Alone>(c, refused);
}

template <class T> static cudaError_t run_any(const Call& c) {
  cudaError_t error =
      launch(product_any<T>, dim3(c.cut.items), 256, G_SHARED, 1, c.stream, c.a, c.b, c.p.K, c.cut, c.r);
  return error == cudaSuccess ? finish<T>(c, 1, G_TILE, G_TILE) : error;
}

template <class T> static cudaError_t run(Call& c) {
  bool refused = false;
  cudaError_t error = cudaSuccess;
  switch (c.p.path) {
    case TENSOR: error = run_tensor<T, Tile<TILE_ROWS, TILE_COLS, TILE_PINGPONG, TILE_CLUSTER>>(c, refused); break;
    case TENSOR_SMALL: error = run_tensor<T, Tile<64, 128, false, 1>>(c, refused); break;
    case ANY: return run_any<T>(c);
    case SKINNY_ROWS:
      error = launch(c.b.k_major ? product_skinny<T, true> : product_skinny<T, false>, dim3(c.cut.items), 256, 0, 1,
                     c.stream, c.a, c.b, c.p.K, c.cut, c.r);
      return error == cudaSuccess ? finish<T>(c, 1, 16, c.b.k_major ? 16 : 64) : error;
    default: return cudaErrorInvalidValue;
  }
  if (!refused) return error;
  // Strides that the copy engine does not take.
  c.cut.rows = (int)((c.p.M + G_TILE - 1) / G_TILE), c.cut.cols = (int)((c.p.N + G_TILE - 1) / G_TILE);
  c.cut.items = c.cut.whole = c.cut.rows * c.cut.cols * c.cut.size1 * c.cut.size2;
  c.cut.blocks = (int)((c.p.K + G_STEP - 1) / G_STEP), c.cut.splits = 1;
  return run_any<T>(c);
}

static cudaError_t run_fp32(const Call& c) {
  const bool skinny = c.p.path == SKINNY_ROWS;
  cudaError_t error = launch(!skinny ? product_fp32 : c.b.k_major ? skinny_fp32<true> : skinny_fp32<false>,
                             dim3(c.cut.items), 256, skinny ? 0 : F_SHARED, 1, c.stream, c.a, c.b, c.p.K, c.cut, c.r);
  if (error != cudaSuccess) return error;
  return skinny ? finish<float>(c, 1, 16, c.b.k_major ? 16 : 128) : finish<float>(c, 1, F_TILE, F_TILE);
}

extern "C" int matmul(const void* a, const void* b, void* out, float* pieces, const Plan* plan, cudaStream_t stream) {
  const Plan& p = *plan;
  Call c = {
      {p.swap ? b : a, p.M, p.a_row, p.a_k, {p.a_batch0, p.a_batch1, p.a_batch2}, (int)p.a_k_major, (int)p.a_vectors},
      {p.swap ? a : b, p.N, p.b_row, p.b_k, {p.b_batch0, p.b_batch1, p.b_batch2}, (int)p.b_k_major, (int)p.b_vectors},
      {(int)p.rows, (int)p.cols, (int)p.group, (int)p.whole, (int)p.splits, (int)p.items, (int)p.blocks, (int)p.batch1,
       (int)p.batch2},
      {out, p.M, p.N, p.out_row, p.out_col, p.out_batch, pieces},
      p,
      stream,
  };
  switch (p.type) {
    case 0: return run<Half>(c);
    case 1: return run<Bf16>(c);
    default: return run_fp32(c);
  }
}
"""


def _wgmma(columns):
    """C++ functions d[64 x columns] (+)= a[64 x 16] b[16 x columns] with both operands in shared memory."""
    count = columns // 2
    sums = ",".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    text = ""
    for name, kind in (("Half", "f16"), ("Bf16", "bf16")):
        text += f"""
template <bool A_K, bool B_K> DEVICE void wgmma({name}, float (&d)[{count}], u64 a, u64 b, bool add) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
               "{{{sums}}}, "
               "%{count}, %{count + 1}, p, 1, 1, %{count + 3}, %{count + 4};\\n}}"
               : {operands}
               : "l"(a), "l"(b), "r"((int)add), "n"(A_K ? 0 : 1), "n"(B_K ? 0 : 1));
}}"""
    return text


def _tile():
    """(rows of a warpgroup, columns, pingpong) of CONFIG's tile."""
    mode, size = CONFIG["TILE"].split("_")
    rows, cols = map(int, size.split("x"))
    pingpong = mode == "pingpong"
    return (rows if pingpong else rows // 2), cols, pingpong


@functools.cache
def _library():
    rows, cols, pingpong = _tile()
    macros = {
        "TILE_ROWS": rows,
        "TILE_COLS": cols,
        "TILE_PINGPONG": int(pingpong),
        "TILE_CLUSTER": CONFIG["CLUSTER"],
        "STAGES_WANTED": CONFIG["STAGES"],
        "HEAD_START": CONFIG["HEAD_START"],
        "STORE_BUFFERS": CONFIG["STORE_BUFFERS"],
    }
    source = SOURCE.replace("@WGMMA@", "".join(_wgmma(n) for n in sorted({cols, SMALL[1]})))
    return build(source, backend="cuda", flags=[f"-D{name}={value}" for name, value in macros.items()])


DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
TENSOR, TENSOR_SMALL, ANY, FP32, SKINNY = range(5)
SMALL = (128, 128)  # tile of the products that are too small for CONFIG's
SMALL_SLOWDOWN = 1.3  # of its multiplications: more bytes per operation
PIECES_CYCLES, PIECES_BYTES = 5000, 2000  # what partial sums cost: a launch, and bytes written and added per cycle
MAX_BATCH_DIMS = 3


def _ceil(a, b):
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class _Side:
    """Rows of a, or columns of b, by k: size and strides in elements."""

    count: int
    row: int
    k: int
    batch: tuple
    k_major: bool  # k lies together in memory
    vectors: bool  # 16 bytes may be loaded at once
    tensor: bool  # fit for the bulk tensor copy engine

    def fields(self):
        return (self.row, self.k, *self.batch, self.k_major, self.vectors)


def _side(count, inner, row, k, batch, aligned, width):
    """`width` elements are 16 bytes; `aligned`: the data starts at a multiple of them."""
    if inner == 1:  # the stride of a dimension of size 1 means nothing: choose one that keeps everything aligned
        k = _ceil(count, width) * width if row == 1 and count > 1 else 1
    if count == 1:
        row = _ceil(inner, width) * width
    k_major = k == 1 or row != 1
    unit, pitch, length = (k, row, inner) if k_major else (row, k, count)
    vectors = aligned and unit == 1 and pitch % width == 0 and all(stride % width == 0 for stride in batch)
    return _Side(count, row, k, batch, k_major, vectors, vectors and pitch >= length and batch[0] == 0)


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


def _cut(rows, cols, batch, blocks, workers, block_cycles, piece):
    """The fastest cut of rows x cols tiles per batch and `blocks` steps of k: only the last round may be split.

    A worker takes `block_cycles` for a step, and a tile has `piece` sums.
    """
    tiles = rows * cols * batch
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


def _tensor_cut(m, n, k, batch, rows, cols, cluster, slowdown, sms):
    block_cycles = rows * cols * 64 / 2048 * slowdown  # multiply-adds of a multiprocessor's tensor cores in a cycle
    tiles, piece = (_ceil(m, rows * cluster), _ceil(n, cols), batch), cluster * rows * cols
    return _cut(*tiles, _ceil(k, 64), max(sms // cluster, 1), block_cycles, piece)


def _skinny_cols(a, b, k, width):
    """Columns of a block of the streaming kernel, or 0 where it cannot run."""
    if a.count > CONFIG["SKINNY"] or not (a.vectors and a.k_major and b.vectors) or k % width:
        return 0
    if b.k_major:
        return 16
    return 0 if b.count % width else 64 if width == 8 else 128


def _choose(a, b, k, batch, itemsize, target):
    """(path, cut) of a product."""
    m, n, sms = a.count, b.count, target.sms
    if cols := _skinny_cols(a, b, k, 16 // itemsize):
        return SKINNY, _cut(1, _ceil(n, cols), batch, _ceil(k, 1024), 2 * sms, 4000, 16 * cols)
    if itemsize == 4:
        return FP32, _cut(_ceil(m, 128), _ceil(n, 128), batch, _ceil(k, 16), 2 * sms, 4096, 128 * 128)
    if target.has_wgmma and a.tensor and b.tensor:
        rows, cols, pingpong = _tile()
        rows, cluster = (rows if pingpong else 2 * rows), CONFIG["CLUSTER"] if b.k_major else 1
        large = _tensor_cut(m, n, k, batch, rows, cols, cluster, 1.0, sms)
        small = _tensor_cut(m, n, k, batch, *SMALL, 1, SMALL_SLOWDOWN, sms)
        return (TENSOR, large) if large.cycles <= small.cycles else (TENSOR_SMALL, small)
    return ANY, _cut(_ceil(m, 128), _ceil(n, 128), batch, _ceil(k, 32), 2 * sms, 1024, 128 * 128)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a call needs: the output's shape, floats for partial sums, and the numbers that the library reads."""

    shape: tuple
    empty: bool = False  # no element, or nothing to add up
    copies: bool = False  # more batch dimensions than the kernels walk
    pieces: int = 0
    numbers: ctypes.Array | None = None
    address: int = 0


@functools.lru_cache(maxsize=4096)
def _plan(a_shape, a_stride, a_aligned, b_shape, b_stride, b_aligned, dtype, device):
    shape, sizes, (rows, cols, inner), a_strides, b_strides = _problem(a_shape, a_stride, b_shape, b_stride)
    if 0 in shape or inner == 0:
        return _Plan(shape, empty=True)
    if len(sizes) > MAX_BATCH_DIMS:
        return _Plan(shape, copies=True)
    width = 16 // dtype.itemsize
    padding = (0,) * (MAX_BATCH_DIMS - len(sizes))
    a = _side(rows, inner, *a_strides[-2:], (*padding, *a_strides[:-2]), a_aligned, width)
    b = _side(cols, inner, *b_strides[:-3:-1], (*padding, *b_strides[:-2]), b_aligned, width)
    batch = math.prod(sizes)
    swap = not _skinny_cols(a, b, inner, width) and bool(_skinny_cols(b, a, inner, width))
    a, b, out_row, out_col = (b, a, 1, cols) if swap else (a, b, cols, 1)
    path, cut = _choose(a, b, inner, batch, dtype.itemsize, target_of(torch.empty(0, device=device)))
    values = (path, DTYPES[dtype], swap, a.count, b.count, inner, *(1,) * len(padding), *sizes)
    values += (*a.fields(), *b.fields(), out_row, out_col, rows * cols, *cut.fields())
    numbers = (ctypes.c_int64 * len(values))(*values)
    return _Plan(shape, pieces=cut.floats, numbers=numbers, address=ctypes.addressof(numbers))


def _problem(a_shape, a_stride, b_shape, b_stride):
    """(output's shape, batch sizes, (M, N, K), a's and b's strides: batches, then its two dimensions)."""
    a_row, b_column = len(a_shape) == 1, len(b_shape) == 1
    if a_row:
        a_shape, a_stride = (1, *a_shape), (0, *a_stride)
    if b_column:
        b_shape, b_stride = (*b_shape, 1), (*b_stride, 0)
    rows, inner, cols = *a_shape[-2:], b_shape[-1]
    if b_shape[-2] != inner:
        raise ValueError(f"matmul: inner sizes differ, {tuple(a_shape)} and {tuple(b_shape)}")
    batch = torch.broadcast_shapes(a_shape[:-2], b_shape[:-2])
    shape = (*batch, *(() if a_row else (rows,)), *(() if b_column else (cols,)))
    dims = _merged(batch, _expanded(batch, a_shape, a_stride), _expanded(batch, b_shape, b_stride))
    row_stride = dims[-1][1] if dims and rows == 1 else a_stride[-2]
    if dims and dims[-1][2] == 0 and dims[-1][1] == rows * row_stride:  # one b for the whole batch: a taller a
        rows *= dims.pop()[0]
    else:
        row_stride = a_stride[-2]
    sizes, a_batch, b_batch = zip(*dims, strict=True) if dims else ((), (), ())
    return shape, sizes, (rows, cols, inner), (*a_batch, row_stride, a_stride[-1]), (*b_batch, *b_stride[-2:])


def _expanded(batch, shape, stride):
    """Strides of an operand's batch dimensions: 0 where it is repeated."""
    missing = len(batch) - (len(shape) - 2)
    kept = zip(shape[:-2], stride[:-2], strict=True)
    return (0,) * missing + tuple(0 if size == 1 else step for size, step in kept)


def _merged(batch, a_stride, b_stride):
    """Batch dimensions (size, stride in a, stride in b) with neighbours joined where both operands allow it."""
    merged = []
    for size, a_step, b_step in zip(batch, a_stride, b_stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * a_step, size * b_step):
            size *= merged.pop()[0]
        merged.append((size, a_step, b_step))
    return merged


def kernel_fn(a, b):
    """a [..., M, K] @ b [..., K, N] -> [..., M, N], batch dimensions broadcast, as torch.matmul.

    Raises: TypeError for operands that are not of one dtype (fp16, bf16, fp32), ValueError for sizes that do not match.
    """
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise TypeError(f"matmul takes two fp16, two bf16 or two fp32 tensors, got {a.dtype} and {b.dtype}")
    aligned = a.data_ptr() % 16 == 0, b.data_ptr() % 16 == 0
    plan = _plan(a.shape, a.stride(), aligned[0], b.shape, b.stride(), aligned[1], a.dtype, a.device)
    if plan.empty:
        return torch.zeros(plan.shape, dtype=a.dtype, device=a.device)
    if plan.copies:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return kernel_fn(*(t.expand(*batch, *t.shape[-2:]).contiguous() for t in (a, b)))
    out = torch.empty(plan.shape, dtype=a.dtype, device=a.device)
    pieces = torch.empty(plan.pieces, dtype=torch.float32, device=a.device) if plan.pieces else None
    _library().matmul(a, b, out, pieces, plan.address)
    return out
