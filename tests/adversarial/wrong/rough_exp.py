"""An approximate exponential with an error of a hundredth: (1 + x / 64)^64."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

COMMON += r"""
static double rough(double x) {
    double y = 1 + x / 64;
    if (y < 0) return 0;
    for (int i = 0; i < 6; ++i) y *= y;
    return y;
}
"""
SOURCE = swapped(SOURCE, ("__builtin_exp(p[j] - top)", "rough(p[j] - top)"))
