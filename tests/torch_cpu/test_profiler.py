import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autokernel.ceilings import better_of, measure_ceilings
from autokernel.errors import ConfigError, MeasurementError
from autokernel.model import LoadedModel
from autokernel.owntime import OUTSIDE_OPS, Cycle, device_times, self_device_us
from autokernel.profiler import ModelProfile, attribute_nodes, profile_model
from autokernel.roofline import Ceilings

pytestmark = pytest.mark.alone

MM = ("aten::mm", ((64, 64), (64, 64)))


class Products(nn.Module):
    """Two equal products and one of another shape, Python work in between."""

    def forward(self, x, pause_s=0.0):
        time.sleep(pause_s)
        with torch.profiler.record_function("a part that the user named"):
            y = torch.mm(torch.mm(x, x), x)
        return torch.nn.functional.linear(y, x[:8])


def loaded(model: nn.Module, *args, **kwargs) -> LoadedModel:
    return LoadedModel(model=model.eval(), args=args, kwargs=kwargs, name="m")


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(loaded(Products(), torch.ones(64, 64)), seconds=0.3)


def test_each_call_is_counted_once_under_its_op_and_shapes(profile):
    calls = {(op.op, op.shapes): op.calls for op in profile.ops}
    assert calls[MM] == 2
    assert calls["aten::mm", ((64, 64), (64, 8))] == 1  # linear's product, inside aten::linear and aten::matmul
    assert len(calls) == len(profile.ops)


def test_own_times_and_the_rest_make_up_the_wall_time(profile):
    assert 0 < profile.attributed_us <= profile.wall_us * (1 + 1e-9)
    assert profile.attributed_us + profile.unattributed_us == pytest.approx(profile.wall_us)
    assert sum(op.share for op in profile.ops) == pytest.approx(profile.attributed_us / profile.wall_us)


def test_an_outer_op_does_not_include_the_op_it_calls():
    library = torch.library.Library("autokernel_profiler_test", "DEF")
    library.define("inner(Tensor x) -> Tensor")
    library.define("outer(Tensor x) -> Tensor")
    ops = torch.ops.autokernel_profiler_test
    library.impl("inner", lambda x: (time.sleep(0.005), x.clone())[1], "CPU")
    library.impl("outer", lambda x: ops.inner(x), "CPU")

    class Nested(nn.Module):
        def forward(self, x):
            return ops.outer(x)

    profile = profile_model(loaded(Nested(), torch.ones(2)), seconds=0.1)
    times = {op.op.removeprefix("autokernel_profiler_test::"): op.time_us for op in profile.ops}
    assert times["outer"] < times["inner"] / 2


def test_a_users_annotation_is_no_op(profile):
    assert not [op for op in profile.ops if "named" in op.op]


def test_ops_are_sorted_by_time(profile):
    times = [op.time_us for op in profile.ops]
    assert times == sorted(times, reverse=True)


def test_a_profile_survives_json(profile):
    assert ModelProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_time_outside_ops_is_unattributed():
    profile = profile_model(loaded(Products(), torch.ones(64, 64), pause_s=0.05), seconds=0.2)
    assert profile.wall_us > 50_000
    assert 25_000 <= profile.unattributed_us < profile.wall_us  # half, as a busy machine slows the ops


