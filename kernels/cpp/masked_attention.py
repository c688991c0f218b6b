"""Masked attention on the CPU: softmax(scale * q k^T + mask) v, online; neither scores nor mask are stored as a whole.

q [batch, heads, seq_q, dim], k and v [batch, kv_heads, seq_k, dim], fp32 or bf16, any strides; query head h reads kv
head h // (heads / kv_heads). The mask expands to [batch, heads, seq_q, seq_k] and is read where it is: bool, true where
a key is seen, or of q's dtype and added. A query that sees no key gets zeros. Query rows lie in the vector lanes: keys
and values are then read as single broadcast elements from where they are, and a softmax needs no sum across lanes. A
mask that is the same for all rows (padding) is read so, too; any other is turned in registers, a block at a time.
Blocks of keys that no row sees are skipped. All arithmetic is fp32, rounded once. A few query rows (decoding) would
leave most lanes idle: there the head dimension lies in the lanes. A block of queries belongs to one thread, so results
repeat bit for bit.
"""

import functools
import math

import torch

from autokernel.native import build

KERNEL_TYPE = "masked_attention"
BACKEND = "cpp"
TUNABLES = {
    "BQ": [16, 32, 64, 96, 128, 192],  # query rows of one task
    "BK": [16, 32, 64, 128, 256],  # keys of one softmax step
    "R": [2, 4, 8],  # keys (or output columns) of one register tile
    "QV": [1, 2, 3, 4],  # vectors of query rows of one register tile
    "FEW": [0, 1, 4, 8],  # up to so many query rows (decoding) put the head dimension into the lanes instead
    "UNROLL": [1, 2, 4],
    "COPY_KV": [0, 1],  # 1: widen each block of k and v into a buffer even where it could be read in place
    "BF16_DOT": [0, 1],  # 1: multiply q and k as pairs of bf16 where the CPU can
    "SCHEDULE": ["static", "dynamic"],
    "OPT": ["-O2", "-O3"],
}
CONFIG = {
    "BQ": 64,
    "BK": 64,
    "R": 8,
    "QV": 2,
    "FEW": 4,
    "UNROLL": 1,
    "COPY_KV": 0,
    "BF16_DOT": 1,
    "SCHEDULE": "dynamic",
    "OPT": "-O3",
}

