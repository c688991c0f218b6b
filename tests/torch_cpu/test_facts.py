"""What a prompt tells of an op: binaries laid out as the judge's children leave them, read with no GPU."""

import json
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autokernel import binaries, gpus, resources
from autokernel.agents import plain_context
from autokernel.facts import Facts
from autokernel.judge import places
from autokernel.judge.engine import Judge
from autokernel.judge.folders import keep_files_in
from autokernel.judge.forkserver import ForkServer
from autokernel.loading import get_spec, load_file, specs, starter_path
from autokernel.native import compile_library, find_nvcc
from autokernel.offgpu import compile_launches
from autokernel.prompt import build_prompt
from autokernel.records import Decision, Interval, TensorMeta, TimedCase, Timing, Verdict
from autokernel.roofline import Bound, Ceilings
from autokernel.timed import MAX_TIMED_CASES, bound, floor_us, position, timed_calls, work_of
from tests.torch_cpu.conftest import TWICE
from tests.unit.sample_run import experiment, planned, started

H200 = gpus.lookup("NVIDIA H200")
CEILINGS = Ceilings(
    device="NVIDIA H200", copy_gbps=4000.0, gemm_tflops={"fp32": 50.0, "bf16": 800.0}, copy_bytes=1 << 30, launch_us=2.0
)
CUDA = """
template <class T> __global__ void __launch_bounds__(256) fill(T* x) {
  __shared__ float s[64];
  s[threadIdx.x % 64] = 1;
  *x = s[3];
}
extern "C" int run(float* x, double* y, cudaStream_t stream) {
  fill<float><<<1, 32, 0, stream>>>(x);
  return cudaGetLastError();
}
"""


def a_history(backend="triton", text=TWICE, dtype="fp32", device="NVIDIA H200"):
    case = get_spec("rmsnorm").cases[0]
    meta = TensorMeta(shape=(8192, 4096), dtype=dtype)
    tensors = {"x": meta, "weight": replace(meta, shape=(4096,))}
    case = replace(case, dtype=dtype, tensors=tensors)
    plan = replace(planned("rmsnorm", 0.5), cases=(TimedCase(case=case, calls=4),))
    return replace(started(), planned=plan, backend=backend, device=device, incumbent=text, incumbent_us=800.0)


def facts_of(history, builds=None, ceilings=CEILINGS):
    facts = Facts(builds=builds, ceilings=lambda: ceilings)
    return facts.of(plain_context(history), history)


def prompt_of(history, builds=None):
    return build_prompt(history, facts_of(history, builds), budget_tokens=48_000)


