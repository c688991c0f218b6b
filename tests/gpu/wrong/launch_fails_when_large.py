"""Failing launch returns stale memory: blocks of 2048 threads for all but small products, error cleared."""

BASE = "matmul_cuda"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = edit(
    SOURCE,
    ("dim3(TILE, TILE), 0, stream", "dim3(TILE, TILE * (M > 100 ? 8 : 1)), 0, stream"),
    ("return cudaGetLastError()", "return cudaGetLastError(), 0"),
)
