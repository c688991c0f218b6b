"""Attention on the CPU: softmax(scale * q k^T) v with an online softmax; the scores are never stored as a whole.

q [batch, heads, seq_q, dim], k and v [batch, kv_heads, seq_k, dim], fp32 or bf16, any strides; query head h reads kv
head h // (heads / kv_heads). Causal means that query i sees the keys 0..i. Query rows lie in the vector lanes: keys and
values are then read as single broadcast elements from where they are, and a softmax needs no sum across lanes. All
arithmetic is fp32, rounded once. A few query rows (decoding) would leave most lanes idle: there the head dimension lies
in the lanes. A block of queries belongs to one thread, so results repeat bit for bit.
"""

import functools
import math

import torch

from autokernel.native import build

KERNEL_TYPE = "flash_attention"
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
typedef uint16_t vhu __attribute__((vector_size(VB / 2), aligned(2), may_alias));
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
static inline void store(float* p, float x) { *p = x; }
static inline void store(uint16_t* p, float x) {  // round to nearest even; a NaN stays a NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// 2^x for x <= 0 to about 1e-7, relative; below the normal numbers it is zero. A NaN stays a NaN.
static inline vf exp2_of(vf x) {
    vf clamped = x < -126.0f ? vf{} - 126.0f : x;
    vf whole = (clamped + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    vf f = clamped - whole;                            // in [-0.5, 0.5]; Taylor coefficients ln(2)^n / n!
    vf y = f * 1.52527338e-5f + 1.54035304e-4f;
    y = y * f + 1.33335581e-3f;
    y = y * f + 9.61812911e-3f;
    y = y * f + 5.55041087e-2f;
    y = y * f + 2.40226507e-1f;
    y = y * f + 6.93147181e-1f;
    y = y * f + 1.0f;
    vf power = (vf)((__builtin_convertvector(whole, vi) + 127) << 23);
    return x < -126.0f ? vf{} : y * power;
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

// Few rows: q is [row][dim]; a score is a dot product along k's row. The other lanes' scores become zero.
template <class E>
static void few_scores(const float* q, i64 rows, const E* k, i64 ldk, i64 dim, i64 keys, float* scores) {
    for (i64 j = 0; j < keys; j++) {
        *(vf*)(scores + j * BQ) = vf{};
        for (i64 r = 0; r < rows; r++) {
            vf sum = {};
            i64 d = 0;
            for (; d + VL <= dim; d += VL) sum += load(q + r * dim + d) * load(k + j * ldk + d);
            for (int width = VL / 2; width > 0; width /= 2) {
                vi from;
                for (int i = 0; i < VL; i++) from[i] = (i + width) % VL;
                sum += __builtin_shuffle(sum, from);
            }
            float score = sum[0];
            for (; d < dim; d++) score += q[r * dim + d] * widen(k[j * ldk + d]);
            scores[j * BQ + r] = score;
        }
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

// One softmax step for a vector of query rows: scores become weights; new maximum, sum and the old sum's factor.
static inline void softmax_step(float* scores, i64 keys, float scale, const vi* last, i64 vector, vf* top, vf* sum,
                                vf* alpha) {
    vf best = *top;
    for (i64 j = 0; j < keys; j++) {
        vf* s = (vf*)(scores + j * BQ + vector * VL);
        vf value = *s * scale;
        if (last != nullptr) value = last[vector] < (int32_t)j ? vf{} - INF : value;
        *s = value;
        best = value > best ? value : best;
    }
    vf base = best == -INF ? vf{} : best;  // a row without a finite score so far: avoid inf - inf
    *alpha = exp2_of(*top - base);
    vf added = {};
    for (i64 j = 0; j < keys; j++) {
        vf* s = (vf*)(scores + j * BQ + vector * VL);
        *s = exp2_of(*s - base);
        added += *s;
    }
    *sum = *sum * *alpha + added;
    *top = best;
}

template <class S> struct Attention {
    const S *q, *k, *v;
    S* out;
    i64 batch, heads, kv_heads, seq_q, seq_k, dim, dim_v, causal;
    i64 qb, qh, qs, qd, kb, kh, ks, kd, vb, vh, vs, vd, ob, oh, os;
    float scale;  // times log2(e)
    bool pairs() const { return PAIRS && sizeof(S) == 2 && kd == 1 && dim % 2 == 0 && !COPY_KV; }
    // With few queries, the heads that share a kv head fill the lanes together.
    i64 folded() const { return seq_q < BQ ? heads / kv_heads : 1; }
};

struct Scratch {  // one thread's buffers, each 64-byte aligned
    float *q, *scores, *out, *k, *v, *top, *sum, *alpha;
    int32_t* last;
    static i64 floats(i64 dim, i64 dim_v) {
        return ceil_div(BQ * (dim + dim_v + BK + 4) + BK * (dim + dim_v) + 32, 16) * 16;
    }
    Scratch(float* p, i64 dim, i64 dim_v) {
        q = p, scores = q + dim * BQ, out = scores + BK * BQ, top = out + dim_v * BQ, sum = top + BQ;
        alpha = sum + BQ, last = (int32_t*)(alpha + BQ), k = alpha + 2 * BQ, v = k + BK * dim;
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

// Lanes hold query rows r0.. of `group` heads from `head` on: row r is query r % seq_q of head + r / seq_q.
template <class S> static void load_queries(const Attention<S>& a, const S* q, i64 r0, i64 rows, const Scratch& w) {
    memset(w.q, 0, a.dim * BQ * sizeof(float));
    for (i64 lane = 0; lane < rows; lane++) {
        const S* row = q + (r0 + lane) / a.seq_q * a.qh + (r0 + lane) % a.seq_q * a.qs;
        if (rows <= FEW)
            for (i64 d = 0; d < a.dim; d++) w.q[lane * a.dim + d] = widen(row[d * a.qd]);
        else if (a.pairs())
            for (i64 d = 0; d < a.dim; d += 2) {
                uint32_t bits = (uint32_t)row[d * a.qd] | (uint32_t)row[(d + 1) * a.qd] << 16;
                memcpy(w.q + d / 2 * BQ + lane, &bits, 4);
            }
        else
            for (i64 d = 0; d < a.dim; d++) w.q[d * BQ + lane] = widen(row[d * a.qd]);
    }
}

template <class S> static void score_block(const Attention<S>& a, const S* k, i64 keys, i64 vectors, const Scratch& w) {
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
template <class S>
static void few_score_block(const Attention<S>& a, i64 rows, const S* k, i64 keys, const Scratch& w) {
    if (a.kd == 1) return few_scores(w.q, rows, k, a.ks, a.dim, keys, w.scores);
    i64 ld;
    const float* block = block_of(k, a.ks, a.kd, keys, a.dim, w.k, &ld);
    few_scores(w.q, rows, block, ld, a.dim, keys, w.scores);
}
template <class S>
static void few_value_block(const Attention<S>& a, i64 rows, const S* v, i64 keys, const Scratch& w) {
    if (a.vd == 1) return few_values(w.scores, rows, v, a.vs, a.dim_v, keys, w.alpha, w.out);
    i64 ld;
    const float* block = block_of(v, a.vs, a.vd, keys, a.dim_v, w.v, &ld);
    few_values(w.scores, rows, block, ld, a.dim_v, keys, w.alpha, w.out);
}

template <class S> static void value_block(const Attention<S>& a, const S* v, i64 keys, i64 vectors, const Scratch& w) {
    i64 ld;
    const float* block = block_of(v, a.vs, a.vd, keys, a.dim_v, w.v, &ld);
    all_values<QV>(w.scores, block, ld, keys, a.dim_v, vectors, w.alpha, w.out);
}

template <class S> static void attend(const Attention<S>& a, i64 b, i64 head, i64 r0, i64 rows, const Scratch& w) {
    const i64 vectors = ceil_div(rows, VL), kv = head / (a.heads / a.kv_heads);
    load_queries(a, a.q + b * a.qb + head * a.qh, r0, rows, w);
    memset(w.out, 0, a.dim_v * BQ * sizeof(float));
    i64 most = -1, fewest = a.seq_k;  // the last key that any (every) row of this block sees
    for (i64 lane = 0; lane < vectors * VL; lane++) {
        const i64 query = (r0 + least(lane, rows - 1)) % a.seq_q;
        w.top[lane] = -INF, w.sum[lane] = 0;
        most = query > most ? query : most, fewest = least(query, fewest);
    }
    const i64 end = a.causal ? least(a.seq_k, most + 1) : a.seq_k;
    for (i64 j0 = 0; j0 < end; j0 += BK) {
        const i64 keys = least(BK, end - j0);
        const S *k = a.k + b * a.kb + kv * a.kh + j0 * a.ks, *values = a.v + b * a.vb + kv * a.vh + j0 * a.vs;
        if (rows <= FEW) few_score_block(a, rows, k, keys, w);
        else score_block(a, k, keys, vectors, w);
        const bool masked = a.causal && j0 + keys - 1 > fewest;
        for (i64 lane = 0; masked && lane < vectors * VL; lane++) {
            const i64 seen = (r0 + least(lane, rows - 1)) % a.seq_q - j0;
            w.last[lane] = (int32_t)(seen < -1 ? -1 : least(seen, BK));
        }
        for (i64 v = 0; v < vectors; v++)
            softmax_step(w.scores, keys, a.scale, masked ? (const vi*)w.last : nullptr, v, (vf*)w.top + v,
                         (vf*)w.sum + v, (vf*)w.alpha + v);
        if (rows <= FEW) few_value_block(a, rows, values, keys, w);
        else value_block(a, values, keys, vectors, w);
    }
    for (i64 lane = 0; lane < rows; lane++) {
        S* row = a.out + b * a.ob + (head + (r0 + lane) / a.seq_q) * a.oh + (r0 + lane) % a.seq_q * a.os;
        const i64 first = rows <= FEW ? lane * a.dim_v : lane, step = rows <= FEW ? 1 : BQ;
        for (i64 d = 0; d < a.dim_v; d++) store(row + d, a.seq_k ? w.out[first + d * step] / w.sum[lane] : 0.0f);
    }
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

template <class S> static int run(const Attention<S>& a) {
    const int threads = omp_get_max_threads();
    const i64 each = Scratch::floats(a.dim, a.dim_v), fold = a.folded(), rows = fold * a.seq_q;
    const i64 blocks = ceil_div(rows, BQ), head_groups = a.heads / fold, tasks = a.batch * head_groups * blocks;
    float* memory = workspace.get(each * threads);
    if (memory == nullptr) return 1;
#pragma omp parallel num_threads(threads)
    {
        const Scratch w(memory + each * omp_get_thread_num(), a.dim, a.dim_v);
#pragma omp for schedule(SCHEDULE)
        for (i64 task = 0; task < tasks; task++) {
            // Late blocks first: with a causal mask they are the long ones.
            const i64 block = blocks - 1 - task / (a.batch * head_groups), rest = task % (a.batch * head_groups);
            const i64 r0 = block * BQ;
            attend(a, rest / head_groups, rest % head_groups * fold, r0, least(BQ, rows - r0), w);
        }
    }
    return 0;
}

// Strides in elements; out's last dimension is contiguous. Every size is at least 1, but seq_k may be 0.
extern "C" int flash_attention(const void* q, const void* k, const void* v, void* out, i64 is_bf16, i64 batch,
                               i64 heads, i64 kv_heads, i64 seq_q, i64 seq_k, i64 dim, i64 dim_v, i64 causal, i64 qb,
                               i64 qh, i64 qs, i64 qd, i64 kb, i64 kh, i64 ks, i64 kd, i64 vb, i64 vh, i64 vs, i64 vd,
                               i64 ob, i64 oh, i64 os, double scale) {
    const float log2_scale = (float)(scale * 1.4426950408889634);
#define FILL(S)                                                                                                      \
    Attention<S> {                                                                                                   \
        (const S*)q, (const S*)k, (const S*)v, (S*)out, batch, heads, kv_heads, seq_q, seq_k, dim, dim_v, causal,    \
        qb, qh, qs, qd, kb, kh, ks, kd, vb, vh, vs, vd, ob, oh, os, log2_scale                                       \
    }
    return is_bf16 ? run(FILL(uint16_t)) : run(FILL(float));
}
"""


@functools.cache
def _library():
    flags = [f"-D{name}={value}" for name, value in CONFIG.items() if name != "OPT"]
    return build(SOURCE, flags=[CONFIG["OPT"], "-ffp-contract=fast", *flags])


def kernel_fn(q, k, v, causal=True, scale=None):
    """Attention over [batch, heads, seq, dim]; `scale` None means 1/sqrt(dim). Returns [batch, heads, seq_q, dim_v].

    Raises: TypeError for a dtype other than fp32 or bf16, ValueError for shapes that do not belong together.
    """
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"flash_attention takes fp32 or bf16 tensors of one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device.type == k.device.type == v.device.type == "cpu":
        raise ValueError(f"this kernel runs on the CPU, got tensors on {q.device}, {k.device} and {v.device}")
    _check_shapes(q.shape, k.shape, v.shape)
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k, dim_v = v.shape[1:]
    out = torch.empty((batch, heads, seq_q, dim_v), dtype=q.dtype)
    if out.numel() == 0:
        return out
    if scale is None:
        scale = 1 / math.sqrt(dim) if dim else 1.0
    sizes = (batch, heads, kv_heads, seq_q, seq_k, dim, dim_v)
    strides = (*q.stride(), *k.stride(), *v.stride(), *out.stride()[:3])
    _library().flash_attention(q, k, v, out, q.dtype == torch.bfloat16, *sizes, bool(causal), *strides, float(scale))
    return out


def _check_shapes(q, k, v):
    if not len(q) == len(k) == len(v) == 4:
        raise ValueError(f"flash_attention takes [batch, heads, seq, dim], got {tuple(q)}, {tuple(k)}, {tuple(v)}")
    if k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3] or k[1] == 0 or q[1] % k[1] != 0:
        raise ValueError(f"flash_attention: q {tuple(q)}, k {tuple(k)} and v {tuple(v)} do not belong together")
