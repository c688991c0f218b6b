"""The hardware's rough reciprocal root and two steps of Newton, in fp32."""

BASE = "rmsnorm"

COMMON += r"""
#include <immintrin.h>
static float inverse_root(float x) {
    float y = _mm_cvtss_f32(_mm_rsqrt_ss(_mm_set_ss(x)));
    for (int i = 0; i < 2; ++i) y = y * (1.5f - 0.5f * x * y * y);
    return y;
}
"""
SOURCE = swapped(
    SOURCE, ("double scale = 1 / __builtin_sqrt(sum / cols + eps)", "float scale = inverse_root(sum / cols + eps)")
)
