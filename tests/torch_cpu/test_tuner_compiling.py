"""Compiling candidates in confined children, with the real compilers and no GPU; seeds that hold what they promise."""

import importlib.util
import shutil
import textwrap
import time

import pytest

from autokernel.kernelfile import parse_kernel, with_config
from autokernel.loading import starter_path
from autokernel.native import find_nvcc
from autokernel.spec import build_case
from autokernel.target import KNOWN_TARGETS
from autokernel.tuner.compiling import Compiler
from autokernel.tuner.heuristics import FEATURES, Heuristics
from autokernel.tuner.kinds import Kind
from autokernel.tuner.studies import gather
from autokernel.tuner.trials import Status

pytestmark = pytest.mark.alone

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

SOFTMAX = build_case("softmax", "rows", "bf16", x=(4096, 4096))
MATMUL = build_case("matmul", "square", "bf16", a=(1024, 512), b=(512, 1024))

PRODUCT = '''
"""a @ b by tiles."""
import torch
import triton
import triton.language as tl

KERNEL_TYPE = "matmul"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [32, 64, 128], "BLOCK_N": [64, 128], "BLOCK_K": [32, 64], "GROUP_M": [1, 8],
    "num_warps": [4, 8], "num_stages": [1, 2, 3, 4], "SPEED": [1, 2],
}
CONFIG = {
    "BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 1, "num_warps": 4, "num_stages": 1, "SPEED": 1,
}


@triton.jit
def product(a, b, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tiles = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(a + rows[:, None] * K + k[None, :])
        y = tl.load(b + k[:, None] * N + cols[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(out + rows[:, None] * N + cols[None, :], acc.to(out.dtype.element_ty))


def kernel_fn(a, b):
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    tiles = {name: CONFIG[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
    grid = (triton.cdiv(m, tiles["BLOCK_M"]) * triton.cdiv(n, tiles["BLOCK_N"]),)
    options = {name: CONFIG[name] for name in ("num_warps", "num_stages")}
    product[grid](a, b, out, m, n, k, **tiles, **options)
    return out
'''

BROKEN = """
KERNEL_TYPE, BACKEND = "softmax", "cpp"
KERNEL_TYPE = "softmax"
BACKEND = "cpp"
import os, time
{body}
def kernel_fn(x, dim=-1):
    return x
"""


def configured(**changes):
    return with_config(PRODUCT, {**parse_kernel(PRODUCT).config, **changes})


def broken(body):
    return textwrap.dedent(BROKEN).format(body=textwrap.dedent(body))


@pytest.fixture(scope="module")
def product_on_hopper():
    with Compiler([MATMUL], "sm_90", processes=2) as compiler:
        yield compiler


@pytest.fixture(scope="module")
def rows_on_hopper():
    with Compiler([SOFTMAX], "sm_90", processes=2, deadline_s=60.0) as compiler:
        yield compiler


@pytest.fixture(scope="module", params=["sm_80", "sm_100", "gfx942"])
def product_elsewhere(request):
    with Compiler([MATMUL], request.param, processes=2) as compiler:
        yield compiler


@needs_triton
def test_starter_compiles_for_a_target_that_is_not_here(product_elsewhere):
    text = starter_path("matmul", "triton").read_text()
    (compiled,) = product_elsewhere.compile([text])
    assert compiled.status is Status.OK, compiled.error
    kernel = compiled.hungriest
    assert kernel.registers
    assert kernel.stack_bytes == 0
    assert kernel.threads % KNOWN_TARGETS[product_elsewhere.arch].warp_size == 0
    assert kernel.blocks_per_sm >= 1
    assert compiled.digest
    assert compiled.compile_s > 0.05
    assert "tt.dot" in compiled.ttir[0]


@needs_triton
def test_digest_tells_code_and_launches_apart_and_nothing_else(product_on_hopper):
    base, moved, warps, tile, idle = product_on_hopper.compile(
        [
            configured(),
            "# another line number for everything\n\n" + configured(),
            configured(num_warps=8),
            configured(BLOCK_M=64),
            configured(SPEED=2),
        ]
    )
    assert base.status is Status.OK, base.error
    assert base.digest == moved.digest == idle.digest
    assert len({base.digest, warps.digest, tile.digest}) == 3
    assert warps.resources[0].threads == 256


