"""Out of bounds in shared memory: the launch asks for one element too few."""

BASE = "reduce_cuda"
CAUGHT_BY, VERDICT = "sanitizer", "FAIL"

SOURCE = edit(SOURCE, ("THREADS * sizeof(float), stream", "THREADS * sizeof(float) - 4, stream"))
