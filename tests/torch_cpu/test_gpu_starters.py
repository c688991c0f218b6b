"""The GPU starters without a GPU: Triton in its interpreter, and both backends through their real compilers."""

import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from autokernel.kernelfile import parse_kernel
from autokernel.loading import get_spec, load_file, specs, starter_path
from autokernel.native import ARCH_VARIABLE, find_nvcc
from autokernel.offgpu import compile_launches
from autokernel.spec import build_case, retype
from autokernel.target import KNOWN_TARGETS, assume

OPS = list(specs())
MATRIX_OPS = ("matmul", "flash_attention", "masked_attention", "fused_mlp")
MATRIX_INSTRUCTION = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
CUDA_TARGETS = {"80": "sm_80", "89": "sm_89", "90a": "sm_90"}

CHECK = """
    import random, sys, torch
    from pathlib import Path
    from autokernel.judge.compare import mismatch
    from autokernel.judge.trial import truth_of
    from autokernel.loading import get_spec, load_file
    from autokernel.target import KNOWN_TARGETS, assume

    op, path, target = sys.argv[1:]
    spec, kernel = get_spec(op), load_file(Path(path), "starter")
    cases = [(case, None, case.name) for case in (*spec.cases, *spec.edges)]
    cases += [(spec.stress_case, adversary, name) for name, adversary in spec.adversarial.items()]
    checked = 0
    for number, (case, adversary, label) in enumerate(cases):
        for dtype in spec.dtypes:
            if number and dtype != spec.dtypes[number % len(spec.dtypes)]:
                continue  # one dtype each, but for the first: the interpreter is slow, and the judge asks for all
            case = case.with_dtype(dtype)
            seed = random.getrandbits(40)
            inputs = spec.make_inputs(case, seed)
            if adversary:
                inputs = adversary(inputs, torch.Generator().manual_seed(seed + 1))
            with assume(KNOWN_TARGETS[target]):
                output = kernel.kernel_fn(**inputs)
            truth, meta = truth_of(spec, inputs)
            assert tuple(output.shape) == meta.shape, (label, dtype, output.shape)
            reason = mismatch(output, truth, dtype, spec.tolerances[dtype])
            assert reason is None, f"{label} {dtype}: {reason}"
            checked += 1
    print("checked", checked)
"""


@pytest.fixture(scope="module", params=OPS)
def op(request):
    return request.param


def test_knobs_are_literals_with_values_from_their_lists(op):
    for backend in ("triton", "cuda"):
        parsed = parse_kernel(starter_path(op, backend).read_text())
        assert (parsed.kernel_type, parsed.backend) == (op, backend)
        assert parsed.tunables, "structure must be open to the tuner"


@pytest.fixture(scope="module")
def checked(request):
    """Waits for the check of the test that is given. Two processes run all checks ahead: they are as slow as compilers.

    A failure's own lines are in the traceback of the other process, which pytest shows.
    """
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        checks = {}
        for item in request.session.items:
            if item.module is request.module and item.originalname in CHECKS:
                checks[item.nodeid] = pool.submit(CHECKS[item.originalname], **item.callspec.params)
        yield lambda test: checks[test.node.nodeid].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.slow
def test_triton_starter_is_right_in_the_interpreter(op, checked, request):
    checked(request)


@pytest.mark.slow
@pytest.mark.parametrize("target", list(KNOWN_TARGETS))
def test_triton_starter_compiles_off_gpu(op, target, checked, request):
    checked(request)


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("arch", list(CUDA_TARGETS))
def test_cuda_starter_compiles(op, arch, checked, request):
    if arch == "89" and op in MATRIX_OPS:
        pytest.skip("the path of sm_80, and half a minute")
    checked(request)


