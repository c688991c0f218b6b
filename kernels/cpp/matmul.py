"""matmul on the CPU: out[..., M, N] = a[..., M, K] @ b[..., K, N], fp32 or bf16 in and out, any strides.

One blocked product: a register tile of MR x (NV vectors) runs over packed panels of KC steps; one operand is read in
vectors (the lane side), the other is broadcast (the row side), and SWAP chooses which is which by computing
out^T = b^T @ a^T instead. Products with few rows take a path without packing. Sums are fp32, in an order that does not
depend on threads, and are rounded once. With AVX512-BF16, BF16_DOT multiplies pairs of bf16 in one instruction.
"""

import functools

import torch

from autokernel.native import build

KERNEL_TYPE = "matmul"
BACKEND = "cpp"
TUNABLES = {
    "MR": [4, 6, 8, 12],
    "NV": [1, 2, 3, 4],
    "MC": [96, 192, 384],
    "KC": [128, 256, 512, 1024],
    "NC": [512, 1024, 2048, 4096],
    "PACK_ROWS": [0, 1],
    "PACK_LANES": [0, 1],
    "SWAP": ["auto", "never", "always"],
    "SKINNY": [0, 1, 4, 8, 16],
    "UNROLL": [1, 2, 4],
    "BF16_DOT": [0, 1],
    "SCHEDULE": ["static", "dynamic"],
    "OPT": ["-O2", "-O3"],
}
CONFIG = {
    "MR": 6,
    "NV": 4,
    "MC": 192,
    "KC": 256,
    "NC": 2048,
    "PACK_ROWS": 1,
    "PACK_LANES": 1,
    "SWAP": "auto",
    "SKINNY": 8,
    "UNROLL": 1,
    "BF16_DOT": 1,
    "SCHEDULE": "static",
    "OPT": "-O3",
}

