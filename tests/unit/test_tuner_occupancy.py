"""Blocks per multiprocessor: values worked out from the vendors' published limits, and NVIDIA's own calculator."""

import importlib.util
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from autokernel import gpus
from autokernel.tuner.occupancy import Bound, fit

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")

WORKED_OUT = [
    # arch, registers, shared bytes, threads -> blocks, what bounds them
    ("sm_90", 32, 0, 256, 8, Bound.THREADS),  # 2048 / 256
    ("sm_90", 32, 0, 32, 32, Bound.BLOCKS),  # 64 warps would fit
    ("sm_90", 128, 0, 256, 2, Bound.REGISTERS),  # 4096 a warp: 4 warps a partition
    ("sm_90", 33, 0, 128, 12, Bound.REGISTERS),  # 1280 a warp: 12 in each partition of 16384, so 48 warps
    ("sm_90", 65, 0, 32, 28, Bound.REGISTERS),  # 2304 a warp: 7 in each partition, not 65536 // 2304 = 28.4
    ("sm_90", 168, 0, 384, 1, Bound.REGISTERS),  # 5376 a warp: 3 in each partition, so 12 warps
    ("sm_90", 255, 0, 512, 0, Bound.REGISTERS),  # 16 warps of 8192
    ("sm_90", 32, 227 << 10, 128, 1, Bound.SHARED),
    ("sm_90", 32, 113 << 10, 128, 2, Bound.SHARED),  # with the driver's 1 KiB exactly half of 228
    ("sm_90", 32, (113 << 10) + 1, 128, 1, Bound.SHARED),
    ("sm_90", 32, (227 << 10) + 1, 128, 0, Bound.SHARED),
    ("sm_80", 32, 163 << 10, 128, 1, Bound.SHARED),
    ("sm_86", 32, 0, 64, 16, Bound.BLOCKS),
    ("sm_89", 32, 0, 64, 24, Bound.BLOCKS),  # as many as 1536 threads are
    ("sm_89", 40, 0, 256, 6, Bound.THREADS),
    ("gfx942", 128, 0, 256, 4, Bound.REGISTERS),  # 4 waves a SIMD, one of each workgroup
    ("gfx942", 64, 0, 256, 8, Bound.REGISTERS),  # 8 waves a SIMD
    ("gfx942", 130, 0, 256, 3, Bound.REGISTERS),  # in units of 8
    ("gfx942", 32, 40 << 10, 256, 1, Bound.SHARED),
    ("gfx942", 32, 0, 64, 32, Bound.REGISTERS),  # a wave needs no barrier
    ("gfx942", 32, 0, 128, 16, Bound.REGISTERS),
    ("gfx950", 32, 40 << 10, 256, 4, Bound.SHARED),
]


@pytest.mark.parametrize(("arch", "registers", "shared", "threads", "blocks", "bound"), WORKED_OUT)
def test_worked_out_by_hand(arch, registers, shared, threads, blocks, bound):
    limits = gpus.limits(arch)
    found = fit(limits, registers=registers, shared_bytes=shared, threads=threads)
    assert found.blocks == blocks
    assert found.occupancy == pytest.approx(blocks * threads / limits.threads)
    if blocks not in (limits.threads // threads, limits.blocks):  # two resources may be used up at once
        assert found.bound is bound


def test_more_than_a_block_holds_is_no_launch():
    assert fit(gpus.limits("sm_90"), registers=16, shared_bytes=0, threads=1056).blocks == 0
    assert fit(gpus.limits("sm_90"), registers=256, shared_bytes=0, threads=32).blocks == 0


def test_unknown_architecture_has_no_limits():
    assert gpus.limits("sm_70") is None


@pytest.mark.parametrize("gpu", gpus.table(), ids=lambda gpu: gpu.name)
def test_each_gpu_has_limits_that_agree_with_its_entry(gpu):
    limits = gpus.limits(gpu.arch)
    assert limits.shared_bytes == gpu.shared_bytes_per_sm
    assert limits.shared_bytes_per_block == gpu.shared_bytes


CALCULATOR = r"""
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
  int major, minor, threads_per_sm, registers, threads;
  size_t shared, shared_per_sm, shared_per_block;
  while (scanf("%d %d %d %zu %zu %d %zu %d", &major, &minor, &threads_per_sm, &shared_per_sm, &shared_per_block,
               &registers, &shared, &threads) == 8) {
    cudaOccDeviceProp device{};
    device.computeMajor = major; device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024; device.maxThreadsPerMultiprocessor = threads_per_sm;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536; device.warpSize = 32; device.numSms = 1;
    device.sharedMemPerBlock = 49152; device.sharedMemPerMultiprocessor = shared_per_sm;
    device.sharedMemPerBlockOptin = shared_per_block; device.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes kernel{};
    kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers; kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF; kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = shared_per_block;
    cudaOccDeviceState state{};
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result{};
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    printf("%d\n", error ? -error : result.activeBlocksPerMultiprocessor);
  }
}
"""


def header_folder():
    """Where NVIDIA's calculator is: in the toolkit, or in the triton package."""
    triton = importlib.util.find_spec("triton")
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    if triton is not None and triton.origin:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    return next((place for place in places if (place / "cuda_occupancy.h").is_file()), None)


@pytest.mark.skipif(header_folder() is None or shutil.which("g++") is None, reason="no cuda_occupancy.h or no g++")
def test_same_as_nvidias_calculator(tmp_path):
    source, program = tmp_path / "calculator.cpp", tmp_path / "calculator"
    source.write_text(CALCULATOR)
    subprocess.run(["g++", f"-I{header_folder()}", str(source), "-o", str(program)], check=True, capture_output=True)
    draw = random.Random(5)
    cases = []
    for arch in NVIDIA:
        limits = gpus.limits(arch)
        for _ in range(1500):
            shared = draw.choice([0, draw.randrange(limits.shared_bytes_per_block + 1), draw.randrange(32 << 10)])
            threads = draw.choice([32 * draw.randint(1, 32), draw.randint(1, 1024)])
            cases.append((limits, draw.randint(16, 255), shared, threads))
    lines = []
    for limits, registers, shared, threads in cases:
        number = int(limits.arch.removeprefix("sm_"))
        sizes = [limits.threads, limits.shared_bytes, limits.shared_bytes_per_block, registers, shared, threads]
        lines.append(" ".join(map(str, [number // 10, number % 10, *sizes])))
    done = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True)
    theirs = [int(line) for line in done.stdout.split()]
    ours = [fit(each, registers=r, shared_bytes=s, threads=t).blocks for each, r, s, t in cases]
    assert min(theirs) >= 0, "the calculator refused its input"
    wrong = [(case, o, t) for case, o, t in zip(cases, ours, theirs, strict=True) if o != t]
    assert not wrong, wrong[:5]
