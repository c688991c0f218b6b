"""Gated MLP on the CPU: out = (act(x w_gate^T) * (x w_up^T)) w_down^T, fp32 or bf16.

x [..., in], w_gate and w_up [hidden, in], w_down [out, hidden]; act is silu, gelu (erf), gelu_tanh or relu. Rows of x
lie in the vector lanes, packed once; weights are read where they are, as single broadcast elements. The hidden values
of MC rows at a time are kept in fp32, in the layout that the second product reads. Sums are fp32 in a fixed order,
rounded once. A few rows (decoding) take dot products along the weights' rows instead.
"""

import functools

import torch

from autokernel.native import build

KERNEL_TYPE = "fused_mlp"
BACKEND = "cpp"
TUNABLES = {
    "MC": [64, 128, 256, 512, 1024],  # rows of x whose hidden values are kept at a time
    "R": [1, 2, 3, 4, 6],  # hidden values of one register tile, for gate and for up each
    "R_DOWN": [2, 4, 6, 8],  # outputs of one register tile
    "QV": [1, 2, 3, 4],  # vectors of rows of one register tile
    "GROUP": [8, 16, 32, 64],  # hidden values or outputs of one task
    "SKINNY": [0, 1, 4, 8, 16],  # up to so many rows of x take the dot products
    "UNROLL": [1, 2, 4],
    "BF16_DOT": [0, 1],  # 1: multiply x and gate/up weights as pairs of bf16 where the CPU can
    "SCHEDULE": ["static", "dynamic"],
    "OPT": ["-O2", "-O3"],
}
CONFIG = {
    "MC": 512,
    "R": 3,
    "R_DOWN": 6,
    "QV": 4,
    "GROUP": 16,
    "SKINNY": 8,
    "UNROLL": 1,
    "BF16_DOT": 1,
    "SCHEDULE": "static",
    "OPT": "-O3",
}

SOURCE = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <omp.h>

#ifdef __AVX512F__
#define VB 64
#else
#define VB 32
#endif
#define VL (VB / 4)
#define TL (QV * VL)  // lanes of one panel
#if BF16_DOT && defined(__AVX512BF16__)
#define PAIRS 1
#else
#define PAIRS 0
#endif
#define STR_(x) #x
#define STR(x) STR_(x)
#define UNROLL_K _Pragma(STR(GCC unroll UNROLL))
#define EACH _Pragma("GCC unroll 16")  // early enough that the array it walks becomes registers

typedef int64_t i64;
typedef float vf __attribute__((vector_size(VB)));
typedef float vfu __attribute__((vector_size(VB), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VB)));
typedef uint32_t vu __attribute__((vector_size(VB)));
typedef uint16_t vhu __attribute__((vector_size(VB / 2), aligned(2), may_alias));
typedef float f32u __attribute__((aligned(2), may_alias));

const int SILU = 0, GELU = 1, GELU_TANH = 2;  // anything else is relu

