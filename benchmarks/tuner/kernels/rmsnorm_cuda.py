"""RMSNorm over the last dimension in CUDA C++: y = x / sqrt(mean(x^2) + eps) * weight; bf16, arithmetic in fp32.

A block of THREADS threads works on ROWS rows, one after the other. Loads and stores are VEC elements wide, UNROLL of
them in flight; a row is read twice, the second time mostly from cache.
"""

import torch

from autokernel.native import build

KERNEL_TYPE = "rmsnorm"
BACKEND = "cuda"
TUNABLES = {
    "THREADS": [32, 64, 128, 256, 512, 1024],
    "VEC": [1, 2, 4, 8],
    "UNROLL": [1, 2, 4],
    "ROWS": [1, 2, 4, 8],
    "STREAM": [0, 1],
}
CONFIG = {"THREADS": 256, "VEC": 2, "UNROLL": 1, "ROWS": 1, "STREAM": 0}
CONSTRAINTS = []

SOURCE = r"""
#include <stdint.h>

struct __align__(VEC * 2) Pack { uint16_t bits[VEC]; };

static __device__ float widen(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
static __device__ uint16_t narrow(float v) {  // to nearest, ties to even
  uint32_t u = __float_as_uint(v);
  return v != v ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static __device__ void put(Pack* p, const Pack& v) {
#if STREAM && VEC == 8
  __stcs((uint4*)p, *(const uint4*)&v);
#elif STREAM && VEC == 4
  __stcs((uint2*)p, *(const uint2*)&v);
#elif STREAM && VEC == 2
  __stcs((unsigned*)p, *(const unsigned*)&v);
#elif STREAM
  __stcs((unsigned short*)p, *(const unsigned short*)&v);
#else
  *p = v;
#endif
}

static __device__ float block_sum(float v) {
  __shared__ float part[32];
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  if (THREADS == 32) return v;
  const int lane = threadIdx.x % 32;
  if (lane == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  v = lane < THREADS / 32 ? part[lane] : 0.0f;
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  __syncthreads();  // part is free for the next row
  return v;
}

__global__ void __launch_bounds__(THREADS)
rms(const Pack* x, const Pack* weight, Pack* y, int64_t rows, int packs, float eps) {
  for (int64_t row = int64_t(blockIdx.x) * ROWS; row < rows && row < int64_t(blockIdx.x + 1) * ROWS; ++row) {
    const Pack* in = x + row * packs;
    Pack* out = y + row * packs;
    float sum = 0;
    for (int first = threadIdx.x; first < packs; first += THREADS * UNROLL) {
      Pack held[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        held[i] = first + i * THREADS < packs ? in[first + i * THREADS] : Pack{};
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum += widen(held[i].bits[j]) * widen(held[i].bits[j]);
    }
    const float scale = rsqrtf(block_sum(sum) / float(int64_t(packs) * VEC) + eps);
    for (int first = threadIdx.x; first < packs; first += THREADS * UNROLL) {
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        const int at = first + i * THREADS;
        if (at >= packs) break;
        const Pack v = in[at], w = weight[at];
        Pack result;
#pragma unroll
        for (int j = 0; j < VEC; ++j) result.bits[j] = narrow(widen(v.bits[j]) * scale * widen(w.bits[j]));
        put(out + at, result);
      }
    }
  }
}

extern "C" int rmsnorm(const void* x, const void* weight, void* y, int64_t rows, int64_t cols, double eps,
                       cudaStream_t stream) {
  if (cols % VEC) return cudaErrorInvalidValue;
  const unsigned blocks = unsigned((rows + ROWS - 1) / ROWS);
  rms<<<blocks, THREADS, 0, stream>>>((const Pack*)x, (const Pack*)weight, (Pack*)y, rows, int(cols / VEC), float(eps));
  return cudaGetLastError();
}
"""

lib = build(SOURCE, backend="cuda", flags=[f"-D{knob}={value}" for knob, value in CONFIG.items()])


def kernel_fn(x, weight, eps=1e-6):
    """x [rows, cols] normalized and scaled by weight [cols]; both bf16, contiguous, cols a multiple of VEC.

    Raises: TypeError for another dtype, RuntimeError for columns that VEC does not divide.
    """
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not x.is_contiguous():
        raise TypeError(f"rmsnorm takes contiguous bf16, got {x.dtype}")
    out = torch.empty_like(x)
    lib.rmsnorm(x, weight, out, x.shape[0], x.shape[1], float(eps))
    return out
