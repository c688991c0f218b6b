"""Compiled resources, of Triton kernels and of CUDA libraries, with no GPU."""

import pytest
import torch

from autokernel import resources
from autokernel.gpus import lookup
from autokernel.native import compile_library, find_nvcc
from autokernel.records import KernelResources

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function second:
  REG:40 STACK:16 SHARED:1152 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z5firstILi4EEvPf:
  REG:255 STACK:0 SHARED:0 LOCAL:64 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_usage_is_read_for_every_function():
    first, second = resources.read_usage(USAGE)
    assert (first.registers, first.stack_bytes, first.shared_bytes) == (255, 64, 0)
    assert second == KernelResources(kernel="second", registers=40, stack_bytes=16, shared_bytes=1152)
    assert first.kernel in ("first<4>", "_Z5firstILi4EEvPf")
    assert resources.read_usage("nothing") == ()


def test_occupancy_follows_the_scarcest_resource():
    h100 = lookup("NVIDIA H100 80GB HBM3")
    assert h100 is not None

    def fit(**known):
        return resources.with_occupancy(KernelResources(kernel="k", **known), h100).blocks_per_sm

    assert fit(registers=32, shared_bytes=0, threads=256) == 8  # threads
    assert fit(registers=128, shared_bytes=0, threads=256) == 2  # registers
    assert fit(registers=32, shared_bytes=100 << 10, threads=128) == 2  # shared memory
    assert fit(registers=255, shared_bytes=0, threads=1024) == 0  # cannot be launched
    assert fit(registers=None, shared_bytes=0, threads=256) is None


def test_triton_launches_have_resources(twice):
    (nvidia,) = resources.of_triton(twice, {"x": torch.zeros(5000)}, "sm_90")
    assert (nvidia.kernel, nvidia.threads, nvidia.stack_bytes, nvidia.shared_bytes) == ("twice", 256, 0, 0)
    assert nvidia.registers
    (amd,) = resources.of_triton(twice, {"x": torch.zeros(5000)}, "gfx942")
    assert amd.threads == 512


@pytest.mark.skipif(find_nvcc() is None or resources.find_cuobjdump() is None, reason="no nvcc or no cuobjdump")
def test_library_is_read_and_what_is_none_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOKERNEL_BUILD_DIR", str(tmp_path))
    source = "__global__ void fill(float* x) { __shared__ float s[64]; s[threadIdx.x % 64] = 1; *x = s[3]; }\n"
    source += 'extern "C" int run(float* x, cudaStream_t s) { fill<<<1, 32, 0, s>>>(x); return cudaGetLastError(); }\n'
    (found,) = resources.of_library(compile_library(source, backend="cuda", arch="80"))
    assert found.kernel == "fill"
    assert found.registers
    assert found.stack_bytes == 0
    assert found.threads is None
    text = tmp_path / "no.so"
    text.write_text("no library")
    assert not resources.of_library(text)
    assert resources.of_library(tmp_path / "missing.so") is None