static inline i64 least(i64 x, i64 y) { return x < y ? x : y; }
static inline i64 ceil_div(i64 x, i64 y) { return (x + y - 1) / y; }
static inline i64 up16(i64 x) { return ceil_div(x, 16) * 16; }
static inline float widen(float x) { return x; }
static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline vf load(const float* p) { return *(const vfu*)p; }
static inline vf load(const uint16_t* p) { return (vf)(__builtin_convertvector(*(const vhu*)p, vu) << 16); }
static inline void store(float* p, float x) { *p = x; }
static inline void store(uint16_t* p, float x) {  // round to nearest even; a NaN stays a NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x to about 2e-7 of relative error; infinite above 2^128, zero below the normal numbers. A NaN stays a NaN.
static inline vf exp_of(vf x) {
    vf clamped = x < -87.0f ? vf{} - 87.0f : (x > 88.0f ? vf{} + 88.0f : x);
    vf whole = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    vf f = (clamped - whole * 0.693145752f) - whole * 1.42860677e-6f;  // ln(2) in two parts
    vf y = f * 1.98412698e-4f + 1.38888889e-3f;  // Taylor, 1 / n!
    y = y * f + 8.33333333e-3f;
    y = y * f + 4.16666667e-2f;
    y = y * f + 1.66666667e-1f;
    y = y * f + 0.5f;
    y = y * f + 1.0f;
    y = y * f + 1.0f;
    y = y * (vf)((__builtin_convertvector(whole, vi) + 127) << 23);
    return x < -87.0f ? vf{} : (x > 88.72284f ? vf{} + std::numeric_limits<float>::infinity() : y);
}

// erfc(z) / exp(-z^2) = t p(t) for z >= 0 with t = 1 / (1 + z / 2); p fitted by least squares, relative error 2e-7.
static inline vf gelu(vf x) {
    vf z = (x < 0.0f ? -x : x) * 0.707106781f;
    vf t = 1.0f / (1.0f + 0.5f * z);
    vf p = vf{} - 5.950632409e-02f;
    p = p * t + 2.866878002e-01f;
    p = p * t - 4.915220812e-01f;
    p = p * t + 2.829395841e-01f;
    p = p * t - 2.992291487e-02f;
    p = p * t + 2.040525029e-01f;
    p = p * t + 2.427672107e-01f;
    p = p * t + 2.824202389e-01f;
    p = p * t + 2.820839389e-01f;
    vf erfc = p * t * exp_of(-z * z);
    return 0.5f * x * (x < 0.0f ? erfc : 2.0f - erfc);
}

static inline vf activate(vf x, int kind) {
    if (kind == SILU) return x / (1.0f + exp_of(-x));
    if (kind == GELU) return gelu(x);
    if (kind == GELU_TANH) return x / (1.0f + exp_of(-1.59576912f * (x + 0.044715f * x * x * x)));  // 2 sqrt(2 / pi)
    return x < 0.0f ? vf{} : x;
}

struct F32Step {
    static inline vf fma(vf acc, const f32u* w, vf lanes) { return acc + (vf{} + *w) * lanes; }
};
#if PAIRS
struct PairStep {  // two bf16 in 32 bits, read in place
    static inline vf fma(vf acc, const f32u* w, vf lanes) {
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(lanes), "m"(*w));
        return acc;
    }
};
#endif

template <class E> struct Rows {  // rows of a weight with contiguous elements, `ld` elements apart
    const E* p;
    i64 ld;
    Rows from(i64 row) const { return {p + row * ld, ld}; }
};

// sum[r][lane] = weight row r . lanes over `steps`; lanes [step][TL].
template <int ROWS, int V>
static __attribute__((noinline)) void dot_tile(const float* lanes, Rows<float> w, i64 steps, float* sum) {
    vf acc[ROWS][V] = {};
    UNROLL_K
    for (i64 k = 0; k < steps; k++) {
        vf lane[V];
        EACH for (int v = 0; v < V; v++) lane[v] = *(const vf*)(lanes + k * TL + v * VL);
        EACH for (int r = 0; r < ROWS; r++)
            EACH for (int v = 0; v < V; v++) acc[r][v] = F32Step::fma(acc[r][v], w.p + r * w.ld + k, lane[v]);
    }
    EACH for (int r = 0; r < ROWS; r++)
        EACH for (int v = 0; v < V; v++) *(vf*)(sum + r * TL + v * VL) = acc[r][v];
}

// hidden[r][lanes] = act(gate) * up. Out of line: one copy serves every tile shape, which halves the build time.
static __attribute__((noinline)) void combine(const vf* gate, const vf* up, int rows, int vectors, int kind,
                                              float* hidden) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            *(vf*)(hidden + r * TL + v * VL) = activate(gate[r * vectors + v], kind) * up[r * vectors + v];
}

// Both products of one hidden block share the loads of x.
template <class P, class E, int ROWS, int V>
static inline void hidden_tile(const float* x, Rows<E> gate, Rows<E> up, i64 steps, int kind, float* hidden) {
    vf g[ROWS][V] = {}, u[ROWS][V] = {};
    const i64 width = 4 / sizeof(E);
    UNROLL_K
    for (i64 k = 0; k < steps; k++) {
        vf lane[V];
        EACH for (int v = 0; v < V; v++) lane[v] = *(const vf*)(x + k * TL + v * VL);
        EACH for (int r = 0; r < ROWS; r++)
            EACH for (int v = 0; v < V; v++) {
                g[r][v] = P::fma(g[r][v], (const f32u*)(gate.p + r * gate.ld + k * width), lane[v]);
                u[r][v] = P::fma(u[r][v], (const f32u*)(up.p + r * up.ld + k * width), lane[v]);
            }
    }
    vf gate_sum[ROWS * V], up_sum[ROWS * V];  // copies: passing g itself on would keep it in memory in the loop above
    EACH for (int r = 0; r < ROWS; r++)
        EACH for (int v = 0; v < V; v++) gate_sum[r * V + v] = g[r][v], up_sum[r * V + v] = u[r][v];
    combine(gate_sum, up_sum, ROWS, V, kind, hidden);
}

