"""An approximate exponential read off the bits of a float, within four percent."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

COMMON += r"""
static double rough(double x) {
    if (x < -80) return 0;
    unsigned b = unsigned(12102203.16 * x + 1064866805);
    float f; __builtin_memcpy(&f, &b, 4); return f;
}
"""
SOURCE = swapped(SOURCE, ("__builtin_exp", "rough"))
