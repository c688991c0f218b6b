"""Race: no barrier between the reading of one sum and the writing of the next in the same shared memory."""

BASE = "layernorm_cuda"
CAUGHT_BY, VERDICT = "sanitizer", "FAIL"

SOURCE = edit(SOURCE, ("__syncthreads();  // before the next sum", ""))