def test_calls_that_change_from_forward_to_forward_are_noted(caplog):
    class Growing(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            for _ in range(self.calls):
                x = x.sin()
            return x

    profile = profile_model(loaded(Growing(), torch.ones(4)), seconds=0.02)
    assert "saw different calls" in " ".join(profile.notes)
    assert "saw different calls" in caplog.text


def test_a_model_without_ops_cannot_be_profiled():
    with pytest.raises(MeasurementError, match="recorded no op on cpu"):
        profile_model(loaded(nn.Identity(), torch.ones(1)), seconds=0.02)


def test_a_forward_that_raises_is_the_users_error():
    with pytest.raises(ConfigError, match="forward raised RuntimeError"):
        profile_model(loaded(nn.Linear(3, 3), torch.ones(1, 4)))


def test_one_interrupted_call_does_not_change_an_ops_time():
    quiet = Cycle(walls_us=(10.0,) * 3, calls_us={MM: (1.0, 5.0, 1.0, 5.0, 1.0, 5.0)})
    noisy = Cycle(walls_us=(10.0,) * 3, calls_us={MM: (1.0, 5.0, 9000.0, 5.0, 1.0, 5.0)})
    assert quiet.per_forward()[MM] == noisy.per_forward()[MM] == (2, 6.0)
    assert (quiet + noisy).per_forward()[MM] == (2, 6.0)
    assert (quiet + noisy).total_us == 6.0


def test_calls_that_do_not_line_up_are_averaged():
    assert Cycle(walls_us=(1.0, 1.0), calls_us={MM: (1.0, 2.0, 3.0)}).per_forward()[MM] == (1.5, 3.0)


def event(name, kind, device_us, start, **more):
    fields = {"name": name, "device_type": f"DeviceType.{kind}", "input_shapes": [[64, 64], [64, 64]]}
    return SimpleNamespace(
        **fields, self_device_time_total=device_us, time_range=SimpleNamespace(start=start), is_user_annotation=False
    )


def test_a_kernel_counts_for_the_op_that_launched_it_and_not_again_for_itself():
    events = [
        event("aten::matmul", "CPU", 0.0, 1),
        event("aten::mm", "CPU", 10.0, 2),
        event("gemm_kernel", "CUDA", 10.0, 3),
        event("orphan_kernel", "CUDA", 4.0, 4),
    ]
    assert device_times(events, forwards=2) == {MM: (10.0,), (OUTSIDE_OPS, ()): (2.0, 2.0)}
    assert device_times(events[:3], forwards=1) == {MM: (10.0,)}


def test_no_kernel_on_cuda_is_an_error_that_says_why():
    with pytest.raises(MeasurementError, match="no CUDA kernel") as caught:
        device_times([event("aten::mm", "CPU", 0.0, 1)], forwards=1)
    assert "CUPTI" in caught.value.hint


def test_device_time_is_found_under_both_of_its_names():
    assert self_device_us(SimpleNamespace(self_device_time_total=3)) == 3.0
    assert self_device_us(SimpleNamespace(self_cuda_time_total=4)) == 4.0
    with pytest.raises(MeasurementError, match="not known here"):
        self_device_us(SimpleNamespace(time=1))


def test_each_node_of_a_graph_is_timed():
    graph = make_fx(lambda x, w: (x @ w).relu().split(8))(torch.ones(16, 16), torch.ones(16, 16))
    times = attribute_nodes(graph, [torch.ones(16, 16), torch.ones(16, 16)])
    assert list(times) == [node.name for node in graph.graph.nodes if node.op == "call_function"]
    assert all(time_us > 0 for time_us in times.values())


def test_a_slow_node_gets_its_own_time_and_others_do_not():
    def slow(x):
        time.sleep(0.004)
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    slow_node = graph.call_function(slow, (x,))
    graph.output(graph.call_function(torch.neg, (slow_node,)))
    times = attribute_nodes(fx.GraphModule(nn.Module(), graph), [torch.ones(2)])
    assert times["slow"] >= 4_000
    assert times["neg"] < 4_000


def test_node_times_stop_at_the_time_limit():
    calls = []
    graph = fx.Graph()
    graph.output(graph.call_function(lambda x: calls.append(x) or time.sleep(0.01), (graph.placeholder("x"),)))
    attribute_nodes(fx.GraphModule(nn.Module(), graph), [1], passes=1000, seconds=0.05)
    assert 2 <= len(calls) < 20


def test_ceilings_of_this_cpu_are_measured():
    ceilings = measure_ceilings("cpu")
    assert 0.1 < ceilings.copy_gbps < 10_000
    assert set(ceilings.gemm_tflops) == {"fp32", "bf16"}
    assert all(0 < rate < 1_000 for rate in ceilings.gemm_tflops.values())
    sizes = [size for size, _ in ceilings.cached]
    assert sizes == sorted(sizes)
    assert sizes[-1] < ceilings.copy_bytes
    assert ceilings.bandwidth_gbps(1 << 20) >= ceilings.bandwidth_gbps(1 << 40)
    assert 0 < ceilings.launch_us < 1_000
    assert Ceilings.from_json(json.loads(json.dumps(ceilings.to_json()))) == ceilings


def test_the_better_of_two_measurements_has_the_higher_rates_and_the_lower_cost():
    slow = Ceilings(device="d", copy_gbps=1, copy_bytes=9, cached=((1, 5.0), (2, 1.0)), gemm_tflops={"fp32": 2.0})
    fast = Ceilings(
        device="d", copy_gbps=2, copy_bytes=9, cached=((1, 4.0), (2, 3.0)), gemm_tflops={"fp32": 1.0}, launch_us=7.0
    )
    best = better_of(slow, fast)
    assert best == better_of(fast, slow)
    assert (best.copy_gbps, best.cached, best.gemm_tflops) == (2, ((1, 5.0), (2, 3.0)), {"fp32": 2.0})
    assert best.launch_us == 7.0
