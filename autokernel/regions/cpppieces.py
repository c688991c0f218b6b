"""C++ that Inductor's scalar kernels expect from PyTorch's headers, written for g++ to make vectors of.

The functions are branch-free, so that a loop which calls them is vectorized, within about two units in the last place
and with NaN and infinities where they belong. The coefficients are Cephes's and minimax fits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`text` defines `names`, and needs `headers`."""

    names: tuple[str, ...]
    text: str
    headers: tuple[str, ...] = ()


PIECES: tuple[Piece, ...] = (
    Piece(
        names=("bf16",),
        headers=("cstring",),
        text=r"""
struct bf16 {
  uint16_t bits;
  bf16() = default;
  bf16(float f) {  // round to nearest, ties to even
    uint32_t u;
    std::memcpy(&u, &f, 4);
    bits = f != f ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
};
""",
    ),
    Piece(
        names=("convert",),
        text=r"""
template <class To, class From>
static inline To convert(From v) { return static_cast<To>(v); }
""",
    ),
    Piece(
        names=("CHECK",),
        headers=("cstdio", "cstdlib"),
        text=r"""
#define CHECK(condition) \
  if (!(condition)) { std::fputs("index out of bounds: " #condition "\n", stderr); std::abort(); }
""",
    ),
    Piece(
        names=("max_propagate_nan", "min_propagate_nan"),
        text=r"""
template <class T>
static inline T max_propagate_nan(T a, T b) { return a > b || a != a ? a : b; }
template <class T>
static inline T min_propagate_nan(T a, T b) { return a < b || a != a ? a : b; }
""",
    ),
    Piece(
        names=("CascadeSumHelper", "cascade_sum_combine", "cascade_sum_final"),
        text=r"""
template <class T, int64_t CHUNK>
struct CascadeSumHelper {  // long sums: in double, as a cascade of floats would not be vectorized
  double sum = 0;
  explicit CascadeSumHelper(int64_t) {}
};
template <class T, int64_t CHUNK>
static inline T cascade_sum_combine(T v, CascadeSumHelper<T, CHUNK>* h) { h->sum += v; return T(h->sum); }
template <class T, int64_t CHUNK>
static inline T cascade_sum_final(CascadeSumHelper<T, CHUNK>* h) { return T(h->sum); }
""",
    ),
    Piece(
        names=("Welford", "WelfordHelper", "welford_combine"),
        text=r"""
template <class T>
struct Welford {  // mean and sum of squared deviations, from sums in double
  double count = 0, sum = 0, squares = 0;
  T mean() const { return T(sum / count); }
  T m2() const { double rest = squares - sum * sum / count; return T(rest < 0 ? 0 : rest); }
  T weight() const { return T(count); }
};
template <class T, int64_t CHUNK>
struct WelfordHelper { explicit WelfordHelper(int64_t) {} };
template <class T>
static inline Welford<T> welford_combine(Welford<T> a, T v) {
  return {a.count + 1, a.sum + double(v), a.squares + double(v) * double(v)};
}
template <class T>
static inline Welford<T> welford_combine(Welford<T> a, Welford<T> b) {
  return {a.count + b.count, a.sum + b.sum, a.squares + b.squares};
}
template <class T, int64_t CHUNK>
static inline Welford<T> welford_combine(Welford<T> a, T v, WelfordHelper<T, CHUNK>*) { return welford_combine(a, v); }
template <class T, int64_t CHUNK>
static inline Welford<T> welford_combine(Welford<T> a, WelfordHelper<T, CHUNK>*) { return a; }
""",
    ),
    Piece(
        names=("mod", "remainder_integral", "div_floor_integer", "floor_divide_integral"),
        headers=("type_traits",),
        text=r"""
template <class A, class B>
static inline auto mod(A a, B b) {
  if constexpr (std::is_floating_point_v<A>) return std::fmod(a, b);
  else return b == 0 ? A(0) : A(a % b);
}
template <class A, class B>
static inline A div_floor_integer(A a, B b) {
  if (b == 0) return 0;
  A quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
template <class A, class B>
static inline A floor_divide_integral(A a, B b) { return div_floor_integer(a, b); }
template <class A, class B>
static inline A remainder_integral(A a, B b) { return a - div_floor_integer(a, b) * b; }
""",
    ),
    Piece(
        names=("fast_log", "fast_log1p"),
        headers=("cstring",),
        text=r"""
static inline float fast_log(float x) {
  float scaled = x < 1.17549435e-38f ? x * 8388608.0f : x;  // 2^23, for what is no normal number
  uint32_t u;
  std::memcpy(&u, &scaled, 4);
  uint32_t shifted = u - 0x3f3504f3u;  // the mantissa then lies between sqrt(1/2) and sqrt(2)
  float e = float(int32_t(shifted) >> 23) - (x < 1.17549435e-38f ? 23.0f : 0.0f);
  u = (shifted & 0x007fffffu) + 0x3f3504f3u;
  float m;
  std::memcpy(&m, &u, 4);
  m -= 1.0f;
  float s = m * m, p = 7.0376836292e-2f;
  p = __builtin_fmaf(p, m, -1.1514610310e-1f);
  p = __builtin_fmaf(p, m, 1.1676998740e-1f);
  p = __builtin_fmaf(p, m, -1.2420140846e-1f);
  p = __builtin_fmaf(p, m, 1.4249322787e-1f);
  p = __builtin_fmaf(p, m, -1.6668057665e-1f);
  p = __builtin_fmaf(p, m, 2.0000714765e-1f);
  p = __builtin_fmaf(p, m, -2.4999993993e-1f);
  p = __builtin_fmaf(p, m, 3.3333331174e-1f);
  float y = __builtin_fmaf(p * s, m, __builtin_fmaf(e, -2.12194440e-4f, -0.5f * s));
  y = __builtin_fmaf(e, 0.693359375f, m + y);
  y = x == std::numeric_limits<float>::infinity() ? x : y;
  y = x == 0.0f ? -std::numeric_limits<float>::infinity() : y;
  return x < 0.0f || x != x ? std::numeric_limits<float>::quiet_NaN() : y;
}
static inline double fast_log(double x) { return std::log(x); }
static inline float fast_log1p(float x) {
  float t = x / (2.0f + x), s = t * t;  // log1p(x) = 2 atanh(t)
  float p = __builtin_fmaf(1.0f / 11, s, 1.0f / 9);
  p = __builtin_fmaf(p, s, 1.0f / 7);
  p = __builtin_fmaf(p, s, 1.0f / 5);
  p = __builtin_fmaf(p, s, 1.0f / 3);
  float small = __builtin_fmaf(2.0f * t * s, p, 2.0f * t), large = fast_log(1.0f + x);
  return std::fabs(x) < 0.375f ? small : large;
}
static inline double fast_log1p(double x) { return std::log1p(x); }
""",
    ),
    Piece(
        names=("fast_exp", "fast_tanh", "fast_erf"),
        headers=("cstring",),
        text=r"""
static inline float fast_exp(float x) {
  float c = x < -104.0f ? -104.0f : x;
  c = c > 89.0f ? 89.0f : c;
  float n = __builtin_rintf(c * 1.44269504f);
  float r = __builtin_fmaf(n, -0.693145752f, c);  // ln 2 in two parts
  r = __builtin_fmaf(n, -1.42860677e-6f, r);
  float p = 1.98756915e-4f;
  p = __builtin_fmaf(p, r, 1.39819995e-3f);
  p = __builtin_fmaf(p, r, 8.33345205e-3f);
  p = __builtin_fmaf(p, r, 4.16657962e-2f);
  p = __builtin_fmaf(p, r, 1.66666657e-1f);
  p = __builtin_fmaf(p, r, 5.00000000e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  int32_t i = int32_t(n), half = i >> 1;  // 2^n in two factors: one alone may be no normal number
  uint32_t u = uint32_t(half + 127) << 23, v = uint32_t(i - half + 127) << 23;
  float a, b;
  std::memcpy(&a, &u, 4);
  std::memcpy(&b, &v, 4);
  float y = p * a * b;
  return x != x ? x : y;
}
static inline double fast_exp(double x) { return std::exp(x); }
""",
    ),
    Piece(
        names=("fast_tanh",),
        text=r"""
static inline float fast_tanh(float x) {
  float t = std::fabs(x), s = x * x;
  float large = 1.0f - 2.0f / (fast_exp(2.0f * t) + 1.0f);
  float p = -5.70498872e-3f;
  p = __builtin_fmaf(p, s, 2.06390888e-2f);
  p = __builtin_fmaf(p, s, -5.37397155e-2f);
  p = __builtin_fmaf(p, s, 1.33314422e-1f);
  p = __builtin_fmaf(p, s, -3.33332819e-1f);
  float small = __builtin_fmaf(p * s, t, t);
  return __builtin_copysignf(t < 0.625f ? small : large, x);
}
static inline double fast_tanh(double x) { return std::tanh(x); }
""",
    ),
    Piece(
        names=("fast_erf",),
        text=r"""
static inline float fast_erf(float x) {
  float t = std::fabs(x), s = x * x;
  float r = __builtin_fmaf(-1.72853470e-5f, t, 3.83197126e-4f);
  float u = __builtin_fmaf(-3.88396438e-3f, t, 2.42546219e-2f);
  r = __builtin_fmaf(r, s, u);
  r = __builtin_fmaf(r, t, -1.06777877e-1f);
  r = __builtin_fmaf(r, t, -6.34846687e-1f);
  r = __builtin_fmaf(r, t, -1.28717512e-1f);
  r = __builtin_fmaf(r, t, -t);
  float large = 1.0f - fast_exp(t > 4.0f ? -20.0f : r);
  float p = -5.96761703e-4f;
  p = __builtin_fmaf(p, s, 4.99119423e-3f);
  p = __builtin_fmaf(p, s, -2.67681349e-2f);
  p = __builtin_fmaf(p, s, 1.12819925e-1f);
  p = __builtin_fmaf(p, s, -3.76125336e-1f);
  p = __builtin_fmaf(p, s, 1.28379166e-1f);
  float small = __builtin_fmaf(p, t, t);
  float y = __builtin_copysignf(t > 0.927734375f ? large : small, x);
  return x != x ? x : y;
}
static inline double fast_erf(double x) { return std::erf(x); }
""",
    ),
)
"""In an order in which each may use those before it."""