SOURCE = r"""
#include <cfloat>
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
typedef int32_t vi __attribute__((vector_size(VB)));
typedef uint32_t vu __attribute__((vector_size(VB)));
typedef float vfu __attribute__((vector_size(VB), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(VB / 2)));
typedef uint16_t vhu __attribute__((vector_size(VB / 2), aligned(2), may_alias));
typedef uint32_t vuu __attribute__((vector_size(VB), aligned(1), may_alias));
typedef int64_t vl __attribute__((vector_size(VB)));
typedef float f32u __attribute__((aligned(2), may_alias));

const float INF = std::numeric_limits<float>::infinity();

static inline i64 least(i64 x, i64 y) { return x < y ? x : y; }
static inline i64 ceil_div(i64 x, i64 y) { return (x + y - 1) / y; }
static inline float widen(float x) { return x; }
static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline vf load(const float* p) { return *(const vfu*)p; }
static inline vf load(const uint16_t* p) { return (vf)(__builtin_convertvector(*(const vhu*)p, vu) << 16); }
// A bool becomes the most that a score can be there, so that a hidden score is gone even if it is infinite or NaN.
static inline float widen(uint8_t x) { return x ? INF : -INF; }
static inline float lowest(const float*) { return -FLT_MAX; }
static inline float lowest(const uint16_t*) { return widen((uint16_t)0xff7f); }
static inline bool any(vi x) {
    int64_t bits = 0;
    EACH for (int i = 0; i < VB / 8; i++) bits |= ((vl)x)[i];
    return bits != 0;
}
static inline void store(float* p, float x) { *p = x; }
static inline void store(uint16_t* p, float x) {  // round to nearest even; a NaN stays a NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline void store_lanes(float* p, vf x) { *(vfu*)p = x; }
static inline void store_lanes(uint16_t* p, vf x) {
    const vu bits = (vu)x, even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(vhu*)p = __builtin_convertvector(x == x ? even : vu{} + 0x7fc0, vh);
}

// VL vectors of VL lanes: rows become columns.
template <int W> static inline void swap_halves(vf* x) {
    vi near, far;
    EACH for (int i = 0; i < VL; i++) near[i] = i & W ? VL + i - W : i, far[i] = i & W ? VL + i : i + W;
    EACH for (int i = 0; i < VL; i++)
        if (!(i & W)) {
            const vf a = x[i], b = x[i + W];
            x[i] = __builtin_shuffle(a, b, near), x[i + W] = __builtin_shuffle(a, b, far);
        }
}
static inline void transpose(vf* x) {
    if constexpr (VL == 16) swap_halves<8>(x);
    swap_halves<4>(x), swap_halves<2>(x), swap_halves<1>(x);
}

// e^x for x <= 0 to about 2e-7, relative; below the normal numbers it is zero. A NaN stays a NaN.
static inline vf exp_of(vf x) {
    const float log2e = 1.44269504f;
    vf clamped = x < -87.336544f ? vf{} - 87.336544f : x;
    vf whole = (clamped * log2e + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    vf f = clamped * log2e - whole;                            // in [-0.5, 0.5]; Taylor coefficients ln(2)^n / n!
    vf y = f * 1.52527338e-5f + 1.54035304e-4f;
    y = y * f + 1.33335581e-3f;
    y = y * f + 9.61812911e-3f;
    y = y * f + 5.55041087e-2f;
    y = y * f + 2.40226507e-1f;
    y = y * f + 6.93147181e-1f;
    y = y * f + 1.0f;
    vf power = (vf)((__builtin_convertvector(whole, vi) + 127) << 23);
    return x < -87.336544f ? vf{} : y * power;
}

struct F32Step {
    static inline vf fma(vf acc, const float* x, vf lanes) { return acc + (vf{} + *x) * lanes; }
};
#if PAIRS
struct PairStep {  // two bf16 in 32 bits, read in place
    static inline vf fma(vf acc, const f32u* x, vf lanes) {
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(lanes), "m"(*x));
        return acc;
    }
};
#endif

// scores[r][lanes] = k[r] . q over `steps`; q [step][BQ], k's rows `ldk` floats (or half-words for pairs) apart.
template <class P, class E, int ROWS, int V>
static inline void score_tile(const float* q, const E* k, i64 ldk, i64 steps, float* scores) {
    vf acc[ROWS][V] = {};
    const i64 width = 4 / sizeof(E);
    UNROLL_K
    for (i64 d = 0; d < steps; d++) {
        vf lane[V];
        EACH for (int v = 0; v < V; v++) lane[v] = *(const vf*)(q + d * BQ + v * VL);
        EACH for (int r = 0; r < ROWS; r++)
            EACH for (int v = 0; v < V; v++)
                acc[r][v] = P::fma(acc[r][v], (const f32u*)(k + r * ldk + d * width), lane[v]);
    }
    EACH for (int r = 0; r < ROWS; r++)
        EACH for (int v = 0; v < V; v++) *(vf*)(scores + r * BQ + v * VL) = acc[r][v];
}

// out[r][lanes] = out * alpha + sum over keys of v[key][r] * p[key].
template <int ROWS, int V>
static inline void value_tile(const float* p, const float* values, i64 ldv, i64 keys, const float* alpha, float* out) {
    vf acc[ROWS][V];
    EACH for (int r = 0; r < ROWS; r++)
        EACH for (int v = 0; v < V; v++) acc[r][v] = *(vf*)(out + r * BQ + v * VL) * *(const vf*)(alpha + v * VL);
    UNROLL_K
    for (i64 j = 0; j < keys; j++) {
        vf lane[V];
        EACH for (int v = 0; v < V; v++) lane[v] = *(const vf*)(p + j * BQ + v * VL);
        EACH for (int r = 0; r < ROWS; r++)
            EACH for (int v = 0; v < V; v++) acc[r][v] = F32Step::fma(acc[r][v], values + j * ldv + r, lane[v]);
    }
    EACH for (int r = 0; r < ROWS; r++)
        EACH for (int v = 0; v < V; v++) *(vf*)(out + r * BQ + v * VL) = acc[r][v];
}

template <class P, class E, int ROWS, int V>
static void score_rows(const float* q, const E* k, i64 ldk, i64 steps, i64 keys, float* scores) {
    i64 j = 0;
    for (; j + ROWS <= keys; j += ROWS) score_tile<P, E, ROWS, V>(q, k + j * ldk, ldk, steps, scores + j * BQ);
    if constexpr (ROWS > 1)
        if (j < keys) score_rows<P, E, ROWS / 2, V>(q, k + j * ldk, ldk, steps, keys - j, scores + j * BQ);
}
template <int ROWS, int V>
static void value_rows(const float* p, const float* v, i64 ldv, i64 keys, i64 dim, const float* alpha, float* out) {
    i64 d = 0;
    for (; d + ROWS <= dim; d += ROWS) value_tile<ROWS, V>(p, v + d, ldv, keys, alpha, out + d * BQ);
    if constexpr (ROWS > 1)
        if (d < dim) value_rows<ROWS / 2, V>(p, v + d, ldv, keys, dim - d, alpha, out + d * BQ);
}

template <class P, class E, int V>
static void all_scores(const float* q, const E* k, i64 ldk, i64 steps, i64 keys, i64 vectors, float* scores) {
    for (; vectors >= V; vectors -= V, q += V * VL, scores += V * VL)
        score_rows<P, E, R, V>(q, k, ldk, steps, keys, scores);
    if constexpr (V > 1)
        if (vectors > 0) all_scores<P, E, V - 1>(q, k, ldk, steps, keys, vectors, scores);
}
template <int V>
static void all_values(const float* p, const float* v, i64 ldv, i64 keys, i64 dim, i64 vectors, const float* alpha,
                       float* out) {
    for (; vectors >= V; vectors -= V, p += V * VL, alpha += V * VL, out += V * VL)
        value_rows<R, V>(p, v, ldv, keys, dim, alpha, out);
    if constexpr (V > 1)
        if (vectors > 0) all_values<V - 1>(p, v, ldv, keys, dim, vectors, alpha, out);
}

// Lane i of x[0] becomes the sum of the lanes of x[i]: of two vectors each step makes one, of half sums.
template <int W> static inline void add_halves(vf* x) {
    vi near, far;
    EACH for (int i = 0; i < VL; i++) near[i] = i & W ? VL + i - W : i, far[i] = i & W ? VL + i : i + W;
    EACH for (int i = 0; i < W; i++)
        x[i] = __builtin_shuffle(x[i], x[i + W], near) + __builtin_shuffle(x[i], x[i + W], far);
}

// Few rows: q is [row][dim]; a score is a dot product along k's row. The other lanes' scores become zero.
template <class E>
static void few_scores(const float* q, i64 rows, const E* k, i64 ldk, i64 dim, i64 keys, float* scores) {
    for (i64 j = 0; j < keys; j += VL) {
        vf turned[VL] = {};
        for (i64 r = 0; r < rows; r++) {
            vf part[VL];
            EACH for (int i = 0; i < VL; i++) {
                const E* key = k + least(j + i, keys - 1) * ldk;
                vf sum = {};
                i64 d = 0;
                for (; d + VL <= dim; d += VL) sum += load(q + r * dim + d) * load(key + d);
                for (; d < dim; d++) sum[0] += q[r * dim + d] * widen(key[d]);
                part[i] = sum;
            }
            if constexpr (VL == 16) add_halves<8>(part);
            add_halves<4>(part), add_halves<2>(part), add_halves<1>(part);
            turned[r] = part[0];
        }
        transpose(turned);
        EACH for (int i = 0; i < VL; i++)
            if (j + i < keys) *(vf*)(scores + (j + i) * BQ) = turned[i];
    }
}
// out [row][dim] = out * alpha[row] + sum over keys of p[key][row] * v[key].
template <class E>
static void few_values(const float* p, i64 rows, const E* v, i64 ldv, i64 dim, i64 keys, const float* alpha,
                       float* out) {
    for (i64 r = 0; r < rows; r++) {
        i64 d = 0;
        for (; d + 4 * VL <= dim; d += 4 * VL) {
            vf acc[4];
            EACH for (int c = 0; c < 4; c++) acc[c] = load(out + r * dim + d + c * VL) * alpha[r];
            for (i64 j = 0; j < keys; j++)
                EACH for (int c = 0; c < 4; c++) acc[c] += (vf{} + p[j * BQ + r]) * load(v + j * ldv + d + c * VL);
            EACH for (int c = 0; c < 4; c++) *(vfu*)(out + r * dim + d + c * VL) = acc[c];
        }
        for (; d < dim; d++) {
            float sum = out[r * dim + d] * alpha[r];
            for (i64 j = 0; j < keys; j++) sum += p[j * BQ + r] * widen(v[j * ldv + d]);
            out[r * dim + d] = sum;
        }
    }
}

// One softmax step for a vector of query rows: scores become weights; new maximum, sum and the old sum's factor. `bias`
// holds a float for each key, or when EACH_ROW, a vector. The mask is added to the score as it is, not times log2(e):
// that would overflow for the lowest value, which leaves the mean of the values where nothing else is in a row.
template <bool SEEN, bool EACH_ROW>
static inline void softmax_step(float* scores, i64 keys, float scale, const float* bias, vf* top, vf* sum, vf* alpha) {
    vf best = *top;
    for (i64 j = 0; j < keys; j++) {
        vf* s = (vf*)(scores + j * BQ);
        const vf mask = EACH_ROW ? *(const vf*)(bias + j * BQ) : vf{} + bias[j];
        vf value = *s * scale;
        value = SEEN ? (value < mask ? value : mask) : value + mask;
        *s = value;
        best = value > best ? value : best;
    }
    vf base = best == -INF ? vf{} : best;  // a row that sees no key so far: avoid inf - inf
    *alpha = exp_of(*top - base);
    vf added = {};
    for (i64 j = 0; j < keys; j++) {
        vf* s = (vf*)(scores + j * BQ);
        *s = exp_of(*s - base);
        added += *s;
    }
    *sum = *sum * *alpha + added;
    *top = best;
}

// How much of a row of the mask lets a key be seen: nothing, at most the lowest value, or something.
enum { HIDDEN, LOWEST, SEEN };
template <class M> static int seen_in(const M* row, i64 step, i64 keys) {
    const float low = lowest(row);
    int level = HIDDEN;
    i64 j = 0;
    if (step == 1) {
        vi more = {}, some = {};
        for (; j + VL <= keys; j += VL) {
            const vf x = load(row + j);
            more |= ~(x <= low), some |= x != -INF;  // a NaN is more
        }
        if (any(more)) return SEEN;
        if (any(some)) level = LOWEST;
    }
    for (; j < keys; j++) {
        const float x = widen(row[j * step]);
        if (!(x <= low)) return SEEN;
        if (x != -INF) level = LOWEST;
    }
    return level;
}
static int seen_in(const uint8_t* row, i64 step, i64 keys) {
    uint64_t seen = 0, part;
    i64 j = 0;
    for (; step == 1 && j + 8 <= keys; j += 8) memcpy(&part, row + j, 8), seen |= part;
    for (; j < keys; j++) seen |= row[j * step];
    return seen ? SEEN : HIDDEN;
}

// bias[key][lane] of VL rows of a mask, from where each begins.
template <class M> static void turn_rows(const M* mask, const i64* row, i64 keys, float* bias) {
    for (i64 j = 0; j < keys; j += VL) {
        vf tile[VL];
        if (j + VL <= keys) EACH for (int i = 0; i < VL; i++) tile[i] = load(mask + row[i] + j);
        else
            for (int i = 0; i < VL; i++) {
                M part[VL] = {};
                memcpy(part, mask + row[i] + j, (keys - j) * sizeof(M));
                tile[i] = load(part);
            }
        transpose(tile);
        EACH for (int i = 0; i < VL; i++)
            if (j + i < keys) *(vf*)(bias + (j + i) * BQ) = tile[i];
    }
}
// Bools are turned four keys at a time. Their only bit becomes the sign of an infinity.
static void turn_rows(const uint8_t* mask, const i64* row, i64 keys, float* bias) {
    const vu inf = (vu)(vf{} + INF), sign = vu{} + 0x80000000u;
    for (i64 j = 0; j < keys; j += 4 * VL) {
        vf tile[VL];
        if (j + 4 * VL <= keys) EACH for (int i = 0; i < VL; i++) tile[i] = (vf) * (const vuu*)(mask + row[i] + j);
        else
            for (int i = 0; i < VL; i++) {
                uint8_t part[4 * VL] = {};
                memcpy(part, mask + row[i] + j, keys - j);
                tile[i] = (vf) * (const vuu*)part;
            }
        transpose(tile);
        EACH for (int i = 0; i < VL; i++)
            EACH for (int n = 0; n < 4; n++)
                if (j + 4 * i + n < keys)
                    *(vf*)(bias + (j + 4 * i + n) * BQ) = (vf)(inf | (~((vu)tile[i] << (31 - 8 * n)) & sign));
    }
}
// bias[key][lane] of a mask whose rows begin at `row`, one for each lane.
template <class M>
static void turn_mask(const M* mask, const i64* row, i64 step, i64 keys, i64 vectors, float* bias) {
    if (step == 1)
        for (i64 v = 0; v < vectors; v++) turn_rows(mask, row + v * VL, keys, bias + v * VL);
    else
        for (i64 lane = 0; lane < vectors * VL; lane++)
            for (i64 j = 0; j < keys; j++) bias[j * BQ + lane] = widen(mask[row[lane] + j * step]);
}

template <class S, class M> struct Attention {
    const S *q, *k, *v;
    const M* mask;
    S* out;
    i64 batch, heads, kv_heads, seq_q, seq_k, dim, dim_v;
    i64 qb, qh, qs, qd, kb, kh, ks, kd, vb, vh, vs, vd, mb, mh, mq, mk, ob, oh, os;
    float scale;
    bool pairs() const { return PAIRS && sizeof(S) == 2 && kd == 1 && dim % 2 == 0 && !COPY_KV; }
    // With few queries, the heads that share a kv head fill the lanes together.
    i64 folded() const { return seq_q < BQ ? heads / kv_heads : 1; }
    bool one_mask() const { return (mq == 0 || seq_q == 1) && (mh == 0 || folded() == 1); }
};

struct Scratch {  // one thread's buffers, each 64-byte aligned
    float *q, *scores, *bias, *out, *k, *v, *top, *sum, *alpha;
    i64* row;
    static i64 floats(i64 dim, i64 dim_v) {
        return ceil_div(BQ * (dim + dim_v + 2 * BK + 5) + BK * (dim + dim_v) + 32, 16) * 16;
    }
    Scratch(float* p, i64 dim, i64 dim_v) {
        q = p, scores = q + dim * BQ, bias = scores + BK * BQ, out = bias + BK * BQ, top = out + dim_v * BQ;
        sum = top + BQ, alpha = sum + BQ, row = (i64*)(alpha + BQ), k = alpha + 3 * BQ, v = k + BK * dim;
    }
};

template <class S>
static const float* block_of(const S* p, i64 ld, i64 s_d, i64 rows, i64 dim, float* buffer, i64* ld_out) {
    if (sizeof(S) == 4 && s_d == 1 && !COPY_KV) {
        *ld_out = ld;
        return (const float*)p;
    }
    *ld_out = dim;
    for (i64 j = 0; j < rows; j++)
        if (s_d == 1)
            for (i64 d = 0; d < dim; d++) buffer[j * dim + d] = widen(p[j * ld + d]);
        else
            for (i64 d = 0; d < dim; d++) buffer[j * dim + d] = widen(p[j * ld + d * s_d]);
    return buffer;
}

// Lanes hold query rows r0.. of `group` heads from `head` on: row r is query r % seq_q of head + r / seq_q. Lanes that
// are left over hold the last row once more.
template <class S, class M>
static void load_queries(const Attention<S, M>& a, const S* q, i64 r0, i64 rows, const Scratch& w) {
    const bool pairs = a.pairs();
    const i64 steps = pairs ? a.dim / 2 : a.dim;
    for (i64 first = 0; first < rows; first += VL) {
        const S* row[VL];
        for (i64 i = 0; i < VL; i++) {
            const i64 r = r0 + least(first + i, rows - 1);
            row[i] = q + r / a.seq_q * a.qh + r % a.seq_q * a.qs;
        }
        i64 d = 0;
        if (a.qd == 1)
            for (; d + VL <= steps; d += VL) {
                vf tile[VL];
                EACH for (int i = 0; i < VL; i++)
                    tile[i] = pairs ? load((const float*)row[i] + d) : load(row[i] + d);
                transpose(tile);
                EACH for (int i = 0; i < VL; i++) *(vf*)(w.q + (d + i) * BQ + first) = tile[i];
            }
        for (; d < steps; d++)
            for (i64 i = 0; i < VL; i++) {
                float value;
                if (pairs) {
                    uint32_t bits = (uint32_t)row[i][2 * d * a.qd] | (uint32_t)row[i][(2 * d + 1) * a.qd] << 16;
                    memcpy(&value, &bits, 4);
                } else value = widen(row[i][d * a.qd]);
                w.q[d * BQ + first + i] = value;
            }
    }
}
// Few rows: [row][dim].
template <class S, class M>
static void load_few_queries(const Attention<S, M>& a, const S* q, i64 r0, i64 rows, const Scratch& w) {
    for (i64 r = 0; r < rows; r++) {
        const S* row = q + (r0 + r) / a.seq_q * a.qh + (r0 + r) % a.seq_q * a.qs;
        for (i64 d = 0; d < a.dim; d++) w.q[r * a.dim + d] = widen(row[d * a.qd]);
    }
}

template <class S, class M>
static void score_block(const Attention<S, M>& a, const S* k, i64 keys, i64 vectors, const Scratch& w) {
#if PAIRS
    if (a.pairs()) {
        all_scores<PairStep, uint16_t, QV>(w.q, (const uint16_t*)k, a.ks, a.dim / 2, keys, vectors, w.scores);
        return;
    }
#endif
    i64 ldk;
    const float* block = block_of(k, a.ks, a.kd, keys, a.dim, w.k, &ldk);
    all_scores<F32Step, float, QV>(w.q, block, ldk, a.dim, keys, vectors, w.scores);
}

// The two products of one block of keys with few query rows, read in place where the head dimension is contiguous.
template <class S, class M>
static void few_score_block(const Attention<S, M>& a, i64 rows, const S* k, i64 keys, const Scratch& w) {
    if (a.kd == 1) return few_scores(w.q, rows, k, a.ks, a.dim, keys, w.scores);
    i64 ld;
    const float* block = block_of(k, a.ks, a.kd, keys, a.dim, w.k, &ld);
    few_scores(w.q, rows, block, ld, a.dim, keys, w.scores);
}
template <class S, class M>
static void few_value_block(const Attention<S, M>& a, i64 rows, const S* v, i64 keys, const Scratch& w) {
    if (a.vd == 1) return few_values(w.scores, rows, v, a.vs, a.dim_v, keys, w.alpha, w.out);
    i64 ld;
    const float* block = block_of(v, a.vs, a.vd, keys, a.dim_v, w.v, &ld);
    few_values(w.scores, rows, block, ld, a.dim_v, keys, w.alpha, w.out);
}

template <class S, class M>
static void value_block(const Attention<S, M>& a, const S* v, i64 keys, i64 vectors, const Scratch& w) {
    i64 ld;
    const float* block = block_of(v, a.vs, a.vd, keys, a.dim_v, w.v, &ld);
    all_values<QV>(w.scores, block, ld, keys, a.dim_v, vectors, w.alpha, w.out);
}

// Where the mask's row of each lane begins.
template <class S, class M>
static void find_rows(const Attention<S, M>& a, i64 head, i64 r0, i64 rows, i64 vectors, i64* row) {
    for (i64 lane = 0; lane < vectors * VL; lane++) {
        const i64 r = r0 + least(lane, rows - 1);
        row[lane] = (head + r / a.seq_q) * a.mh + r % a.seq_q * a.mq;
    }
}

// The next block of a mask is on its way while this one is worked on: its many short runs are none that CPUs foresee.
template <class M> static void fetch_mask(const M* mask, const i64* row, i64 rows, i64 step, i64 keys) {
    const i64 line = 64 / sizeof(M), stride = step < line ? line : step;
    for (i64 r = 0; r < rows; r++)
        for (i64 at = 0; at < keys * step; at += stride) __builtin_prefetch(mask + row[r] + at, 0, 2);
}

// Whether any lane gets anything from a block of keys; the mask's first `rows` rows differ. Where it has at most the
// lowest value, keys are lost beside any that a lane saw before; a lane without one may be all lowest to the end.
template <class M>
static bool matters(const M* mask, const i64* row, i64 rows, i64 step, i64 keys, const float* top, i64 lanes) {
    int level = HIDDEN;
    for (i64 r = 0; r < rows && level != SEEN; r++) {
        const int next = seen_in(mask + row[r], step, keys);
        level = next > level ? next : level;
    }
    if constexpr (sizeof(M) > 1)
        for (i64 r = 0; r < lanes && level == LOWEST; r++)
            if (!(top[r] > lowest(mask) / 2)) return true;
    return level == SEEN;
}

template <class S, class M>
static void store_rows(const Attention<S, M>& a, S* out, i64 r0, i64 rows, const Scratch& w) {
    for (i64 first = 0; first < rows; first += VL) {
        const i64 lanes = least(VL, rows - first);
        S* row[VL];
        for (i64 i = 0; i < lanes; i++)
            row[i] = out + (r0 + first + i) / a.seq_q * a.oh + (r0 + first + i) % a.seq_q * a.os;
        const vf sum = *(const vf*)(w.sum + first), share = 1.0f / sum;
        i64 d = 0;
        for (; d + VL <= a.dim_v; d += VL) {
            vf tile[VL];
            EACH for (int i = 0; i < VL; i++) {
                const vf x = *(const vf*)(w.out + (d + i) * BQ + first) * share;
                tile[i] = sum == 0.0f ? vf{} : x;  // every key was hidden
            }
            transpose(tile);
            EACH for (int i = 0; i < VL; i++)
                if (i < lanes) store_lanes(row[i] + d, tile[i]);
        }
        for (; d < a.dim_v; d++)
            for (i64 i = 0; i < lanes; i++)
                store(row[i] + d, sum[i] == 0 ? 0.0f : w.out[d * BQ + first + i] * share[i]);
    }
}
template <class S, class M>
static void store_few_rows(const Attention<S, M>& a, S* out, i64 r0, i64 rows, const Scratch& w) {
    for (i64 r = 0; r < rows; r++) {
        S* row = out + (r0 + r) / a.seq_q * a.oh + (r0 + r) % a.seq_q * a.os;
        for (i64 d = 0; d < a.dim_v; d++) store(row + d, w.sum[r] == 0 ? 0.0f : w.out[r * a.dim_v + d] / w.sum[r]);
    }
}

template <class S, class M>
static void attend(const Attention<S, M>& a, i64 b, i64 head, i64 r0, i64 rows, const Scratch& w) {
    const i64 vectors = ceil_div(rows, VL), kv = head / (a.heads / a.kv_heads);
    const bool few = rows <= FEW, one_mask = a.one_mask(), seen = sizeof(M) == 1;
    const S* q = a.q + b * a.qb + head * a.qh;
    if (few) load_few_queries(a, q, r0, rows, w);
    else load_queries(a, q, r0, rows, w);
    find_rows(a, head, r0, rows, vectors, w.row);
    memset(w.out, 0, a.dim_v * BQ * sizeof(float));
    for (i64 lane = 0; lane < vectors * VL; lane++) w.top[lane] = -INF, w.sum[lane] = 0;
    for (i64 next, j0 = 0; j0 < a.seq_k; j0 = next) {
        i64 keys = least(BK, a.seq_k - j0);
        next = j0 + keys;
        const M* mask = a.mask + b * a.mb + j0 * a.mk;
        if (!matters(mask, w.row, one_mask ? 1 : rows, a.mk, keys, w.top, rows)) continue;
        if (!one_mask && next < a.seq_k) fetch_mask(mask + BK * a.mk, w.row, rows, a.mk, least(BK, a.seq_k - next));
        if (one_mask)
            for (i64 j = 0; j < keys; j++) w.bias[j] = widen(mask[w.row[0] + j * a.mk]);
        else turn_mask(mask, w.row, a.mk, keys, vectors, w.bias);
        while (one_mask && w.bias[keys - 1] == -INF) keys--;
        const S *k = a.k + b * a.kb + kv * a.kh + j0 * a.ks, *values = a.v + b * a.vb + kv * a.vh + j0 * a.vs;
        if (few) few_score_block(a, rows, k, keys, w);
        else score_block(a, k, keys, vectors, w);
        for (i64 v = 0; v < vectors; v++) {
            const auto step = one_mask ? softmax_step<seen, false> : softmax_step<seen, true>;
            step(w.scores + v * VL, keys, a.scale, one_mask ? w.bias : w.bias + v * VL, (vf*)w.top + v, (vf*)w.sum + v,
                 (vf*)w.alpha + v);
        }
        if (few) few_value_block(a, rows, values, keys, w);
        else value_block(a, values, keys, vectors, w);
    }
    S* out = a.out + b * a.ob + head * a.oh;
    if (few) store_few_rows(a, out, r0, rows, w);
    else store_rows(a, out, r0, rows, w);
}

// Kept between calls, one per calling thread: fresh pages for every call would cost more than a short attention.
struct Workspace {
    float* memory = nullptr;
    i64 floats = 0;
    float* get(i64 wanted) {
        if (memory == nullptr || wanted > floats) {
            free(memory);
            memory = (float*)aligned_alloc(64, wanted * sizeof(float) + 64);
            floats = memory ? wanted : 0;
        }
        return memory;
    }
    ~Workspace() { free(memory); }
};
static thread_local Workspace workspace;

template <class S, class M> static int run(const Attention<S, M>& a) {
    const int threads = omp_get_max_threads();
    const i64 each = Scratch::floats(a.dim, a.dim_v), fold = a.folded(), rows = fold * a.seq_q;
    const i64 blocks = ceil_div(rows, BQ), head_groups = a.heads / fold, groups = a.batch * head_groups;
    // One head after the other, so that its keys and values stay in the cache; but where the heads of a mask share its
    // cache lines, one block of queries after the other.
    const bool side_by_side = a.mh > 0 && a.mh * sizeof(M) < 64 && !a.one_mask();
    float* memory = workspace.get(each * threads);
    if (memory == nullptr) return 1;
#pragma omp parallel num_threads(threads)
    {
        const Scratch w(memory + each * omp_get_thread_num(), a.dim, a.dim_v);
#pragma omp for schedule(SCHEDULE)
        for (i64 task = 0; task < blocks * groups; task++) {
            const i64 block = side_by_side ? task / groups : task % blocks;
            const i64 group = side_by_side ? task % groups : task / blocks, r0 = block * BQ;
            attend(a, group / head_groups, group % head_groups * fold, r0, least(BQ, rows - r0), w);
        }
    }
    return 0;
}

// Strides in elements; out's last dimension is contiguous. Every size is at least 1, but seq_k may be 0.
extern "C" int masked_attention(const void* q, const void* k, const void* v, const void* mask, void* out, i64 is_bf16,
                                i64 is_bool, i64 batch, i64 heads, i64 kv_heads, i64 seq_q, i64 seq_k, i64 dim,
                                i64 dim_v, i64 qb, i64 qh, i64 qs, i64 qd, i64 kb, i64 kh, i64 ks, i64 kd, i64 vb,
                                i64 vh, i64 vs, i64 vd, i64 mb, i64 mh, i64 mq, i64 mk, i64 ob, i64 oh, i64 os,
                                double scale) {
#define RUN(S, M)                                                                                                    \
    run(Attention<S, M>{(const S*)q, (const S*)k, (const S*)v, (const M*)mask, (S*)out, batch, heads, kv_heads,      \
                        seq_q, seq_k, dim, dim_v, qb, qh, qs, qd, kb, kh, ks, kd, vb, vh, vs, vd, mb, mh, mq, mk,    \
                        ob, oh, os, (float)scale})
    if (is_bool) return is_bf16 ? RUN(uint16_t, uint8_t) : RUN(float, uint8_t);
    return is_bf16 ? RUN(uint16_t, uint16_t) : RUN(float, float);
}
"""


