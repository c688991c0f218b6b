"""The first Triton kernels of captured subgraphs, with no GPU: generated on fake tensors of one, compiled for several
targets, and run by Triton's interpreter where it can."""

import contextlib
import json
import os
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import has_triton

from autokernel.kernelfile import parse_kernel
from autokernel.loading import load_file
from autokernel.regions.find import calls_of
from autokernel.regions.inductor import NotGenerated
from autokernel.regions.tritonstarter import starter_text

pytest.importorskip("triton")
aten = torch.ops.aten
OP = "graph_some_00000000"

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
CUDA = {
    "get_device_properties": PROPERTIES,
    "is_available": True,
    "current_device": 0,
    "device_count": 1,
    "get_device_capability": (9, 0),
    "set_device": None,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
    "get_rng_state": torch.zeros(1),
    "set_rng_state": None,
}


@contextlib.contextmanager
def gpu_in_name():
    """PyTorch believes that there is a GPU, as long as nothing is put on it."""
    with contextlib.ExitStack() as stack:
        for name, value in CUDA.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", lambda *_args, value=value, **_options: value))
        for owner in (CudaInterface, CudaInterface.Worker):
            for name in ("get_device_properties", "current_device", "is_available", "get_compute_capability"):
                value = {**CUDA, "get_compute_capability": 90}[name]
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, staticmethod(lambda *_args, value=value: value)))
        for passes in ("joint_graph", "post_grad"):  # their patterns are traced on real tensors
            stack.enter_context(mock.patch(f"torch._inductor.fx_passes.{passes}.lazy_init", return_value=None))
        stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="none"))
        has_triton.cache_clear()  # it remembers whether there is a GPU
        stack.callback(has_triton.cache_clear)
        yield


def pointwise(x0, x1):
    return aten.mul.Tensor(aten.gelu.default(aten.add.Tensor(x0, x1)), 2.0)


def transposed(x0, x1):
    turned = aten.clone.default(aten.permute.default(x0, [1, 0]), memory_format=torch.contiguous_format)
    return aten.add.Tensor(turned, x1)


def persistent(x0):
    mean = aten.mean.dim(aten.mul.Tensor(x0, x0), [-1], True)
    return aten.mul.Tensor(aten.relu.default(x0), aten.rsqrt.default(aten.add.Tensor(mean, 1e-6)))


def whole_sum(x0):
    return aten.sum.default(aten.mul.Tensor(x0, x0))


SHAPES = {
    pointwise: [(64, 96), (96,)],
    transposed: [(40, 72), (72, 40)],
    persistent: [(24, 200)],
    whole_sum: [(96, 160)],
}


def written(captured):
    graph = calls_of(captured)
    with FakeTensorMode(allow_non_fake_inputs=True):
        examples = [torch.empty(shape, device="cuda") for shape in SHAPES[captured]]
    with gpu_in_name():
        return starter_text(OP, graph, examples, about="a test", layouts="")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    for captured in SHAPES:
        (folder / f"{captured.__name__}.py").write_text(written(captured))
    return folder


def test_the_kernels_keep_the_contract(kernels):
    for captured in SHAPES:
        text = (kernels / f"{captured.__name__}.py").read_text()
        parsed = parse_kernel(text)
        assert (parsed.kernel_type, parsed.backend) == (OP, "triton")
        assert set(parsed.config) == set(parsed.tunables)
        assert "triton_heuristics" not in text


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_kernels_compile(kernels, target):
    from autokernel.offgpu import compile_launches

    steps = {pointwise: 1, transposed: 1, persistent: 1, whole_sum: 2}
    for captured, shapes in SHAPES.items():
        module = load_file(kernels / f"{captured.__name__}.py", f"region_{captured.__name__}")
        inputs = {f"x{i}": torch.empty(shape) for i, shape in enumerate(shapes)}
        assert len(compile_launches(module.kernel_fn, inputs, target)) == steps[captured]


INTERPRETED = """
import json, sys, torch
from pathlib import Path
from autokernel.loading import load_file
torch.manual_seed(0)
worst = {}
for name, shapes, config in json.loads(sys.argv[2]):
    text = Path(sys.argv[1], f"{name}.py").read_text()
    path = Path(sys.argv[1], f"{name}_changed.py")
    path.write_text(text + f"\\nCONFIG.update({config!r})\\n")
    inputs = [torch.randn(shape) for shape in shapes]
    result = load_file(path, name).kernel_fn(*inputs)
    wanted = {"transposed": lambda x, y: x.t() + y, "whole_sum": lambda x: (x * x).sum()}[name](*inputs)
    assert result.shape == wanted.shape and result.is_contiguous()
    worst[name] = max(worst.get(name, 0.0), float(((result - wanted).abs() / wanted.abs().max()).max()))
print(json.dumps(worst))
"""


def test_the_kernels_are_right_for_any_blocks(kernels):
    jobs = [("transposed", SHAPES[transposed], config) for config in ({}, {"XBLOCK_0": 16, "YBLOCK_0": 64})]
    jobs += [("whole_sum", SHAPES[whole_sum], config) for config in ({}, {"XBLOCK_0": 4, "R0_BLOCK_0": 512})]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", INTERPRETED, str(kernels), json.dumps(jobs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    worst = json.loads(done.stdout)
    assert set(worst) == {"transposed", "whole_sum"}
    assert max(worst.values()) < 1e-5


def test_what_inductor_leaves_to_pytorch_is_no_first_kernel():
    def captured(x0):
        return aten.mul.Tensor(aten.mm.default(x0, x0), 2.0)

    SHAPES[captured] = [(8, 8)]
    try:
        with pytest.raises(NotGenerated):
            written(captured)
    finally:
        del SHAPES[captured]
