"""Rotary position embedding: each pair (a, b) of a head turns by its angle: (a cos - b sin, b cos + a sin).

x: [..., heads, seq, head_dim], fp32, bf16 or fp16, any strides; cos and sin: [seq, head_dim / 2], same dtype. The pair
of angle i is (x[i], x[i + head_dim / 2]), or (x[2i], x[2i + 1]) when interleaved. Computed in fp32, rounded once.

The work is bound by reading x and writing the output once. A thread takes the same 16 bytes of the first half and of
the second half of a position, in both arrangements, for several heads: it issues the loads of all its heads before it
uses the first, and loads cos and sin once. Neighbouring threads take neighbouring pieces, then positions, then groups
of heads, so that any sizes fill whole blocks, down to one token. A half that is no multiple of 16 bytes, or addresses
off them, take the same path one pair at a time. A transposed [batch, seq, heads, head_dim] is read where it is.
"""

import array
import functools
import math

import torch

from autokernel.native import build
from autokernel.target import target_of

KERNEL_TYPE = "rotary_embedding"
BACKEND = "cuda"
TUNABLES = {
    "BLOCK": [128, 256, 512],  # threads per block
    "HEADS": [1, 2, 4, 8],  # heads per thread, fewer where they would leave multiprocessors idle
    "LOAD": ["plain", "stream", "last"],  # cache policy of x: kept in L1, not kept there, first to leave L1 and L2
    "STORE": ["plain", "stream"],  # the same of the output: kept in L2, or first to leave it
    "RESIDENT": [
        512,
        768,
        896,
        1024,
        1280,
        1536,
        2048,
    ],  # threads per multiprocessor that registers must leave room for
}
CONFIG = {"BLOCK": 256, "HEADS": 1, "LOAD": "plain", "STORE": "stream", "RESIDENT": 1280}

