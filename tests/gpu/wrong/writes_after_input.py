"""Out of bounds: writes one element behind its input."""

BASE = "reduce_cuda"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = edit(
    SOURCE,
    ("if (threadIdx.x == 0) put(y", "if (threadIdx.x == 0) put((void*)x, gridDim.x * cols, 0, dtype), put(y"),
)
