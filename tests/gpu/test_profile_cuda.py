import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autokernel.ceilings import measure_ceilings
from autokernel.model import LoadedModel
from autokernel.profiler import attribute_nodes, profile_model
from autokernel.roofline import roofline_fraction

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZE = 4096
MM = ("aten::mm", ((SIZE, SIZE), (SIZE, SIZE)))


class Product(nn.Module):
    def forward(self, x):
        return torch.mm(x, x).relu()


def x() -> torch.Tensor:
    return torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)


def test_kernel_time_is_counted_once_and_within_the_wall_time():
    profile = profile_model(LoadedModel(model=Product(), args=(x(),), kwargs={}, name="m"), seconds=0.5)
    times = {(op.op, op.shapes): op for op in profile.ops}
    assert times[MM].calls == 1
    assert profile.attributed_us <= profile.wall_us
    assert 0.5 < times[MM].share < 1.0
    ceilings = measure_ceilings("cuda")
    fraction = roofline_fraction(times[MM].time_us, 2 * SIZE**3, 3 * 2 * SIZE**2, "bf16", ceilings)
    assert 0.3 < fraction <= 1.0  # counted twice, it would reach half of this


def test_node_times_add_up_to_about_the_kernel_times():
    # The profile comes first, as in a plan: it also brings the GPU's clock up.
    profile = profile_model(LoadedModel(model=Product(), args=(x(),), kwargs={}, name="m"), seconds=0.5)
    graph = make_fx(lambda x: torch.mm(x, x).relu())(x())
    times = attribute_nodes(graph, [x()])
    assert sum(times.values()) == pytest.approx(profile.attributed_us, rel=0.4)


def test_ceilings_of_this_gpu_are_measured():
    ceilings = measure_ceilings("cuda")
    assert 100 < ceilings.copy_gbps < 20_000
    assert ceilings.gemm_tflops["bf16"] > ceilings.gemm_tflops["fp32"] > 1
    assert 0 < ceilings.launch_us < 100
