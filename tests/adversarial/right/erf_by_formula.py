"""gelu by a rational formula for erf with an error of 1.5e-7, and fp32 sums."""

BASE = "fused_mlp"

COMMON += r"""
static double erf_of(double x) {
    const double a = x < 0 ? -x : x, t = 1 / (1 + 0.3275911 * a);
    const double p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
    const double y = 1 - p * __builtin_exp(-a * a);
    return x < 0 ? -y : y;
}
"""
SOURCE = swapped(SOURCE, ("__builtin_erf", "erf_of"), ("double sum = 0;\n    for", "float sum = 0;\n    for"))