def check_in_the_interpreter(op):
    """In a process of its own: whether Triton interprets is decided when a kernel is defined."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        textwrap.dedent(CHECK),
        op,
        str(starter_path(op, "triton")),
        "sm_80",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(re.search(r"checked (\d+)", done.stdout)[1]) >= len(get_spec(op).cases), done.stdout


def check_compiles_off_gpu(op, target):
    module = load_file(starter_path(op, "triton"), f"compiled_{op}")
    for dtype in ("bf16", "fp32") if target == "sm_90" else ("bf16",):
        launches = compile_launches(module.kernel_fn, unfilled(op, large_case(op).with_dtype(dtype)), target)
        assert launches, "nothing was launched"
        limit = KNOWN_TARGETS[target].shared_bytes
        assert all(launch.shared_bytes <= limit for launch in launches), [launch.shared_bytes for launch in launches]
        if dtype == "bf16" and op in MATRIX_OPS:
            asm = " ".join(str(launch.asm.get("ptx", launch.asm.get("amdgcn", ""))) for launch in launches)
            assert MATRIX_INSTRUCTION[target] in asm, f"no {MATRIX_INSTRUCTION[target]}"
        if dtype == "bf16" and target == "sm_90":  # where they are tuned
            assert all(launch.stack_bytes == 0 for launch in launches), "registers spill"


def check_cuda_compiles(op, arch):
    """Loading or calling the starter builds its library for the named target; without a GPU the call itself fails."""
    if find_nvcc() is None or (arch == "89" and op in MATRIX_OPS):
        return
    with tempfile.TemporaryDirectory() as builds:
        os.environ.update({ARCH_VARIABLE: arch, "AUTOKERNEL_BUILD_DIR": builds})
        module = load_file(starter_path(op, "cuda"), f"cuda_{op}_{arch}")
        with assume(KNOWN_TARGETS[CUDA_TARGETS[arch]]), pytest.raises((TypeError, RuntimeError), match="GPU"):
            module.kernel_fn(**unfilled(op, large_case(op).with_dtype("bf16")))
        assert list(Path(builds).glob("*.so")), "no library was built"


CHECKS = {
    "test_triton_starter_is_right_in_the_interpreter": check_in_the_interpreter,
    "test_triton_starter_compiles_off_gpu": check_compiles_off_gpu,
    "test_cuda_starter_compiles": check_cuda_compiles,
}


def large_case(op):
    """A shape as models have it, so that the fast path is the one compiled."""
    shapes = {
        "matmul": {"a": (4096, 4096), "b": (4096, 4096)},
        "softmax": {"x": (4096, 8192)},
        "layernorm": {"x": (4096, 8192), "weight": (8192,), "bias": (8192,)},
        "rmsnorm": {"x": (4096, 8192), "weight": (8192,)},
        "flash_attention": {"q": (1, 32, 2048, 128), "k": (1, 8, 2048, 128), "v": (1, 8, 2048, 128)},
        "masked_attention": dict.fromkeys("qkv", (4, 16, 512, 64)) | {"mask": (1, 16, 512, 512)},
        "fused_mlp": {"x": (2048, 4096), "w_gate": (8192, 4096), "w_up": (8192, 4096), "w_down": (4096, 8192)},
        "cross_entropy": {"logits": (2048, 50257), "targets": (2048,)},
        "rotary_embedding": {"x": (1, 32, 2048, 128), "cos": (2048, 64), "sin": (2048, 64)},
        "reduce": {"x": (4096, 8192)},
    }[op]
    case = build_case(op, "large", **shapes)
    return retype(case, targets="int64") if op == "cross_entropy" else case


def unfilled(op, case):
    """The call's arguments with whatever is in memory: a compiler does not look."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64}
    inputs = {}
    for name, parameter in get_spec(op).signature.parameters.items():
        if name in case.tensors:
            meta = case.tensors[name]
            inputs[name] = torch.empty(meta.shape, dtype=dtypes[meta.dtype])
        else:
            inputs[name] = case.scalars.get(name, parameter.default)
    return inputs


def test_unknown_target_is_named():
    with pytest.raises(KeyError, match="sm_1"):
        compile_launches(lambda x: x, {"x": torch.zeros(1)}, "sm_1")


def test_compiled_launch_reports_its_resources(twice):
    (launch,) = compile_launches(twice, {"x": torch.zeros(5000)}, "sm_90")
    assert (launch.kernel, launch.num_warps, launch.stack_bytes) == ("twice", 8, 0)
    assert 4 <= launch.registers <= 64
    assert math.isfinite(launch.shared_bytes)
    assert ".target sm_90" in launch.asm["ptx"]
