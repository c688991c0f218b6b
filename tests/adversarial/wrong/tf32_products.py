"""Precision downgrade: ten bits of mantissa in each factor, as TF32 has."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

COMMON += r"""
static float cut(float v) {
    unsigned b;
    __builtin_memcpy(&b, &v, 4);
    b &= ~0x1fffu;
    __builtin_memcpy(&v, &b, 4);
    return v;
}
"""
SOURCE = swapped(
    SOURCE, ("double(get(a[i * k + l])) * get(b[l * n + j])", "double(cut(get(a[i * k + l]))) * cut(get(b[l * n + j]))")
)