@functools.cache
def _library():
    flags = [f"-D{name}={value}" for name, value in CONFIG.items() if name != "OPT"]
    return build(SOURCE, flags=[CONFIG["OPT"], "-ffp-contract=fast", *flags])


def kernel_fn(q, k, v, mask, scale=None):
    """Attention over [batch, heads, seq, dim]; `scale` None means 1/sqrt(dim). Returns [batch, heads, seq_q, dim_v].

    `mask` expands to [batch, heads, seq_q, seq_k]: bool, true where a key is seen, or of q's dtype and added.
    Raises: TypeError for dtypes other than these and fp32 or bf16, ValueError for shapes that do not belong together.
    """
    _check_dtypes(q, k, v, mask)
    mask = _checked_mask(q.shape, k.shape, v.shape, mask)
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k, dim_v = v.shape[1:]
    out = torch.empty((batch, heads, seq_q, dim_v), dtype=q.dtype)
    if out.numel() == 0:
        return out
    if scale is None:
        scale = 1 / math.sqrt(dim) if dim else 1.0
    kinds = (q.dtype == torch.bfloat16, mask.dtype == torch.bool)
    sizes = (batch, heads, kv_heads, seq_q, seq_k, dim, dim_v)
    strides = (*q.stride(), *k.stride(), *v.stride(), *mask.stride(), *out.stride()[:3])
    _library().masked_attention(q, k, v, mask, out, *kinds, *sizes, *strides, float(scale))
    return out