SOURCE = r"""
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <omp.h>

#ifdef __AVX512F__
#define VB 64
#else
#define VB 32
#endif
#define VL (VB / 4)
#define NR (NV * VL)
#define STR_(x) #x
#define STR(x) STR_(x)
#define EACH _Pragma("GCC unroll 16")  // early enough that the array it walks becomes registers
#define UNROLL_K _Pragma(STR(GCC unroll UNROLL))

typedef int64_t i64;
typedef float vf __attribute__((vector_size(VB)));
typedef float vfu __attribute__((vector_size(VB), aligned(4), may_alias));
typedef float vfh __attribute__((vector_size(VB), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(VB)));
typedef uint16_t vhu __attribute__((vector_size(VB / 2), aligned(2), may_alias));

const i64 M_CHUNK = 2048;     // rows packed at a time: bounds the workspace
const i64 LANE_PANELS = 8;    // lane panels of one task
const i64 ALIGN = 64;

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

// What one step of k is. A step of `Single` is one element widened to fp32; a step of `Pair` is two bf16 in 32 bits.
template <class S> struct Single {
    typedef S Src;
    static constexpr int width = 1;
    static constexpr bool direct = sizeof(S) == 4;
    static inline float step(const S* p, i64 stride, i64, i64) { return widen(*p); }
    static inline vf contiguous(const S* p) { return load(p); }
    static inline vf fma(vf acc, const float* row, vf lanes) { return acc + (vf{} + *row) * lanes; }
    typedef float Kept;  // how the few rows of a skinny product are kept
    static inline Kept keep(S x) { return widen(x); }
    static inline vf dot(vf acc, const Kept* x, vf w) { return acc + load(x) * w; }
};
#ifdef __AVX512BF16__
struct Pair {
    typedef uint16_t Src;
    static constexpr int width = 2;
    static constexpr bool direct = false;
    static inline float step(const uint16_t* p, i64 stride, i64 k, i64 total) {
        uint32_t bits = p[0] | (k + 1 < total ? (uint32_t)p[stride] << 16 : 0);
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    static inline vf contiguous(const uint16_t* p) { return *(const vfh*)p; }
    static inline vf fma(vf acc, const float* row, vf lanes) {
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(lanes), "m"(*row));
        return acc;
    }
    typedef uint16_t Kept;
    static inline Kept keep(uint16_t x) { return x; }
    static inline vf dot(vf acc, const Kept* x, vf w) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const vfh*)x));
        return acc;
    }
};
#endif

// dst[step][W] <- `count` (<= W) rows of src, the others zero: [lane][k] with any strides becomes [k][lane].
template <class P, int W>
static void pack(const typename P::Src* src, i64 s_lane, i64 s_k, i64 count, i64 length, float* dst) {
    const i64 steps = (length + P::width - 1) / P::width;
    if (count < W) memset(dst, 0, steps * W * sizeof(float));
    if (s_lane == 1 && P::width == 1) {
        for (i64 k = 0; k < length; k++)
            for (i64 lane = 0; lane < count; lane++) dst[k * W + lane] = P::step(src + k * s_k + lane, s_k, k, length);
        return;
    }
    const i64 whole = s_k == 1 ? length / (P::width * VL) * VL : 0;  // steps that are read in full vectors
    for (i64 k = 0; k < whole; k += VL)
        for (i64 lane = 0; lane < count; lane++) {
            vf values = P::contiguous(src + lane * s_lane + k * P::width);
            for (int j = 0; j < VL; j++) dst[(k + j) * W + lane] = values[j];
        }
    for (i64 k = whole; k < steps; k++)
        for (i64 lane = 0; lane < count; lane++)
            dst[k * W + lane] = P::step(src + lane * s_lane + k * P::width * s_k, s_k, k * P::width, length);
}

// acc[r][v] = sum over steps of row r's element times the lanes' vector.
template <class P>
static inline void tile(i64 steps, const float* rows, i64 s_row, i64 s_rk, const float* lanes, i64 s_lk,
                        vf acc[MR][NV]) {
    vf sum[MR][NV] = {};
    UNROLL_K
    for (i64 k = 0; k < steps; k++) {
        vf lane[NV];
        EACH for (int v = 0; v < NV; v++) lane[v] = load(lanes + k * s_lk + v * VL);
        EACH for (int r = 0; r < MR; r++)
            EACH for (int v = 0; v < NV; v++)
                sum[r][v] = P::fma(sum[r][v], rows + r * s_row + k * s_rk, lane[v]);
    }
    EACH for (int r = 0; r < MR; r++)
        EACH for (int v = 0; v < NV; v++) acc[r][v] = sum[r][v];
}

template <class S> struct Problem {
    const S *a, *b;   // rows [M, K] and lanes [K, N]
    S* out;
    i64 M, N, K, sam, sak, sbk, sbn, som, son;
};

// Write one tile: out = (k block is the first ? 0 : earlier sum) + acc. The sum of earlier k blocks lies in fp32.
template <class S>
static __attribute__((noinline)) void finish(vf acc[MR][NV], i64 rows, i64 lanes, S* out, i64 som, i64 son,
                                             float* sum, i64 ssm, i64 ssn, bool first, bool last) {
    if (sizeof(S) == 4 && rows == MR && lanes == NR && son == 1) {
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < NV; v++) {
                vfu* p = (vfu*)((float*)out + r * som + v * VL);
                *p = first ? acc[r][v] : acc[r][v] + *p;
            }
        return;
    }
    alignas(64) float buffer[MR][NR];
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) *(vf*)&buffer[r][v * VL] = acc[r][v];
    for (i64 n = 0; n < lanes; n++)
        for (i64 r = 0; r < rows; r++) {
            float value = buffer[r][n];
            if (!first) value += sum[r * ssm + n * ssn];
            if (last) store(out + r * som + n * son, value);
            else sum[r * ssm + n * ssn] = value;
        }
}

// A team of threads that share one product: thread `id` of `count`; a team of one needs no barrier.
struct Team {
    int id, count;
    std::atomic<i64>* next;
    void barrier() const {
        if (count > 1) {
#pragma omp barrier
        }
    }
    i64 begin(i64 tasks) const { return tasks * id / count; }
    i64 end(i64 tasks) const { return tasks * (id + 1) / count; }
};

static inline i64 ceil_div(i64 x, i64 y) { return (x + y - 1) / y; }
static inline i64 least(i64 x, i64 y) { return x < y ? x : y; }

// Row panels of one task: about MC rows, fewer where that leaves some threads with a task more than others.
static i64 balanced(i64 panels, i64 groups, int threads) {
    i64 blocks = ceil_div(panels, ceil_div(MC, MR));
    if (blocks * groups < 8 * threads) blocks = ceil_div(blocks * groups, threads) * threads / groups;
    return ceil_div(panels, blocks > 1 ? blocks : 1);
}

struct Space {  // floats of one team's workspace, each part a multiple of 16 so that the next one stays aligned
    i64 rows, lanes, sums;
    i64 total() const { return rows + lanes + sums; }
};
template <class P> static Space space_of(i64 M, i64 N, i64 K) {
    const i64 steps = least(KC, ceil_div(K, P::width)), m = least(M, M_CHUNK), n = least(N, NC + NR);
    const bool split = ceil_div(K, P::width) > KC && sizeof(typename P::Src) == 2;
    const i64 rows = ceil_div(m, MR) * MR * steps, lanes = ceil_div(n, NR) * NR * steps, sums = split ? m * n : 0;
    return {ceil_div(rows, 16) * 16, ceil_div(lanes, 16) * 16, ceil_div(sums, 16) * 16};
}

template <class P> struct Block {  // rows i0.. x lanes j0.. over the elements k0.. of k
    typedef typename P::Src S;
    const Problem<S>& p;
    float *packed_rows, *packed_lanes, *sums;
    i64 i0, j0, k0, m, n, length;
    i64 steps() const { return ceil_div(length, P::width); }
    const S* row(i64 panel) const { return p.a + (i0 + panel * MR) * p.sam + k0 * p.sak; }
    const S* lane(i64 panel) const { return p.b + (j0 + panel * NR) * p.sbn + k0 * p.sbk; }
    // A full panel can be read where it lies; the last, partial one is always packed and padded with zeros.
    bool row_direct(i64 panel) const { return P::direct && !PACK_ROWS && (panel + 1) * MR <= m; }
    bool lane_direct(i64 panel) const { return P::direct && !PACK_LANES && p.sbn == 1 && (panel + 1) * NR <= n; }

    void pack_row(i64 t) const {
        if (row_direct(t)) return;
        pack<P, MR>(row(t), p.sam, p.sak, least(MR, m - t * MR), length, packed_rows + t * MR * steps());
    }
    void pack_lane(i64 t) const {
        if (lane_direct(t)) return;
        pack<P, NR>(lane(t), p.sbn, p.sbk, least(NR, n - t * NR), length, packed_lanes + t * NR * steps());
    }
    void multiply(i64 r, i64 l) const {
        const bool rd = row_direct(r), ld = lane_direct(l);
        const float* rows = rd ? (const float*)row(r) : packed_rows + r * MR * steps();
        const float* lanes = ld ? (const float*)lane(l) : packed_lanes + l * NR * steps();
        vf acc[MR][NV];
        tile<P>(steps(), rows, rd ? p.sam : 1, rd ? p.sak : MR, lanes, ld ? p.sbk : NR, acc);
        S* out = p.out + (i0 + r * MR) * p.som + (j0 + l * NR) * p.son;
        const bool wide = sizeof(S) == 4;  // fp32 output holds the sums of earlier k blocks itself
        float* sum = wide ? (float*)out : sums + r * MR * n + l * NR;
        finish<S>(acc, least(MR, m - r * MR), least(NR, n - l * NR), out, p.som, p.son, sum, wide ? p.som : n,
                  wide ? p.son : 1, k0 == 0, k0 + length == p.K);
    }
};

template <class P> static void multiply_block(const Block<P>& block, const Team& team) {
    const i64 row_panels = ceil_div(block.m, MR), lane_panels = ceil_div(block.n, NR);
    for (i64 t = team.begin(lane_panels); t < team.end(lane_panels); t++) block.pack_lane(t);
    for (i64 t = team.begin(row_panels); t < team.end(row_panels); t++) block.pack_row(t);
    if (team.id == 0) *team.next = 0;
    team.barrier();
    const i64 groups = ceil_div(lane_panels, LANE_PANELS), per = balanced(row_panels, groups, team.count);
    const i64 tasks = ceil_div(row_panels, per) * groups, end = DYNAMIC ? tasks : team.end(tasks);
    for (i64 task = DYNAMIC ? team.next->fetch_add(1) : team.begin(tasks); task < end;
         task = DYNAMIC ? team.next->fetch_add(1) : task + 1) {
        const i64 r0 = task / groups * per, l0 = task % groups * LANE_PANELS;
        for (i64 l = l0; l < least(l0 + LANE_PANELS, lane_panels); l++)
            for (i64 r = r0; r < least(r0 + per, row_panels); r++) block.multiply(r, l);
    }
    team.barrier();
}

template <class P> static void product(const Problem<typename P::Src>& p, float* space, const Team& team) {
    const Space need = space_of<P>(p.M, p.N, p.K);
    const i64 nc = ceil_div(NC, NR) * NR, kc = KC * P::width;
    float* packed_lanes = space + need.rows;
    float* sums = packed_lanes + need.lanes;
    for (i64 j0 = 0; j0 < p.N; j0 += nc)
        for (i64 i0 = 0; i0 < p.M; i0 += M_CHUNK)
            for (i64 k0 = 0; k0 < p.K; k0 += kc)
                multiply_block<P>({p, space, packed_lanes, sums, i0, j0, k0, least(M_CHUNK, p.M - i0),
                                   least(nc, p.N - j0), least(kc, p.K - k0)}, team);
}

// Few rows: every element of b is read once, straight from its place. a's rows lie at `x` [M, K].
static inline float total(vf v) {
    float sum = 0;
    for (int width = VL / 2; width > 0; width /= 2)
        for (int j = 0; j < width; j++) v[j] += v[j + width];
    return sum + v[0];
}

template <class P, int R>  // k runs along memory: dot products of R rows with four columns at a time
static void dots(const Problem<typename P::Src>& p, const typename P::Kept* x, i64 m, i64 n, i64 columns) {
    typedef typename P::Src S;
    const i64 width = P::width * VL;
    vf acc[R][4] = {};
    const S* column[4];
    for (int c = 0; c < 4; c++) column[c] = p.b + (n + (c < columns ? c : 0)) * p.sbn;
    i64 k = 0;
    for (; k + width <= p.K; k += width)
        EACH for (int c = 0; c < 4; c++) {
            vf w = P::contiguous(column[c] + k);
            EACH for (int r = 0; r < R; r++) acc[r][c] = P::dot(acc[r][c], x + (m + r) * p.K + k, w);
        }
    vf sum[R][4];  // a copy: indexing acc itself in a real loop would keep it in memory above
    EACH for (int r = 0; r < R; r++)
        EACH for (int c = 0; c < 4; c++) sum[r][c] = acc[r][c];
    for (int r = 0; r < R; r++)
        for (i64 c = 0; c < columns; c++) {
            float value = total(sum[r][c]);
            for (i64 j = k; j < p.K; j++) value += widen(x[(m + r) * p.K + j]) * widen(column[c][j]);
            store(p.out + (m + r) * p.som + (n + c) * p.son, value);
        }
}

template <class S, int R>  // columns run along memory (or nothing does): sums of up to SPAN columns stay in cache
static void sweep(const Problem<S>& p, const float* x, i64 m, i64 n, i64 columns) {
    const int SPAN = 512;
    alignas(64) float acc[R][SPAN];
    memset(acc, 0, sizeof acc);
    for (i64 k = 0; k < p.K; k++) {
        const S* row = p.b + k * p.sbk + n * p.sbn;
        i64 c = 0;
        if (p.sbn == 1)
            for (; c + VL <= columns; c += VL) {
                vf w = load(row + c);
                for (int r = 0; r < R; r++) *(vf*)&acc[r][c] += (vf{} + x[(m + r) * p.K + k]) * w;
            }
        for (; c < columns; c++)
            for (int r = 0; r < R; r++) acc[r][c] += x[(m + r) * p.K + k] * widen(row[c * p.sbn]);
    }
    for (int r = 0; r < R; r++)
        for (i64 c = 0; c < columns; c++) store(p.out + (m + r) * p.som + (n + c) * p.son, acc[r][c]);
}

template <class P, int R>
static void skinny_rows(const Problem<typename P::Src>& p, const float* x, i64 m, i64 n, i64 columns) {
    if (p.sbk == 1) dots<P, R>(p, (const typename P::Kept*)x, m, n, columns);
    else sweep<typename P::Src, R>(p, x, m, n, columns);
}
template <class P> static void skinny(const Problem<typename P::Src>& p, float* x, const Team& team) {
    const bool along_k = p.sbk == 1;
    for (i64 i = team.begin(p.M * p.K); i < team.end(p.M * p.K); i++) {
        const typename P::Src value = p.a[i / p.K * p.sam + i % p.K * p.sak];
        if (along_k) ((typename P::Kept*)x)[i] = P::keep(value);
        else x[i] = widen(value);
    }
    team.barrier();
    const i64 step = along_k ? 4 : least(512, least(p.N, ceil_div(ceil_div(p.N, team.count), VL) * VL));
    const i64 tasks = ceil_div(p.N, step);
    for (i64 t = team.begin(tasks); t < team.end(tasks); t++) {
        const i64 n = t * step, columns = least(step, p.N - n);
        i64 m = 0;
        for (; m + 4 <= p.M; m += 4) skinny_rows<P, 4>(p, x, m, n, columns);
        for (; m + 2 <= p.M; m += 2) skinny_rows<P, 2>(p, x, m, n, columns);
        for (; m < p.M; m++) skinny_rows<P, 1>(p, x, m, n, columns);
    }
    team.barrier();
}

// Kept between calls, one per calling thread: fresh pages for every call would cost more than packing itself.
struct Workspace {
    float* memory = nullptr;
    i64 floats = 0;
    float* get(i64 wanted) {
        if (memory == nullptr || wanted > floats) {
            free(memory);
            memory = (float*)aligned_alloc(ALIGN, ceil_div(wanted * 4 + 1, ALIGN) * ALIGN);
            floats = memory ? wanted : 0;
        }
        return memory;
    }
    ~Workspace() { free(memory); }
};
static thread_local Workspace workspace;

static void transpose(i64& x, i64& y) { i64 t = x; x = y; y = t; }

template <class P>
static int batched(Problem<typename P::Src> p, const i64* size, const i64* sa, const i64* sb) {
    const i64 items = size[0] * size[1] * size[2] * size[3];
    const bool few = least(p.M, p.N) <= SKINNY;
    const i64 item_out = p.M * p.N;
    // The lane side is the long one of a skinny product; else the one that lies along memory and packs by copying.
    const bool swap = few ? p.N < p.M : SWAP == 2 || (SWAP == 1 && p.sbn != 1 && p.sam == 1);
    if (swap) {
        const typename P::Src* keep = p.a;
        p.a = p.b, p.b = keep;
        transpose(p.M, p.N), transpose(p.som, p.son);
        i64 sam = p.sam, sak = p.sak;
        p.sam = p.sbn, p.sak = p.sbk, p.sbk = sak, p.sbn = sam;
        const i64* batch = sa;
        sa = sb, sb = batch;
    }
    const i64 need = ceil_div(few ? p.M * p.K : space_of<P>(p.M, p.N, p.K).total(), 16) * 16;
    const int threads = omp_get_max_threads();
    const bool apart = items >= 2 * threads;  // enough products for each thread to compute whole ones on its own
    float* space = workspace.get(need * (apart ? threads : 1));
    if (space == nullptr) return 1;
    std::atomic<i64> shared{0};
#pragma omp parallel num_threads(threads)
    {
        std::atomic<i64> own{0};
        const int id = omp_get_thread_num(), count = omp_get_num_threads();
        const Team team = apart ? Team{0, 1, &own} : Team{id, count, &shared};
        const i64 begin = apart ? items * id / count : 0, end = apart ? items * (id + 1) / count : items;
        for (i64 item = begin; item < end; item++) {
            Problem<typename P::Src> one = p;
            i64 rest = item;
            for (int d = 3; d >= 0; d--) {
                one.a += rest % size[d] * sa[d], one.b += rest % size[d] * sb[d];
                rest /= size[d];
            }
            one.out += item * item_out;
            if (few) skinny<P>(one, space + (apart ? id * need : 0), team);
            else product<P>(one, space + (apart ? id * need : 0), team);
        }
    }
    return 0;
}

extern "C" int clear(void* out, i64 bytes) {  // the empty sum
    if (bytes > 0) memset(out, 0, bytes);
    return 0;
}

// a [b0..b3, M, K], b [b0..b3, K, N] with any strides; out contiguous; M, N, K and the batch sizes at least 1.
extern "C" int matmul(const void* a, const void* b, void* out, i64 is_bf16, i64 M, i64 N, i64 K, i64 sam, i64 sak,
                      i64 sbk, i64 sbn, i64 n0, i64 n1, i64 n2, i64 n3, i64 a0, i64 a1, i64 a2, i64 a3, i64 b0, i64 b1,
                      i64 b2, i64 b3) {
    const i64 size[4] = {n0, n1, n2, n3}, sa[4] = {a0, a1, a2, a3}, sb[4] = {b0, b1, b2, b3};
    if (!is_bf16) {
        const Problem<float> p = {(const float*)a, (const float*)b, (float*)out, M, N, K, sam, sak, sbk, sbn, N, 1};
        return batched<Single<float>>(p, size, sa, sb);
    }
    typedef const uint16_t* In;
    const Problem<uint16_t> p = {(In)a, (In)b, (uint16_t*)out, M, N, K, sam, sak, sbk, sbn, N, 1};
#if BF16_DOT && defined(__AVX512BF16__)
    return batched<Pair>(p, size, sa, sb);
#else
    return batched<Single<uint16_t>>(p, size, sa, sb);
#endif
}
"""

