"""Blocks per multiprocessor as computed, against the driver's own answer for compiled kernels."""

import ctypes

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from autokernel import gpus  # noqa: E402
from autokernel.tuner import occupancy  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="no NVIDIA GPU"),
]

MAX_THREADS, STATIC_SHARED, REGISTERS, MAX_DYNAMIC_SHARED = 0, 1, 4, 8
"""Numbers of CUfunction_attribute in cuda.h."""


@triton.jit
def held(x, out, BLOCK: tl.constexpr, KEPT: tl.constexpr):
    """Keeps KEPT tiles of BLOCK elements at once: more tiles, more registers."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    values = tl.load(x + at[:, None] + tl.arange(0, KEPT)[None, :] * BLOCK)
    total = tl.sum(values * tl.sum(values, 0)[None, :], 1)
    tl.store(out + at, total)


@triton.jit
def product(a, b, out, K, M: tl.constexpr, N: tl.constexpr, DEPTH: tl.constexpr):
    rows, cols, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DEPTH)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, K, DEPTH):
        x = tl.load(a + rows[:, None] * K + start + k[None, :])
        y = tl.load(b + (start + k)[:, None] * N + cols[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(out + rows[:, None] * N + cols[None, :], acc)


@pytest.fixture(scope="module")
def driver():
    torch.zeros(1, device="cuda")  # makes the context current
    return ctypes.CDLL("libcuda.so.1")


@pytest.fixture(scope="module")
def limits():
    major, minor = torch.cuda.get_device_capability()
    found = gpus.limits(f"sm_{major}{minor}")
    if found is None:
        pytest.skip(f"no limits are listed for compute capability {major}.{minor}")
    return found


def compiled(kernel, warps, *arguments, **constants):
    """The driver's handle of a compiled Triton kernel, and the shared memory that it is launched with."""
    found = kernel[(1,)](*arguments, num_warps=warps, **constants)
    torch.cuda.synchronize()
    if found.function is None:
        found._init_handles()
    return ctypes.c_void_p(found.function), found.metadata.shared


def attribute(driver, number, function):
    value = ctypes.c_int()
    assert driver.cuFuncGetAttribute(ctypes.byref(value), number, function) == 0
    return value.value


def drivers_answer(driver, function, threads, dynamic):
    blocks = ctypes.c_int()
    status = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks), function, threads, ctypes.c_size_t(dynamic)
    )
    assert status == 0, status
    return blocks.value


def test_limits_are_the_devices_own(limits):
    properties = torch.cuda.get_device_properties(0)
    assert properties.max_threads_per_multi_processor == limits.threads
    assert properties.regs_per_multiprocessor == limits.registers
    assert properties.shared_memory_per_multiprocessor == limits.shared_bytes
    assert properties.shared_memory_per_block_optin == limits.shared_bytes_per_block


def kernels():
    """(handle, shared memory as launched, warps) of kernels with few and many registers, little and much memory."""
    x = torch.zeros(1 << 20, device="cuda")
    out = torch.zeros(1 << 20, device="cuda")
    for warps, block, kept in [(1, 32, 2), (1, 128, 32), (2, 128, 16), (4, 128, 64), (4, 512, 8), (8, 512, 32)]:
        yield *compiled(held, warps, x, out, BLOCK=block, KEPT=kept), warps
    for warps, block, kept in [(16, 512, 16), (32, 1024, 4)]:
        yield *compiled(held, warps, x, out, BLOCK=block, KEPT=kept), warps
    a = torch.zeros(256 * 512, device="cuda", dtype=torch.float16)
    for warps, m, n, depth in [(4, 64, 64, 32), (4, 128, 128, 64), (8, 128, 256, 64), (4, 64, 128, 128)]:
        yield *compiled(product, warps, a, a, out, 512, M=m, N=n, DEPTH=depth), warps


def test_same_blocks_as_the_driver_says(driver, limits):
    compared, answers = 0, set()
    for function, shared, warps in kernels():
        registers = attribute(driver, REGISTERS, function)
        static = attribute(driver, STATIC_SHARED, function)
        most = limits.shared_bytes_per_block - static
        assert attribute(driver, MAX_THREADS, function) >= 32 * warps
        assert driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, most) == 0
        for dynamic in sorted({shared, 0, 1, 1000, 11 << 10, 30_000, 48 << 10, 75 << 10, most // 2, most}):
            if not shared <= dynamic <= most:
                continue
            said = drivers_answer(driver, function, 32 * warps, dynamic)
            found = occupancy.fit(limits, registers=registers, shared_bytes=static + dynamic, threads=32 * warps)
            assert found.blocks == said, (registers, static, dynamic, warps)
            compared += 1
            answers.add(said)
    assert compared >= 40
    assert len(answers) >= 6, "the kernels are too much alike to tell the rules apart"
