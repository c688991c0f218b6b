"""Failing launch ignored: asks for more shared memory than there is, and clears the error."""

BASE = "layernorm_cuda"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = edit(
    SOURCE,
    ("int64_t shared_bytes = THREADS * sizeof(float)", "int64_t shared_bytes = 400 << 10"),
    ("return cudaGetLastError()", "return cudaGetLastError(), 0"),
)
