"""What the CUDA bases share, put before them: reading and writing an element of any dtype, and building the source."""

import functools

import torch

from autokernel.native import build

ACCESS = r"""
#include <stdint.h>

// dtype: 0 fp32, 1 fp16, 2 bf16
static __device__ float get(const void* p, int64_t i, int dtype) {
  if (dtype == 0) return ((const float*)p)[i];
  const uint16_t bits = ((const uint16_t*)p)[i];
  if (dtype == 2) return __uint_as_float(uint32_t(bits) << 16);
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
static __device__ void put(void* p, int64_t i, float v, int dtype) {
  uint16_t bits;
  if (dtype == 0) ((float*)p)[i] = v;
  else if (dtype == 1) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  if (dtype != 0) ((uint16_t*)p)[i] = bits;
}
"""
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@functools.cache
def library(source):
    return build(ACCESS + source, backend="cuda")


def edit(source, *changes):
    """`source` with each (old, new) replaced; every old text must stand there just once."""
    for old, new in changes:
        assert source.count(old) == 1, f"{source.count(old)} places hold {old!r}"
        source = source.replace(old, new)
    return source