template <class S> struct Mlp {
    const S *x, *gate, *up, *down;
    S* out;
    i64 M, K, F, N;
    int kind;
    i64 size[4], sx[4], sxk, gate_r, gate_k, up_r, up_k, down_r, down_k;  // strides in elements
    const S* row(i64 m) const {
        const S* p = x;
        for (int d = 3; d >= 0; d--) p += m % size[d] * sx[d], m /= size[d];
        return p;
    }
    bool pairs() const { return PAIRS && sizeof(S) == 2 && gate_k == 1 && up_k == 1 && K % 2 == 0; }
};

// Rows first.. of a weight as fp32: in place where they are contiguous fp32, else widened into `buffer`.
template <class S>
static Rows<float> fp32_rows(const S* w, i64 s_row, i64 s_k, i64 first, i64 rows, i64 length, float* buffer) {
    w += first * s_row;
    if (sizeof(S) == 4 && s_k == 1) return {(const float*)w, s_row};
    for (i64 r = 0; r < rows; r++)
        if (s_k == 1)
            for (i64 k = 0; k < length; k++) buffer[r * length + k] = widen(w[r * s_row + k]);
        else
            for (i64 k = 0; k < length; k++) buffer[r * length + k] = widen(w[r * s_row + k * s_k]);
    return {buffer, length};
}

// x rows m0.. -> panel [step][TL], padded with zeros.
template <class S> static void pack_panel(const Mlp<S>& a, i64 m0, i64 rows, float* panel) {
    const i64 steps = a.pairs() ? a.K / 2 : a.K;
    if (rows < TL) memset(panel, 0, steps * TL * sizeof(float));
    for (i64 lane = 0; lane < rows; lane++) {
        const S* x = a.row(m0 + lane);
        if (a.pairs())
            for (i64 k = 0; k < steps; k++) {
                uint32_t bits = (uint32_t)x[2 * k * a.sxk] | (uint32_t)x[(2 * k + 1) * a.sxk] << 16;
                memcpy(panel + k * TL + lane, &bits, 4);
            }
        else
            for (i64 k = 0; k < steps; k++) panel[k * TL + lane] = widen(x[k * a.sxk]);
    }
}

template <class P, class E, int ROWS, int V>
static void hidden_panel(const float* x, Rows<E> gate, Rows<E> up, i64 steps, int kind, i64 vectors, float* hidden) {
    if constexpr (V > 1)
        if (vectors < V) return hidden_panel<P, E, ROWS, V - 1>(x, gate, up, steps, kind, vectors, hidden);
    hidden_tile<P, E, ROWS, V>(x, gate, up, steps, kind, hidden);
}
// Hidden values of `rows` weight rows for all panels: each register tile's weights serve every panel from L1.
template <class P, class E, int ROWS>
static void hidden_rows(const float* x, Rows<E> gate, Rows<E> up, i64 rows, i64 steps, i64 m, i64 F, int kind,
                        float* hidden) {
    i64 r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        for (i64 t = 0; t * TL < m; t++)
            hidden_panel<P, E, ROWS, QV>(x + t * TL * steps, gate.from(r), up.from(r), steps, kind,
                                         ceil_div(m - t * TL, VL), hidden + (t * F + r) * TL);
    if constexpr (ROWS > 1)
        if (r < rows)
            hidden_rows<P, E, ROWS / 2>(x, gate.from(r), up.from(r), rows - r, steps, m, F, kind, hidden + r * TL);
}

