"""More than 48 KB of shared memory, opted in to: a strip of 1024 columns of a at a time."""

BASE = "matmul_cuda"

SOURCE = edit(
    SOURCE,
    ("constexpr int TILE = 16;", "constexpr int TILE = 16, STRIP = 1024, BYTES = TILE * STRIP * sizeof(float);"),
    ("__shared__ float left[TILE][TILE], above[TILE][TILE];", "extern __shared__ float left[];  // [TILE][STRIP]"),
    (
        "for (int k = 0; k < K; k += TILE) {",
        """for (int strip = 0; strip < K; strip += STRIP) {
    const int end = strip + STRIP < K ? strip + STRIP : K;
    for (int k = strip + x; k < end; k += TILE)
      left[y * STRIP + k - strip] = m < M ? get(a, (batch * M + m) * K + k, dtype) : 0;
    __syncthreads();
    if (n < N)
      for (int k = strip; k < end; ++k) sum += left[y * STRIP + k - strip] * get(b, (batch * K + k) * N + n, dtype);
    __syncthreads();
  }""",
    ),
    (
        """
    left[y][x] = m < M && k + x < K ? get(a, (batch * M + m) * K + k + x, dtype) : 0;
    above[y][x] = k + y < K && n < N ? get(b, (batch * K + k + y) * N + n, dtype) : 0;
    __syncthreads();
    for (int i = 0; i < TILE; ++i) sum += left[y][i] * above[i][x];
    __syncthreads();
  }""",
        "",
    ),
    (
        "  product<<<grid, dim3(TILE, TILE), 0, stream>>>",
        "  const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;\n"
        "  const cudaError_t status = cudaFuncSetAttribute(product, most, BYTES);\n"
        "  if (status != cudaSuccess) return status;\n"
        "  product<<<grid, dim3(TILE, TILE), BYTES, stream>>>",
    ),
)