@pytest.fixture
def folder_of(tmp_path, monkeypatch):
    """`folder_of(history)`: the folder in which the judge's children compile the incumbent; they are told to."""

    def make(history):
        folder = places.of_text(tmp_path / "rmsnorm", history.incumbent)
        for name in ("HOME", "TMPDIR", "AUTOKERNEL_BUILD_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
        keep_files_in(folder)
        return folder

    return make


def compile_triton(folder, target, dtypes=(torch.float32,)):
    """As a child does when it is called, but with no GPU."""
    path = folder / "kernel.py"
    path.write_text(TWICE)
    kernel_fn = load_file(path, "candidate").kernel_fn
    return [compile_launches(kernel_fn, {"x": torch.zeros(5000, dtype=dtype)}, target)[0] for dtype in dtypes]


def test_triton_binaries_that_the_judge_left_are_in_the_prompt(folder_of, tmp_path):
    history = a_history()
    (launch,) = compile_triton(folder_of(history), "sm_90")
    (found,) = facts_of(history, tmp_path).resources
    assert (found.kernel, found.threads, found.stack_bytes, found.shared_bytes) == ("twice", 256, 0, 0)
    assert found.registers == launch.registers
    assert found.blocks_per_sm == 8
    said = (
        f"Compiled `twice`: {launch.registers} registers per thread, 0 bytes of stack per thread (spills, if any, go "
    )
    assert said in prompt_of(history, tmp_path).user
    assert "8 blocks of that size fit on a multiprocessor (occupancy 100%)" in prompt_of(history, tmp_path).user
    assert "Compiled" not in prompt_of(replace(history, incumbent=TWICE + "# other\n"), tmp_path).user


def test_only_the_dtypes_of_the_calls_are_told(folder_of, tmp_path):
    history = a_history()
    compile_triton(folder_of(history), "sm_90", (torch.float32, torch.bfloat16, torch.float16))
    assert len(list((folder_of(history) / places.TRITON).glob("*/twice.cubin"))) == 3
    for dtype in ("fp32", "bf16", "fp16"):
        assert len(facts_of(a_history(dtype=dtype), tmp_path).resources) == 1
    folder = folder_of(history)
    assert len(binaries.left_by_judge(folder, ("fp32", "bf16"), H200)) == 2


def test_amd_assembly_is_read_without_a_tool(folder_of, tmp_path, monkeypatch):
    history = a_history(device="AMD Instinct MI300X")
    (launch,) = compile_triton(folder_of(history), "gfx942")
    monkeypatch.setattr(resources, "find_cuobjdump", lambda: None)
    (found,) = facts_of(history, tmp_path).resources
    assert (found.registers, found.threads) == (launch.registers, 512)


def test_without_a_tool_only_what_triton_says_is_told(folder_of, tmp_path, monkeypatch):
    history = a_history()
    compile_triton(folder_of(history), "sm_90")
    monkeypatch.setattr(resources, "find_cuobjdump", lambda: None)
    assert "Compiled `twice`: 0 bytes of shared memory per block, 256 threads per block." in (
        prompt_of(history, tmp_path).user
    )


@pytest.mark.skipif(find_nvcc() is None or resources.find_cuobjdump() is None, reason="no nvcc or no cuobjdump")
def test_cuda_library_that_the_judge_left_is_in_the_prompt(folder_of, tmp_path):
    history = a_history(backend="cuda")
    folder = folder_of(history)
    assert compile_library(CUDA, backend="cuda", arch="90a").parent == folder / places.LIBRARIES
    (found,) = facts_of(history, tmp_path).resources
    assert found.kernel in ("fill<float>", "_Z4fillIfEvPT_")
    assert (found.shared_bytes, found.threads, found.blocks_per_sm) == (256, 256, 8)
    user = prompt_of(history, tmp_path).user
    assert "256 bytes of static shared memory per block, 256 threads per block at most" in user
    if found.kernel == "fill<float>":
        assert not facts_of(a_history(backend="cuda", dtype="bf16"), tmp_path).resources


def test_a_cpu_kernel_has_no_resources(folder_of, tmp_path):
    history = a_history(backend="cpp", device="cpu (2 threads)")
    folder_of(history)
    context = facts_of(history, tmp_path)
    assert (context.arch, context.resources) == ("cpu", None)
    assert "Compiled" not in prompt_of(history, tmp_path).user


def test_what_a_candidate_leaves_behind_cannot_mislead_or_stop_the_reader(tmp_path):
    folder, elsewhere = tmp_path / "text", tmp_path / "elsewhere"
    for number in range(3):
        (folder / places.TRITON / str(number)).mkdir(parents=True)
    (elsewhere / "0").mkdir(parents=True)
    (elsewhere / "0" / "k.json").write_text(json.dumps({"name": "not ours", "num_warps": 4}))
    (folder / places.TRITON / "link").symlink_to(elsewhere / "0")
    (folder / places.TRITON / "0" / "k.json").symlink_to(elsewhere / "0" / "k.json")
    os.mkfifo(folder / places.TRITON / "0" / "pipe.json")
    (folder / places.TRITON / "1" / "deep.json").write_text("[" * 50_000)
    (folder / places.TRITON / "1" / "odd.json").write_text(json.dumps({"name": 3}))
    odd = {"name": "odd | name\n" * 99, "num_warps": -1, "shared": True, "target": []}
    (folder / places.TRITON / "2" / "k.json").write_text(json.dumps(odd))
    (folder / places.TRITON / "2" / "k.cubin").write_text("no binary")
    os.mkfifo(folder / places.TRITON / "2" / "k.ttir")
    (folder / places.LIBRARIES).symlink_to(elsewhere)
    (found,) = binaries.left_by_judge(folder, ("fp32",), H200)
    assert (found.threads, found.shared_bytes, found.registers) == (None, None, None)
    assert binaries.left_by_judge(tmp_path / "nowhere", ("fp32",), None) == ()


def test_asking_again_takes_no_time(folder_of, tmp_path):
    history = a_history()
    compile_triton(folder_of(history), "sm_90", (torch.float32, torch.bfloat16))
    facts = Facts(builds=tmp_path, ceilings=lambda: CEILINGS)
    facts.of(plain_context(history), history)
    begin = time.perf_counter()
    facts.of(plain_context(history), history)
    assert time.perf_counter() - begin < 0.05


# -- the roofline position


def test_position_tells_rates_ridge_and_what_binds():
    history = a_history()
    timing = Timing(
        candidate_us=800.0,
        incumbent_us=900.0,
        speedup=Interval(low=1.1, estimate=1.125, high=1.15),
        blocks=12,
        host_us=20.0,
        graph_us=805.0,
    )
    kept = experiment(1, decision=Decision.KEEP, us=800.0, incumbent_us=900.0)
    kept = replace(kept, proposal=replace(kept.proposal, kernel_py=TWICE))
    history = history.add(replace(kept, outcome=replace(kept.outcome, timing=timing)))
    found = position(get_spec("rmsnorm"), history, CEILINGS)
    nbytes = 4 * (2 * 8192 * 4096 + 4096) * 4
    assert (found.bound, found.nbytes, found.latency_us) == (Bound.MEMORY, nbytes, 800.0)
    assert (found.host_us, found.graph_us) == (20.0, 805.0)
    assert found.ridge == pytest.approx(50e12 / 4000e9)
    user = prompt_of(history).user
    assert f"Reached: {nbytes / 800 / 1e3:.0f} GB/s and " in user
    assert "compute binds above 12.5" in user
    assert "The host needs 20.0 us to start these calls; in a CUDA graph they take 805.0 us." in user


def test_small_calls_are_bound_by_starting_them_and_products_by_arithmetic():
    small = get_spec("softmax").cases[0]
    assert bound(get_spec("softmax"), [TimedCase(case=small, calls=1)], CEILINGS) is Bound.OVERHEAD
    tensors = {name: TensorMeta(shape=(8192, 8192), dtype="bf16") for name in ("a", "b")}
    product = replace(get_spec("matmul").cases[0], dtype="bf16", tensors=tensors)
    assert bound(get_spec("matmul"), [TimedCase(case=product, calls=1)], CEILINGS) is Bound.COMPUTE
    unknown = [TimedCase(case=replace(product, dtype="fp16"), calls=1)]
    assert bound(get_spec("matmul"), unknown, CEILINGS) is None
    assert floor_us(get_spec("matmul"), unknown, CEILINGS) is None


@pytest.mark.parametrize("op", specs())
def test_timed_calls_are_the_heaviest(op):
    spec = get_spec(op)
    (default,) = timed_calls(spec, [])
    assert spec.bytes_moved(default.case) == max(map(spec.bytes_moved, spec.cases))
    calls = [TimedCase(case=case, calls=1) for case in spec.cases]
    timed = timed_calls(spec, calls)
    assert len(timed) == min(MAX_TIMED_CASES, len(calls))
    assert work_of(spec, timed).nbytes >= spec.bytes_moved(default.case)


def test_oracle_and_what_it_allows_are_in_the_stable_part():
    system = prompt_of(a_history()).system
    assert "def rmsnorm(x: Tensor, weight: Tensor" in system
    assert "ATen calls that rmsnorm may make beyond allocation and views: none." in system


def test_an_op_without_a_spec_is_told_by_its_history():
    history = a_history()
    history = replace(history, planned=replace(history.planned, op="something"))
    context = facts_of(history, Path("nowhere"))
    assert (context.roofline, context.oracle, context.arch, context.resources) == (None, None, "sm_90", ())


def test_the_folder_that_is_read_is_the_one_that_the_judge_compiles_in(tmp_path):
    text = starter_path("rmsnorm", "cpp").read_text()
    with ForkServer() as server:
        judge = Judge(
            server=server, spec=get_spec("rmsnorm"), dtypes=("fp32",), cases=(), builds=tmp_path / "builds" / "rmsnorm"
        )
        outcome = judge.evaluate(text, timing=False, all_stages=False)
    assert outcome.verdict is Verdict.PASS, outcome.reason
    folder = places.of_text(tmp_path / "builds" / "rmsnorm", text)
    assert list((folder / places.LIBRARIES).glob("*.so"))


def test_many_specializations_leave_room_for_each_other(folder_of, tmp_path):
    history = a_history()
    folder = folder_of(history)
    compile_triton(folder, "sm_90")
    (cache,) = (path.parent for path in (folder / places.TRITON).glob("*/twice.cubin"))
    for number in range(2 * binaries.MOST_BINARIES):
        shutil.copytree(cache, cache.with_name(f"{cache.name}{number}"))
    metadata = cache.with_name(f"{cache.name}0") / "twice.json"
    metadata.write_text(metadata.read_text().replace('"num_warps": 8', '"num_warps": 4'))
    assert {kernel.threads for kernel in facts_of(history, tmp_path).resources} == {128, 256}