template <int ROWS, int V> static void out_panel(const float* hidden, Rows<float> w, i64 F, i64 lanes, float* sum) {
    if constexpr (V > 1)
        if (lanes <= (V - 1) * VL) return out_panel<ROWS, V - 1>(hidden, w, F, lanes, sum);
    dot_tile<ROWS, V>(hidden, w, F, sum);
}
template <class S, int ROWS>
static void out_rows(const Mlp<S>& a, const float* hidden, Rows<float> w, i64 rows, i64 m0, i64 m, i64 n) {
    i64 r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        for (i64 t = 0; t * TL < m; t++) {
            alignas(64) float sum[ROWS][TL];
            const i64 lanes = least(TL, m - t * TL);
            out_panel<ROWS, QV>(hidden + t * TL * a.F, w.from(r), a.F, lanes, sum[0]);
            S* out = a.out + (m0 + t * TL) * a.N + n + r;
            for (i64 lane = 0; lane < lanes; lane++)
                for (int i = 0; i < ROWS; i++) store(out + lane * a.N + i, sum[i][lane]);
        }
    if constexpr (ROWS > 1)
        if (r < rows) out_rows<S, ROWS / 2>(a, hidden, w.from(r), rows - r, m0, m, n + r);
}

template <class S>
static void hidden_group(const Mlp<S>& a, const float* x, i64 f, i64 rows, i64 m, float* hidden, float* buffer) {
#if PAIRS
    if (a.pairs()) {
        const Rows<uint16_t> gate = {(const uint16_t*)a.gate + f * a.gate_r, a.gate_r};
        const Rows<uint16_t> up = {(const uint16_t*)a.up + f * a.up_r, a.up_r};
        return hidden_rows<PairStep, uint16_t, R>(x, gate, up, rows, a.K / 2, m, a.F, a.kind, hidden + f * TL);
    }
#endif
    const Rows<float> gate = fp32_rows(a.gate, a.gate_r, a.gate_k, f, rows, a.K, buffer);
    const Rows<float> up = fp32_rows(a.up, a.up_r, a.up_k, f, rows, a.K, buffer + rows * a.K);
    hidden_rows<F32Step, float, R>(x, gate, up, rows, a.K, m, a.F, a.kind, hidden + f * TL);
}

// Kept between calls, one per calling thread: fresh pages for every call would cost more than packing itself.
struct Workspace {
    float* memory = nullptr;
    i64 floats = 0;
    float* get(i64 wanted) {
        if (memory == nullptr || wanted > floats) {
            free(memory);
            memory = (float*)aligned_alloc(64, up16(wanted + 1) * sizeof(float));
            floats = memory ? wanted : 0;
        }
        return memory;
    }
    ~Workspace() { free(memory); }
};
static thread_local Workspace workspace;

template <class S> static int many_rows(const Mlp<S>& a) {
    const int threads = omp_get_max_threads();
    const i64 panels = ceil_div(least(a.M, MC), TL), longest = a.F > 2 * a.K ? a.F : 2 * a.K;
    const i64 x_size = panels * TL * a.K, h_size = panels * TL * a.F, each = up16(GROUP * longest);
    float* x = workspace.get(x_size + h_size + each * threads);
    if (x == nullptr) return 1;
    float *hidden = x + x_size, *buffers = hidden + h_size;
    const i64 steps = a.pairs() ? a.K / 2 : a.K;
#pragma omp parallel num_threads(threads)
    {
        float* buffer = buffers + each * omp_get_thread_num();
        for (i64 m0 = 0; m0 < a.M; m0 += panels * TL) {
            const i64 m = least(panels * TL, a.M - m0);
#pragma omp for schedule(static)
            for (i64 t = 0; t < ceil_div(m, TL); t++)
                pack_panel(a, m0 + t * TL, least(TL, m - t * TL), x + t * TL * steps);
#pragma omp for schedule(SCHEDULE)
            for (i64 f = 0; f < a.F; f += GROUP)
                hidden_group(a, x, f, least(GROUP, a.F - f), m, hidden, buffer);
#pragma omp for schedule(SCHEDULE)
            for (i64 n = 0; n < a.N; n += GROUP) {
                const i64 rows = least(GROUP, a.N - n);
                const Rows<float> w = fp32_rows(a.down, a.down_r, a.down_k, n, rows, a.F, buffer);
                out_rows<S, R_DOWN>(a, hidden, w, rows, m0, m, n);
            }
        }
    }
    return 0;
}