def _check_dtypes(q, k, v, mask):
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"masked_attention takes fp32 or bf16 tensors of one dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if mask.dtype not in (torch.bool, q.dtype):
        raise TypeError(f"masked_attention takes a mask of bool or {q.dtype}, as q has, got {mask.dtype}")
    if not q.device.type == k.device.type == v.device.type == mask.device.type == "cpu":
        devices = f"{q.device}, {k.device}, {v.device} and {mask.device}"
        raise ValueError(f"this kernel runs on the CPU, got tensors on {devices}")


def _checked_mask(q, k, v, mask):
    """The mask seen as [batch, heads, seq_q, seq_k]; where it is expanded its stride is 0."""
    if not len(q) == len(k) == len(v) == 4:
        raise ValueError(f"masked_attention takes [batch, heads, seq, dim], got {tuple(q)}, {tuple(k)}, {tuple(v)}")
    if k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3] or k[1] == 0 or q[1] % k[1] != 0:
        raise ValueError(f"masked_attention: q {tuple(q)}, k {tuple(k)} and v {tuple(v)} do not belong together")
    scores = (*q[:3], k[2])
    try:
        return mask.expand(scores)
    except RuntimeError:
        raise ValueError(f"masked_attention: mask {tuple(mask.shape)} does not expand to {scores}") from None
