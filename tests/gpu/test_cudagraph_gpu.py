"""A model with kernels as a CUDA graph: new inputs and weights count, results stay, calls are counted, all is fast."""

import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autokernel.applied import Applied
from autokernel.integrate import integrate
from autokernel.model import LoadedModel
from autokernel.race import race
from autokernel.records import TensorMeta
from autokernel.sites import Replacement
from autokernel.spec import build_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

HIDDEN, LAYERS = 256, 24
BOTH = pytest.mark.parametrize("compiler", ["cudagraph", "inductor-cudagraph"])


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Model(nn.Module):
    """Many small operators, one after the other; `host` makes the forward wait for the device."""

    def __init__(self, host=False):
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(LAYERS))
        self.linears = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(LAYERS))
        self.register_buffer("shift", torch.zeros(HIDDEN))
        self.host = host

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + F.silu(linear(norm(x)))
        if self.host and x.sum().item() > 1e30:
            x = -x
        return {"out": x + self.shift, "mean": x.mean()}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def a_model(**options):
    torch.manual_seed(0)
    return Model(**options).cuda().eval()


def an_input(seed, rows=64):
    return torch.randn(rows, HIDDEN, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def norm_kernel(rows=64):
    case = build_case("rmsnorm", "recorded", scalars={"eps": 1e-6}, x=(rows, HIDDEN), weight=(HIDDEN,))
    assert case.tensors["x"] == TensorMeta(shape=(rows, HIDDEN), dtype="fp32")
    return Replacement(
        op="rmsnorm", kernel_fn=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps), cases=[case]
    )


def close(found, expected):
    return all(torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-3) for name in expected)


@BOTH
@torch.no_grad()
def test_every_call_has_its_own_inputs_and_results(compiler):
    model = a_model()
    first, second = an_input(1), an_input(2)
    expected = [model(first), model(second)]
    with Applied(model, [norm_kernel()], compiler=compiler) as applied:
        found = [model(first), model(second), model(first)]
        assert applied.calls == {"rmsnorm": 3 * LAYERS}
        assert not applied._replacer.unrecorded
    assert close(found[0], expected[0])
    assert close(found[1], expected[1])
    assert torch.equal(found[0]["out"], found[2]["out"])


@BOTH
@torch.no_grad()
def test_weights_that_are_written_or_replaced_count(compiler):
    model, x = a_model(), an_input(1)
    with Applied(model, [norm_kernel()], compiler=compiler):
        before = model(x)
        model.norms[0].weight.mul_(2)
        model.shift.add_(1)
        written = model(x)
        model.linears[3].weight.data = model.linears[3].weight.data.flip(0).contiguous()
        replaced = model(x)
    assert not close(written, before)
    assert not close(replaced, written)
    assert close(replaced, model(x))


@BOTH
@torch.no_grad()
def test_other_shapes_are_recorded_apart_and_run_the_original(compiler):
    model, few = a_model(), an_input(3, rows=5)
    expected = model(few)
    with Applied(model, [norm_kernel()], compiler=compiler) as applied:
        model(an_input(1))
        found = model(few)
        assert (applied.calls, applied.fallbacks) == ({"rmsnorm": LAYERS}, {"rmsnorm": LAYERS})
    assert close(found, expected)


@torch.no_grad()
def test_a_forward_that_waits_for_the_device_is_right_piece_by_piece():
    model, x = a_model(host=True), an_input(1)
    expected = model(x)
    with Applied(model, [norm_kernel()], compiler="cudagraph") as applied:
        assert close(model(x), expected)
        assert close(model(x), expected)
        assert applied.calls == {"rmsnorm": 2 * LAYERS}


@torch.no_grad()
def test_a_kernel_that_waits_for_the_device_is_not_recorded_and_still_right():
    model, x = a_model(), an_input(1)
    expected, kernel = model(x), norm_kernel()
    plain = kernel.kernel_fn

    def waits(x, weight, eps):
        torch.cuda.synchronize()
        return plain(x, weight, eps)

    kernel.kernel_fn = waits
    with Applied(model, [kernel], compiler="cudagraph") as applied:
        assert close(model(x), expected)
        assert applied.calls == {"rmsnorm": LAYERS}
        assert len(applied._replacer.unrecorded) == 1
        assert close(model(x), expected)
    assert close(model(x), expected)  # the device is well


@torch.no_grad()
def test_the_models_gradients_do_not_go_through_a_recording():
    model, x = a_model(), an_input(1)
    with torch.enable_grad():
        model(x)["out"].sum().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with Applied(model, [norm_kernel()], compiler="cudagraph"):
            model(x)["out"].sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-2, atol=1e-2)


def seconds(run, x):
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(x)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.alone
@torch.no_grad()
def test_small_kernels_no_longer_wait_for_the_host():
    model, x = a_model(), an_input(1)
    eager_s = seconds(model, x)
    with Applied(model, [norm_kernel()], compiler="cudagraph"):
        model(x)
        replayed_s = seconds(model, x)
    print(f"eager {eager_s * 1e6:.0f} us, replayed {replayed_s * 1e6:.0f} us")
    assert replayed_s < 0.6 * eager_s


@pytest.mark.alone
def test_the_kernels_of_a_model_that_waits_for_the_host_are_chosen_and_raced_as_a_cuda_graph():
    item = LoadedModel(name="small", model=a_model(), args=(an_input(1),), kwargs={})
    asked = []

    def ask(chosen, record):
        asked.append((list(chosen), record))

    result = integrate(item, [norm_kernel()], budget_s=8, race=ask)
    assert result.compiler == "cudagraph", result.notes
    assert asked == [(result.used, True)]
    torch._dynamo.reset()
    found = race(item, [norm_kernel()], budget_s=60, record=True)
    print(
        found.compiler,
        found.speedup,
        found.compile_mode,
        found.compile_speedup,
        found.speedup_over_compile,
        found.notes,
    )
    assert found.compiler in ("cudagraph", "inductor-cudagraph")
    assert found.compile_mode == "reduce-overhead"
    assert found.speedup.low > 1.5
    assert found.calls == {"rmsnorm": LAYERS}