// Four weight rows times ROWS rows of x, along the weights' memory. sum[r][c]
template <class E, int ROWS>
static inline void dots(const float* x, i64 ldx, Rows<E> w, i64 columns, i64 length, float sum[ROWS][4]) {
    vf acc[ROWS][4] = {};
    const E* row[4];
    for (int c = 0; c < 4; c++) row[c] = w.p + (c < columns ? c : 0) * w.ld;
    i64 k = 0;
    for (; k + VL <= length; k += VL)
        EACH for (int c = 0; c < 4; c++) {
            vf weight = load(row[c] + k);
            EACH for (int r = 0; r < ROWS; r++) acc[r][c] += load(x + r * ldx + k) * weight;
        }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 4; c++) {
            vf v = acc[r][c];
            for (int width = VL / 2; width > 0; width /= 2)
                for (int j = 0; j < width; j++) v[j] += v[j + width];
            float tail = v[0];
            for (i64 j = k; j < length; j++) tail += x[r * ldx + j] * widen(row[c][j]);
            sum[r][c] = tail;
        }
}

template <class E, int ROWS>
static void skinny_hidden(const float* x, Rows<E> gate, Rows<E> up, i64 columns, i64 K, int kind, float* h, i64 ldh) {
    float g[ROWS][4], u[ROWS][4];
    dots<E, ROWS>(x, K, gate, columns, K, g);
    dots<E, ROWS>(x, K, up, columns, K, u);
    for (int r = 0; r < ROWS; r++) {
        vf value = {};
        for (int c = 0; c < 4; c++) value[c] = g[r][c];
        value = activate(value, kind);
        for (i64 c = 0; c < columns; c++) h[r * ldh + c] = value[c] * u[r][c];
    }
}
template <class S, class E, int ROWS>
static void skinny_out(const float* h, Rows<E> w, i64 columns, i64 F, S* out, i64 ldo) {
    float sum[ROWS][4];
    dots<E, ROWS>(h, F, w, columns, F, sum);
    for (int r = 0; r < ROWS; r++)
        for (i64 c = 0; c < columns; c++) store(out + r * ldo + c, sum[r][c]);
}

template <class S, class E> static int few_rows(const Mlp<S>& a, bool in_place) {
    const int threads = omp_get_max_threads();
    const i64 longest = a.F > 2 * a.K ? a.F : 2 * a.K, x_size = up16(a.M * a.K), h_size = up16(a.M * a.F);
    const i64 each = in_place ? 0 : up16(4 * longest);
    float* x = workspace.get(x_size + h_size + each * threads);
    if (x == nullptr) return 1;
    float *hidden = x + x_size, *buffers = hidden + h_size;
#pragma omp parallel num_threads(threads)
    {
        float* buffer = buffers + each * omp_get_thread_num();
        auto rows_of = [&](const S* w, i64 s_row, i64 s_k, i64 first, i64 rows, i64 length, float* space) -> Rows<E> {
            if (in_place) return {(const E*)w + first * s_row, s_row};
            const Rows<float> found = fp32_rows(w, s_row, s_k, first, rows, length, space);
            return {(const E*)found.p, found.ld};
        };
#pragma omp for schedule(static)
        for (i64 m = 0; m < a.M; m++)
            for (i64 k = 0; k < a.K; k++) x[m * a.K + k] = widen(a.row(m)[k * a.sxk]);
#pragma omp for schedule(static)
        for (i64 f = 0; f < a.F; f += 4) {
            const i64 columns = least(4, a.F - f);
            const Rows<E> gate = rows_of(a.gate, a.gate_r, a.gate_k, f, columns, a.K, buffer);
            const Rows<E> up = rows_of(a.up, a.up_r, a.up_k, f, columns, a.K, buffer + 4 * a.K);
            i64 m = 0;
            for (; m + 4 <= a.M; m += 4)
                skinny_hidden<E, 4>(x + m * a.K, gate, up, columns, a.K, a.kind, hidden + m * a.F + f, a.F);
            for (; m < a.M; m++)
                skinny_hidden<E, 1>(x + m * a.K, gate, up, columns, a.K, a.kind, hidden + m * a.F + f, a.F);
        }
#pragma omp for schedule(static)
        for (i64 n = 0; n < a.N; n += 4) {
            const i64 columns = least(4, a.N - n);
            const Rows<E> w = rows_of(a.down, a.down_r, a.down_k, n, columns, a.F, buffer);
            i64 m = 0;
            for (; m + 4 <= a.M; m += 4)
                skinny_out<S, E, 4>(hidden + m * a.F, w, columns, a.F, a.out + m * a.N + n, a.N);
            for (; m < a.M; m++) skinny_out<S, E, 1>(hidden + m * a.F, w, columns, a.F, a.out + m * a.N + n, a.N);
        }
    }
    return 0;
}