@needs_triton
def test_what_the_target_cannot_hold_is_a_launch_error(product_elsewhere):
    text = configured(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_stages=4)
    (compiled,) = product_elsewhere.compile([text])
    small = product_elsewhere.arch == "gfx942"  # 64 KiB for a block, of which it would take more
    assert compiled.status is (Status.LAUNCH_ERROR if small else Status.OK), compiled.error
    assert ("shared memory" in compiled.error) == small


@needs_compiler
def test_failures_cost_only_their_own_candidate(rows_on_hopper):
    good = starter_path("softmax", "cpp").read_text()
    texts = [
        good,
        broken("time.sleep(600)"),
        broken("os._exit(3)"),
        broken("os.kill(os.getpid(), 11)"),
        "def kernel_fn(x:\n",
        broken("raise ValueError('no such luck')"),
        broken("from autokernel.native import build\nbuild('int f( {')"),
        good + "\n# again\n",
    ]
    rows_on_hopper.compile([good])  # the server has started
    start = time.perf_counter()
    hung = rows_on_hopper.start(texts[1], deadline_s=3.0)
    others = rows_on_hopper.compile([text for text in texts if text is not texts[1]])
    took = time.perf_counter() - start
    found = [others[0], hung.result(), *others[1:]]
    expected = [Status.OK, Status.TIMEOUT, *[Status.COMPILE_ERROR] * 5, Status.OK]
    assert [each.status for each in found] == expected, [each.error for each in found]
    assert took < 40
    for each, words in zip(
        found[1:7], ["3 s", "exit code 3", "SIGSEGV", "not valid", "no such luck", "f("], strict=True
    ):
        assert words in each.error, each.error
    assert found[0].digest
    assert found[0].digest == found[7].digest


def test_a_study_leaves_alone_what_is_compiled_of_the_same_text(product_on_hopper, tmp_path):
    with Compiler([MATMUL], "sm_90", builds=tmp_path, processes=2) as compiler:
        compiling = compiler.start(PRODUCT)
        while not list(tmp_path.glob("*/kernel.py")):
            time.sleep(0.01)
        assert not any(isinstance(study, str) for study in compiler.study([PRODUCT], MATMUL))
        assert compiling.result().status is Status.OK, compiling.result().error
    assert list(tmp_path.glob("*/kernel.py"))


def test_what_nobody_waits_for_any_more_can_be_ended(tmp_path):
    endless = "import time; from pathlib import Path; Path('begun').touch(); time.sleep(60)\n" + PRODUCT
    with Compiler([MATMUL], "sm_90", builds=tmp_path, processes=2) as compiler:
        compiling = compiler.start(endless)
        while not list(tmp_path.glob("*/begun")):
            time.sleep(0.01)
        start = time.perf_counter()
        compiler.interrupt()
        assert compiling.result().status is Status.COMPILE_ERROR
        assert time.perf_counter() - start < 20
        assert "SIGKILL" in compiling.result().error


@needs_compiler
def test_native_digest_follows_the_compilers_output(rows_on_hopper):
    text = starter_path("softmax", "cpp").read_text()
    config = dict(parse_kernel(text).config)
    knob = next(name for name, values in parse_kernel(text).tunables.items() if name == "UNROLL")
    other = next(value for value in parse_kernel(text).tunables[knob] if value != config[knob])
    texts = [with_config(text, config), with_config(text, {**config, knob: other})]
    here, there = rows_on_hopper.compile(texts)
    assert here.status is there.status is Status.OK, (here.error, there.error)
    assert here.digest != there.digest


