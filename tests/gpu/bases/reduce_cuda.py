"""A plain, right reduction in CUDA C++: one block for each result. Fragments are appended to it."""

import math

KERNEL_TYPE = "reduce"
BACKEND = "cuda"

SOURCE = r"""
constexpr int THREADS = 256;

// kind: 0 sum, 1 mean, 2 max
static __device__ float join(float a, float b, int kind) {
  if (kind != 2) return a + b;
  return a != a || a > b ? a : b;
}

__global__ void reduce_row(const void* x, void* y, int64_t cols, int kind, int dtype) {
  extern __shared__ float shared[];
  const int64_t base = int64_t(blockIdx.x) * cols;
  float v = kind == 2 ? -__builtin_huge_valf() : 0;
  for (int64_t i = threadIdx.x; i < cols; i += THREADS) v = join(v, get(x, base + i, dtype), kind);
  shared[threadIdx.x] = v;
  __syncthreads();
  for (int step = THREADS / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) shared[threadIdx.x] = join(shared[threadIdx.x], shared[threadIdx.x + step], kind);
    __syncthreads();
  }
  if (threadIdx.x == 0) put(y, blockIdx.x, kind == 1 ? shared[0] / cols : shared[0], dtype);
}

extern "C" int reduce(const void* x, void* y, int64_t rows, int64_t cols, int64_t kind, int64_t dtype,
                      cudaStream_t stream) {
  reduce_row<<<unsigned(rows), THREADS, THREADS * sizeof(float), stream>>>(x, y, cols, int(kind), int(dtype));
  return cudaGetLastError();
}
"""
KINDS = {"sum": 0, "mean": 1, "max": 2}


def as_rows(x, dim):
    """x as contiguous rows to be reduced, with the shape of the result, and the lengths of both."""
    dims = range(x.dim()) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    gone = {d % x.dim() for d in dims}
    kept = [d for d in range(x.dim()) if d not in gone]
    shape = [x.shape[d] for d in kept]
    return x.permute(*kept, *sorted(gone)).contiguous(), shape, math.prod(shape), math.prod(x.shape[d] for d in gone)


def right(x, dim=-1, op="sum"):
    x, shape, rows, cols = as_rows(x, dim)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if rows:
        library(SOURCE).reduce(x, out, rows, cols, KINDS[op], DTYPES[x.dtype])
    return out


def kernel_fn(x, dim=-1, op="sum"):
    return right(x, dim, op)
