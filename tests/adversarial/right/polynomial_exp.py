"""An exponential of its own: 2^n times a polynomial, in fp32, to a few units in the last place."""

BASE = "softmax"

COMMON += r"""
static float exp_of(float x) {
    if (x < -87.0f) return 0;
    const float n = __builtin_rintf(x * 1.44269504f);
    const float f = x - n * 0.693145752f - n * 1.42860677e-6f;
    float y = 1.0f / 5040;
    const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    for (float c : coefficients) y = y * f + c;
    const unsigned bits = unsigned(int(n) + 127) << 23;
    float power;
    __builtin_memcpy(&power, &bits, 4);
    return y * power;
}
"""
SOURCE = swapped(SOURCE, ("__builtin_exp", "exp_of"))
