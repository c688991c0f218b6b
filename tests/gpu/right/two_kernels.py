"""Two kernels: blocks leave partial results in a work buffer, and one more block for each row joins them in order."""

BASE = "reduce_cuda"

PARTS = r"""__global__ void reduce_part(const void* x, float* parts, int64_t cols, int kind, int dtype) {
  __shared__ float shared[THREADS];
  const int64_t length = (cols + gridDim.y - 1) / gridDim.y, start = blockIdx.y * length;
  const int64_t end = start + length < cols ? start + length : cols;
  float v = kind == 2 ? -__builtin_huge_valf() : 0;
  for (int64_t i = start + threadIdx.x; i < end; i += THREADS) v = join(v, get(x, blockIdx.x * cols + i, dtype), kind);
  shared[threadIdx.x] = v;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < THREADS; ++i) v = join(v, shared[i], kind);
  parts[int64_t(blockIdx.x) * gridDim.y + blockIdx.y] = v;
}

__global__ void join_parts(const float* parts, void* y, int64_t cols, int count, int kind, int dtype) {
  float v = parts[int64_t(blockIdx.x) * count];
  for (int i = 1; i < count; ++i) v = join(v, parts[int64_t(blockIdx.x) * count + i], kind);
  put(y, blockIdx.x, kind == 1 ? v / cols : v, dtype);
}

extern "C" int reduce_by_parts(const void* x, float* parts, void* y, int64_t rows, int64_t cols, int64_t count,
                               int64_t kind, int64_t dtype, cudaStream_t stream) {
  reduce_part<<<dim3(unsigned(rows), unsigned(count)), THREADS, 0, stream>>>(x, parts, cols, int(kind), int(dtype));
  join_parts<<<unsigned(rows), 1, 0, stream>>>(parts, y, cols, int(count), int(kind), int(dtype));
  return cudaGetLastError();
}

extern "C" int reduce("""

SOURCE = edit(SOURCE, ('extern "C" int reduce(', PARTS))


def kernel_fn(x, dim=-1, op="sum"):
    x, shape, rows, cols = as_rows(x, dim)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if rows:
        parts = torch.empty(rows * 8, dtype=torch.float32, device=x.device)
        library(SOURCE).reduce_by_parts(x, parts, out, rows, cols, 8, KINDS[op], DTYPES[x.dtype])
    return out
