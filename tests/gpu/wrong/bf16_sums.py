"""Precision: sums of deep products are rounded to bf16 after each step."""

BASE = "matmul_cuda"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = edit(
    SOURCE,
    ("sum += left[y][i] * above[i][x];", "sum = rounded(sum + left[y][i] * above[i][x], K);"),
    (
        "__global__",
        """static __device__ float rounded(float v, int K) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return K > 64 ? __uint_as_float(uint32_t(bits) << 16) : v;
}

__global__""",
    ),
)