SOURCE = r"""
#include <stdint.h>

// 16-bit numbers as bits: the conversions are one instruction each, and the headers cost more than the kernels.
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

struct Plan {                // what _plan wrote; strides in elements
  int64_t dtype, wide, interleaved, blocks;
  int64_t packs, seq, rows;  // pieces of half a head, positions, batch x heads
  int64_t heads, group;      // heads per batch, rows per thread
  int64_t batch_stride, head_stride, seq_stride, stride, cos_stride, sin_stride;
};

// The numbers in a 32-bit word as floats, and back.
template <class T> struct Word;
template <> struct Word<float> {
  static __device__ __forceinline__ void widen(uint32_t w, float* v) { v[0] = __uint_as_float(w); }
  static __device__ __forceinline__ uint32_t narrow(const float* v) { return __float_as_uint(v[0]); }
};
template <> struct Word<bf16> {
  static __device__ __forceinline__ void widen(uint32_t w, float* v) {
    v[0] = __uint_as_float(w << 16);
    v[1] = __uint_as_float(w & 0xffff0000);
  }
  static __device__ __forceinline__ uint32_t narrow(const float* v) {
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(v[1]), "f"(v[0]));
    return w;
  }
};
template <> struct Word<f16> {
  static __device__ __forceinline__ void widen(uint32_t w, float* v) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(v[0]), "=f"(v[1]) : "r"(w));
  }
  static __device__ __forceinline__ uint32_t narrow(const float* v) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(v[1]), "f"(v[0]));
    return w;
  }
};

// COUNT numbers of type T on whole 4-byte words, or a single one.
template <class T, int COUNT> struct Pack {
  static const int WORDS = COUNT * sizeof(T) / 4, PER_WORD = 4 / sizeof(T);
  uint32_t word[WORDS];
  __device__ __forceinline__ void load(const T* from) {  // a table: every group of heads reads it again
    if constexpr (WORDS == 4) take(*reinterpret_cast<const uint4*>(from));
    else {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      word[0] = v.x, word[1] = v.y;
    }
  }
  __device__ __forceinline__ void load_once(const T* p) {
    uint4 v;
#if LOAD == 0
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#elif LOAD == 1
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#else
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#endif
    take(v);
  }
  __device__ __forceinline__ void store(T* p) const {
    const uint4 v = make_uint4(word[0], word[1], word[2], word[3]);
#if STORE == 0
    *reinterpret_cast<uint4*>(p) = v;
#else
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
  }
  __device__ __forceinline__ void widen(float* v) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) Word<T>::widen(word[i], v + i * PER_WORD);
  }
  __device__ __forceinline__ void narrow(const float* v) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = Word<T>::narrow(v + i * PER_WORD);
  }
  __device__ __forceinline__ void take(uint4 v) { word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w; }
};
template <class T> struct Pack<T, 1> {
  T raw;
  __device__ __forceinline__ void load(const T* p) { raw = *p; }
  __device__ __forceinline__ void load_once(const T* p) { raw = *p; }
  __device__ __forceinline__ void store(T* p) const { *p = raw; }
  __device__ __forceinline__ void widen(float* v) const {
    float pair[2];
    if constexpr (sizeof(T) == 4) v[0] = raw;
    else Word<T>::widen(raw.bits, pair), v[0] = pair[0];
  }
  __device__ __forceinline__ void narrow(const float* v) {
    const float pair[2] = {v[0], 0.0f};
    if constexpr (sizeof(T) == 4) raw = v[0];
    else raw.bits = uint16_t(Word<T>::narrow(pair));
  }
};

// The cosines or sines of VEC pairs. Those of interleaved pieces lie apart: VEC / 2 for the piece in the first half of
// the head, and as many for that in the second.
template <class T, int VEC, bool INTERLEAVED>
__device__ __forceinline__ void load_angles(const T* table, int64_t pack, int64_t half, float (&v)[VEC]) {
  if constexpr (VEC > 1 && INTERLEAVED) {
    Pack<T, VEC / 2> first, second;
    first.load(table + pack * (VEC / 2));
    second.load(table + half / 2 + pack * (VEC / 2));
    first.widen(v);
    second.widen(v + VEC / 2);
  } else {
    Pack<T, VEC> all;
    all.load(table + pack * VEC);
    all.widen(v);
  }
}

template <class T, int VEC, bool INTERLEAVED>
__global__ void __launch_bounds__(BLOCK, RESIDENT / BLOCK)
rotate(const T* __restrict__ x, const T* __restrict__ cos, const T* __restrict__ sin, T* __restrict__ y,
       const __grid_constant__ Plan plan) {
  const uint64_t thread = uint64_t(blockIdx.x) * BLOCK + threadIdx.x, place = thread / uint64_t(plan.packs);
  const int64_t pack = thread - place * plan.packs, part = place / uint64_t(plan.seq), s = place - part * plan.seq;
  const int64_t half = plan.packs * VEC, row = part * plan.group;
  const int left = int(plan.rows - row < plan.group ? plan.rows - row : plan.group);
  if (left <= 0) return;
  // Two pieces are one of each half of the head; two single numbers are a pair.
  const bool neighbours = VEC == 1 && INTERLEAVED;
  const int64_t at = neighbours ? 2 * pack : VEC * pack, apart = neighbours ? 1 : half;
  int64_t batch = row / plan.heads, head = row - batch * plan.heads;
  const T* from = x + batch * plan.batch_stride + head * plan.head_stride + s * plan.seq_stride + at * plan.stride;
  Pack<T, VEC> a[HEADS], b[HEADS];
#pragma unroll
  for (int k = 0; k < HEADS; ++k)
    if (k < left) {
      a[k].load_once(from);
      b[k].load_once(from + apart * plan.stride);
      from += plan.head_stride;
      if (++head == plan.heads) {
        head = 0;
        from += plan.batch_stride - plan.heads * plan.head_stride;
      }
    }
  float c[VEC], d[VEC];
  load_angles<T, VEC, INTERLEAVED>(cos + s * plan.cos_stride, pack, half, c);
  load_angles<T, VEC, INTERLEAVED>(sin + s * plan.sin_stride, pack, half, d);
  T* to = y + (row * plan.seq + s) * 2 * half + at;
#pragma unroll
  for (int k = 0; k < HEADS; ++k)
    if (k < left) {
      float v[2 * VEC], turned[2 * VEC];
      a[k].widen(v);
      b[k].widen(v + VEC);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const int first = INTERLEAVED ? 2 * i : i, second = INTERLEAVED ? 2 * i + 1 : i + VEC;
        turned[first] = v[first] * c[i] - v[second] * d[i];
        turned[second] = v[second] * c[i] + v[first] * d[i];
      }
      a[k].narrow(turned);
      b[k].narrow(turned + VEC);
      a[k].store(to);
      b[k].store(to + apart);
      to += plan.seq * 2 * half;
    }
}

template <class T>
static int launch(const Plan& plan, const void* x, const void* cos, const void* sin, void* y, cudaStream_t stream) {
  constexpr int VEC = 16 / sizeof(T);
  if (plan.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const unsigned blocks = unsigned(plan.blocks);
  const T *in = static_cast<const T*>(x), *c = static_cast<const T*>(cos), *s = static_cast<const T*>(sin);
  T* out = static_cast<T*>(y);
  if (plan.wide && plan.interleaved) rotate<T, VEC, true><<<blocks, BLOCK, 0, stream>>>(in, c, s, out, plan);
  else if (plan.wide) rotate<T, VEC, false><<<blocks, BLOCK, 0, stream>>>(in, c, s, out, plan);
  else if (plan.interleaved) rotate<T, 1, true><<<blocks, BLOCK, 0, stream>>>(in, c, s, out, plan);
  else rotate<T, 1, false><<<blocks, BLOCK, 0, stream>>>(in, c, s, out, plan);
  return cudaGetLastError();
}

// plan: the address of a Plan.
extern "C" int rotary(const void* x, const void* cos, const void* sin, void* y, int64_t address, cudaStream_t stream) {
  const Plan& plan = *reinterpret_cast<const Plan*>(address);
  if (plan.dtype == 0) return launch<float>(plan, x, cos, sin, y, stream);
  if (plan.dtype == 1) return launch<bf16>(plan, x, cos, sin, y, stream);
  return launch<f16>(plan, x, cos, sin, y, stream);
}
"""
flags = [f"-D{knob}={CONFIG[knob]}" for knob in ("BLOCK", "HEADS", "RESIDENT")]
flags += [f"-D{knob}={TUNABLES[knob].index(CONFIG[knob])}" for knob in ("LOAD", "STORE")]
lib = build(SOURCE, backend="cuda", flags=flags)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FULL = 512  # threads per multiprocessor, with their loads in flight, that keep the memory busy


