"""Welford: each thread keeps a running mean and sum of squares; threads are merged in pairs."""

BASE = "layernorm_cuda"

SOURCE = r"""
constexpr int THREADS = 128;

struct Moments { float count, mean, squares; };

static __device__ Moments merge(Moments a, Moments b) {
  const float count = a.count + b.count;
  if (count == 0) return a;
  const float apart = b.mean - a.mean;
  const float share = b.count / count;
  return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
}

__global__ void norm(const void* x, const void* w, const void* b, void* y, int64_t cols, float eps, int dtype) {
  __shared__ Moments shared[THREADS];
  const int64_t base = int64_t(blockIdx.x) * cols;
  Moments m = {0, 0, 0};
  for (int64_t i = threadIdx.x; i < cols; i += THREADS) {
    const float v = get(x, base + i, dtype), apart = v - m.mean;
    m.count += 1;
    m.mean += apart / m.count;
    m.squares += apart * (v - m.mean);
  }
  shared[threadIdx.x] = m;
  for (int step = THREADS / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) shared[threadIdx.x] = merge(shared[threadIdx.x], shared[threadIdx.x + step]);
  }
  __syncthreads();
  m = shared[0];
  const float scale = 1 / sqrtf(m.squares / cols + eps);
  for (int64_t i = threadIdx.x; i < cols; i += THREADS)
    put(y, base + i, (get(x, base + i, dtype) - m.mean) * scale * get(w, i, dtype) + get(b, i, dtype), dtype);
}

extern "C" int layernorm(const void* x, const void* w, const void* b, void* y, int64_t rows, int64_t cols, double eps,
                         int64_t dtype, cudaStream_t stream) {
  norm<<<unsigned(rows), THREADS, 0, stream>>>(x, w, b, y, cols, float(eps), int(dtype));
  return cudaGetLastError();
}
"""