CUDA = '''
import torch
from autokernel.native import build
KERNEL_TYPE = "softmax"
BACKEND = "cuda"
TUNABLES = {"THREADS": [128, 256], "VECTOR": [1, 2]}
CONFIG = {"THREADS": 128, "VECTOR": 1}
SOURCE = """
__global__ void __launch_bounds__(THREADS) scale(float* x) { x[threadIdx.x * VECTOR] *= 2; }
extern "C" int run(float* x, cudaStream_t s) { scale<<<1, THREADS, 0, s>>>(x); return cudaGetLastError(); }
"""
lib = build(SOURCE, backend="cuda", flags=[f"-D{k}={v}" for k, v in CONFIG.items()])


def kernel_fn(x, dim=-1):
    if not x.is_cuda:
        raise TypeError("not on a GPU")
    lib.run(x)
    return x
'''


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_cuda_is_built_and_read_without_a_gpu(rows_on_hopper):
    here, there = rows_on_hopper.compile([CUDA, with_config(CUDA, {"THREADS": 256, "VECTOR": 1})])
    assert here.status is Status.OK, here.error
    assert (here.resources[0].kernel, here.resources[0].threads) == ("scale", 128)
    assert here.resources[0].shared_bytes == 0
    assert here.digest
    assert here.digest != there.digest


# -- heuristics on what the children say


@pytest.fixture(scope="module")
def advice(product_on_hopper):
    return Heuristics(gather(PRODUCT, MATMUL, product_on_hopper))


@needs_triton
def test_product_is_recognised_and_its_work_counted(advice):
    assert advice.facts.kind is Kind.MATMUL
    point = advice.space.locate({**advice.space.config, "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64})
    (launch,) = advice.facts.launches(point)
    work = launch.work
    assert work.programs == 1024 // 64 * (1024 // 128)
    assert work.flops * work.programs == 2 * 1024 * 1024 * 512
    assert work.iterations == 512 / 64
    assert work.load_bytes == 8 * (64 * 64 + 64 * 128) * 2
    assert work.store_bytes == 64 * 128 * 2
    assert work.dot == (64, 128, 64)
    assert work.live_bytes == 64 * 128 * 4


@needs_triton
def test_default_and_seeds_are_allowed_distinct_and_leave_unknown_knobs(advice):
    default, seeds = advice.default(), advice.seeds(12)
    assert seeds[0] == default
    assert len(seeds) == len(set(seeds)) == 12
    for point in seeds:
        config = advice.space.config_at(point)
        assert advice.space.allowed(point)
        assert config["SPEED"] == 1
        assert config["num_stages"] > 1, "nothing would hide the loads' latency"
    assert advice.space.config_at(default)["GROUP_M"] == 8
    naive = advice.space.locate(advice.space.config)
    assert advice.cost(default) < advice.cost(naive) / 2
    assert len({advice.space.config_at(point)["BLOCK_M"] for point in seeds}) > 1


@needs_triton
def test_of_configurations_that_launch_the_same_one_is_a_seed(advice):
    seeds = advice.seeds(20)
    assert len({advice.facts.launches(point) for point in seeds}) == len(seeds)


def test_explanation_says_what_bound_each_choice(advice):
    lines = advice.explain(advice.default())
    assert lines[0] == "kind: matmul"
    for knob in advice.space.knobs:
        assert any(line.startswith(f"{knob.name} = ") for line in lines), knob.name
    assert "what it does is not known" in next(line for line in lines if line.startswith("SPEED"))


@needs_triton
def test_features_are_numbers_for_every_studied_point(advice):
    for point in advice.seeds(8):
        assert len(advice.features(point)) == len(FEATURES)
        assert any(advice.features(point))


@needs_triton
def test_predicted_shared_memory_is_never_below_the_real_one(advice, product_on_hopper):
    check_seeds(advice, advice.seeds(5), product_on_hopper)


@needs_triton
def test_nor_is_it_on_other_targets(product_elsewhere):
    advice = Heuristics(gather(PRODUCT, MATMUL, product_elsewhere))
    check_seeds(advice, advice.seeds(4)[:2], product_elsewhere)


def check_seeds(advice, seeds, compiler):
    found = compiler.compile([with_config(PRODUCT, advice.space.config_at(point)) for point in seeds])
    for point, compiled in zip(seeds, found, strict=True):
        assert compiled.status is Status.OK, compiled.error
        (predicted,) = advice.estimates(point)
        real = compiled.resources[0]
        assert predicted.shared_bytes >= real.shared_bytes, advice.space.config_at(point)
        assert predicted.shared_bytes <= 4 * real.shared_bytes + 4096, "a bound that excludes what would fit"
        assert real.stack_bytes == 0 or predicted.pressure > 0.5, "registers spill where there seemed to be plenty"