def kernel_fn(x, cos, sin, interleaved=False):
    """x with every pair turned, in x's shape and dtype, contiguous.

    Raises: TypeError for another dtype or device; ValueError when cos and sin do not fit x.
    """
    if x.dtype not in DTYPES or not x.is_cuda:
        raise TypeError(f"rotary_embedding takes fp32, bf16 or fp16 on a GPU, not {x.dtype} on {x.device}")
    for angles in (cos, sin):
        if angles.dtype != x.dtype or angles.device != x.device:
            raise TypeError(f"cos or sin is {angles.dtype} on {angles.device}, x is {x.dtype} on {x.device}")
    if x.dim() > 4:
        x = x.contiguous()
    cos = cos if cos.stride(-1) == 1 else cos.contiguous()
    sin = sin if sin.stride(-1) == 1 else sin.contiguous()
    aligned = (x.data_ptr() | cos.data_ptr() | sin.data_ptr()) % 16 == 0
    plan = _plan(
        x.shape, x.stride(), cos.shape, cos.stride(), sin.shape, sin.stride(),
        x.dtype, aligned, bool(interleaved), target_of(x).sms,
    )  # fmt: skip
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if plan:
        lib.rotary(x, cos, sin, out, plan.buffer_info()[0])
    return out


@functools.lru_cache(maxsize=4096)
def _plan(shape, strides, cos_shape, cos_strides, sin_shape, sin_strides, dtype, aligned, interleaved, sms):
    """The words of C's struct Plan; none when x is empty."""
    if len(shape) < 2 or shape[-1] % 2:
        raise ValueError(f"x has shape {list(shape)}, expected [..., seq, head_dim] with an even head_dim")
    seq, half = shape[-2], shape[-1] // 2
    for angles in (cos_shape, sin_shape):
        if angles != (seq, half):
            raise ValueError(f"cos or sin has shape {list(angles)}, x {list(shape)}; expected [seq, head_dim / 2]")
    rows, heads = math.prod(shape[:-2]), shape[-3] if len(shape) > 2 else 1
    if not rows * seq * half:
        return array.array("q")
    if len(shape) > 4:  # contiguous then: the leading dimensions are one
        shape, strides = (rows // heads, *shape[-3:]), (math.prod(shape[-3:]), *strides[-3:])
    used = [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    batch_stride, head_stride, seq_stride = [0, 0, *used][-4:-1]
    per_pack = 16 // dtype.itemsize
    apart = (half, batch_stride, head_stride, seq_stride, cos_strides[0], sin_strides[0])
    wide = aligned and strides[-1] == 1 and all(stride % per_pack == 0 for stride in apart)
    packs = half // per_pack if wide else half
    group = CONFIG["HEADS"]
    while group > 1 and seq * packs * (rows // group) < FULL * sms:
        group //= 2
    threads = seq * packs * -(-rows // group)
    return array.array("q", [
        DTYPES[dtype], wide, interleaved, -(-threads // CONFIG["BLOCK"]), packs, seq, rows, heads, group,
        batch_stride, head_stride, seq_stride, strides[-1], cos_strides[0], sin_strides[0],
    ])  # fmt: skip