SWAP_CODES = {"never": 0, "auto": 1, "always": 2}
MAX_BATCH_DIMS = 4


@functools.cache
def _library():
    macros = {**CONFIG, "SWAP": SWAP_CODES[CONFIG["SWAP"]], "DYNAMIC": int(CONFIG["SCHEDULE"] == "dynamic")}
    flags = [f"-D{name}={value}" for name, value in macros.items() if name not in ("OPT", "SCHEDULE")]
    return build(SOURCE, flags=[CONFIG["OPT"], "-ffp-contract=fast", *flags])


def kernel_fn(a, b):
    """a [..., M, K] @ b [..., K, N] -> [..., M, N], fp32 or bf16, batch dimensions broadcast, as torch.matmul."""
    if a.dtype != b.dtype or a.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"matmul takes two fp32 or two bf16 tensors, got {a.dtype} and {b.dtype}")
    if a.device.type != "cpu" or b.device.type != "cpu":
        raise ValueError(f"this kernel runs on the CPU, got tensors on {a.device} and {b.device}")
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError("matmul takes tensors with at least one dimension")
    a_row, b_column = a.dim() == 1, b.dim() == 1
    a = a.unsqueeze(0) if a_row else a
    b = b.unsqueeze(1) if b_column else b
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul: inner sizes differ, {tuple(a.shape)} and {tuple(b.shape)}")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    shape = [*batch, *([] if a_row else [rows]), *([] if b_column else [columns])]
    out = torch.empty(shape, dtype=a.dtype)
    if inner == 0 or 0 in shape:
        _library().clear(out, out.numel() * out.element_size())
        return out
    a, b = a.expand(*batch, rows, inner), b.expand(*batch, inner, columns)
    dims = _merged(list(zip(batch, a.stride(), b.stride(), strict=False)))
    row_stride = dims[-1][1] if dims and rows == 1 else a.stride(-2)
    if dims and dims[-1][2] == 0 and dims[-1][1] == rows * row_stride:  # one b for the whole batch: a taller a
        rows *= dims.pop()[0]
    else:
        row_stride = a.stride(-2)
    if len(dims) > MAX_BATCH_DIMS:
        raise ValueError(f"matmul takes at most {MAX_BATCH_DIMS} batch dimensions that cannot be merged")
    dims = [(1, 0, 0)] * (MAX_BATCH_DIMS - len(dims)) + dims
    sizes, a_strides, b_strides = zip(*dims, strict=True)
    is_bf16 = a.dtype == torch.bfloat16
    strides = (row_stride, a.stride(-1), b.stride(-2), b.stride(-1))
    _library().matmul(a, b, out, is_bf16, rows, columns, inner, *strides, *sizes, *a_strides, *b_strides)
    return out


def _merged(dims):
    """Batch dimensions (size, stride in a, stride in b) with neighbours joined where both operands allow it."""
    merged = []
    for size, a_stride, b_stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * a_stride, size * b_stride):
            size *= merged.pop()[0]
        merged.append((size, a_stride, b_stride))
    return merged
