"""Dies on the device: an assertion fails there."""

BASE = "reduce_cuda"
CAUGHT_BY, VERDICT = "smoke", "CRASH"

SOURCE = edit(
    SOURCE, ("if (threadIdx.x == 0) put(y", 'if (cols > 1) asm volatile("trap;");\n  if (threadIdx.x == 0) put(y')
)