template <class S> static int run(const Mlp<S>& a) {
    if (a.M > SKINNY) return many_rows(a);
    const bool in_place = a.gate_k == 1 && a.up_k == 1 && a.down_k == 1;
    return in_place ? few_rows<S, S>(a, true) : few_rows<S, float>(a, false);
}

// x's rows are the last of s0..s3 fastest, with strides x0..x3; out [M, N] is contiguous. M and N are at least 1.
extern "C" int fused_mlp(const void* x, const void* gate, const void* up, const void* down, void* out, i64 is_bf16,
                         i64 kind, i64 K, i64 F, i64 N, i64 s0, i64 s1, i64 s2, i64 s3, i64 x0, i64 x1, i64 x2, i64 x3,
                         i64 sxk, i64 gate_r, i64 gate_k, i64 up_r, i64 up_k, i64 down_r, i64 down_k) {
#define FILL(S)                                                                                              \
    Mlp<S> {                                                                                                 \
        (const S*)x, (const S*)gate, (const S*)up, (const S*)down, (S*)out, s0* s1* s2* s3, K, F, N,         \
            (int)kind, {s0, s1, s2, s3}, {x0, x1, x2, x3}, sxk, gate_r, gate_k, up_r, up_k, down_r, down_k   \
    }
    return is_bf16 ? run(FILL(uint16_t)) : run(FILL(float));
}
"""

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
MAX_ROW_DIMS = 4


@functools.cache
def _library():
    flags = [f"-D{name}={value}" for name, value in CONFIG.items() if name != "OPT"]
    return build(SOURCE, flags=[CONFIG["OPT"], "-ffp-contract=fast", *flags])


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    """Gated MLP of x [..., in] with w_gate, w_up [hidden, in] and w_down [out, hidden] -> [..., out].

    Raises: TypeError for a dtype other than fp32 or bf16, ValueError for an unknown activation or for shapes that do
    not belong together.
    """
    tensors = (x, w_gate, w_up, w_down)
    if any(t.dtype != x.dtype for t in tensors) or x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"fused_mlp takes fp32 or bf16 tensors of one dtype, got {[str(t.dtype) for t in tensors]}")
    if any(t.device.type != "cpu" for t in tensors):
        raise ValueError(f"this kernel runs on the CPU, got tensors on {[str(t.device) for t in tensors]}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    _check_shapes(x.shape, w_gate.shape, w_up.shape, w_down.shape)
    (features, hidden), inner = w_down.shape, w_gate.shape[1]
    out = torch.empty((*x.shape[:-1], features), dtype=x.dtype)
    if out.numel() == 0:
        return out
    dims = _merged(list(zip(x.shape[:-1], x.stride()[:-1], strict=True)))
    if len(dims) > MAX_ROW_DIMS:
        raise ValueError(f"fused_mlp takes at most {MAX_ROW_DIMS} row dimensions that cannot be merged")
    dims = [(1, 0)] * (MAX_ROW_DIMS - len(dims)) + dims
    sizes, row_strides = zip(*dims, strict=True)
    strides = (*row_strides, x.stride(-1), *w_gate.stride(), *w_up.stride(), *w_down.stride())
    is_bf16 = x.dtype == torch.bfloat16
    _library().fused_mlp(*tensors, out, is_bf16, ACTIVATIONS[activation], inner, hidden, features, *sizes, *strides)
    return out


def _check_shapes(x, gate, up, down):
    matching = len(x) >= 1 and len(gate) == len(up) == len(down) == 2 and gate == up
    if not matching or gate[1] != x[-1] or down[1] != gate[0]:
        shapes = f"x {tuple(x)}, w_gate {tuple(gate)}, w_up {tuple(up)}, w_down {tuple(down)}"
        raise ValueError(f"fused_mlp: {shapes} do not belong together")


def _merged(dims):
    """Row dimensions (size, stride) with neighbours joined where they lie evenly in memory."""
    merged = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return merged
