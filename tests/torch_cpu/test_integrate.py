"""Whole-model work in a child process: profile, choice of kernels, measurement, and what goes wrong there."""

import gc
import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from models import HIDDEN, Norm, loaded, toy
from test_match import matches

from autokernel.errors import ConfigError, WorkerError
from autokernel.integrate import Integration, adopt, integrate
from autokernel.loading import get_spec, starter_path
from autokernel.model_worker import call_worker
from autokernel.modelanswers import _against_max_autotune
from autokernel.outputs import Expected, disagreement, output_leaves
from autokernel.race import _inductor, race
from autokernel.records import Interval
from autokernel.sites import Replacement

pytestmark = pytest.mark.alone

# A norm large enough that fusing it is a sure gain, and a softmax whose kernel will be slow on purpose.
MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512))

    def forward(self, x):
        v = x.pow(2).mean(-1, keepdim=True)
        return torch.softmax(self.weight * (x * torch.rsqrt(v + 1e-6)), -1)

def get_inputs():
    return [torch.randn(2048, 512)]
"""

SLOW_SOFTMAX = """
import time, torch
KERNEL_TYPE = "softmax"
BACKEND = "cpp"
def kernel_fn(x, dim=-1):
    time.sleep(0.02)
    return torch.softmax(x, dim)
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "norm_model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def profiled(model_file):
    request = {"request": "profile", "model": str(model_file), "device": "cpu", "dtype": None, "ops": None, "seed": 0}
    return call_worker(request, deadline_s=120, workdir=model_file.parent)


def test_profile_answers_with_plan_and_ceilings(profiled):
    planned = {op["op"]: op for op in profiled["plan"]["ops"]}
    assert planned["rmsnorm"]["cases"][0]["case"]["tensors"]["x"]["shape"] == [2048, 512]
    assert 0 < planned["rmsnorm"]["headroom"] < 1
    assert profiled["profile"]["wall_us"] > 0
    assert profiled["ceilings"]["copy_gbps"] > 0


def kernel(folder, planned, op, text):
    path = folder / "optimized" / op / "kernel.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (path.parent / "meta.json").write_text('{"used": true}')
    return {"op": op, "path": str(path), "cases": [timed["case"] for timed in planned[op]["cases"]]}


def test_kernels_that_help_are_kept_and_others_left_out(profiled, model_file, tmp_path):
    planned = {op["op"]: op for op in profiled["plan"]["ops"]}
    kernels = [
        kernel(tmp_path, planned, "softmax", SLOW_SOFTMAX),
        kernel(tmp_path, planned, "rmsnorm", starter_path("rmsnorm", "cpp").read_text()),
    ]
    request = {"request": "integrate", "model": str(model_file), "device": "cpu", "kernels": kernels, "budget_s": 10}
    answer = call_worker(request, deadline_s=120, workdir=tmp_path)
    assert answer["used"] == ["rmsnorm"], answer["left_out"]
    assert "no sure gain" in answer["left_out"]["softmax"]
    assert answer["calls"] == {"rmsnorm": 1}
    assert answer["speedup"]["low"] > 1
    assert answer["eager_us"] > answer["optimized_us"]
    assert '"used": false' in (tmp_path / "optimized" / "softmax" / "meta.json").read_text()
    meta = json.loads((tmp_path / "optimized" / "rmsnorm" / "meta.json").read_text())
    assert meta == {"used": True, "compiler": "graph"}
    assert "s are left" in answer["compile_note"]  # too few for a compilation


def replacement(item, op, fn):
    return Replacement(op=op, kernel_fn=fn, cases=[match.case for match in matches(item, [op])])


def test_a_kernel_that_changes_the_output_is_left_out():
    item = toy()
    wrong = replacement(
        item, "rmsnorm", lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, None, eps)
    )
    result = integrate(item, [wrong], budget_s=1)
    assert result.used == []
    assert "changes the output" in result.left_out["rmsnorm"]
    assert result.speedup is None


def test_a_kernel_that_is_never_called_is_left_out():
    item = toy()
    other = loaded(Norm(), torch.randn(4, HIDDEN))
    stranger = replacement(other, "rmsnorm", lambda x, weight, eps: x)
    result = integrate(item, [stranger], budget_s=1)
    assert "never called" in result.left_out["rmsnorm"]
    assert "5 calls" in result.left_out["rmsnorm"]


def test_kernels_that_help_a_graph_slower_than_eager_are_withdrawn():
    """A norm of few elements: fused it beats its six operators, but not the cost of calling a captured graph."""
    item = loaded(Norm(), torch.randn(4, HIDDEN))
    fused = replacement(
        item, "rmsnorm", lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    )
    result = integrate(item, [fused], budget_s=8)
    assert result.speedup is not None, result.left_out
    assert result.speedup.high < 1
    assert result.used == []
    assert "slower than eager" in result.left_out["rmsnorm"]


def fused_norm():
    """A norm of enough elements for its fusion to be a sure gain, and that gain as a kernel."""
    item = loaded(Norm(), torch.randn(8192, HIDDEN))
    fused = replacement(
        item, "rmsnorm", lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    )
    return item, fused


def test_both_ways_and_torch_compile_are_measured_and_one_is_taken():
    item, fused = fused_norm()
    found = race(item, [fused], budget_s=20)
    ways = {"graph", "inductor"} if found.inductor_gain else {"graph"}
    assert found.compiler in ways, found.notes
    assert found.inductor_gain or "was not tried" in found.notes[0]
    assert (found.compiler == "inductor") == bool(found.inductor_gain and found.inductor_gain.low > 1)
    assert (found.used, found.calls, found.fallbacks) == (["rmsnorm"], {"rmsnorm": 1}, {"rmsnorm": 0})
    for interval in (found.speedup, found.compile_speedup, found.speedup_over_compile):
        assert 0 < interval.low <= interval.high
    assert Integration.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_inductor_is_first_tried_without_what_it_would_fuse():
    """Both kernels are hopeless, and one has to stay."""

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = Norm(), torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

        def forward(self, x):
            return self.norm(self.linear(x))

    item = loaded(Both(), torch.randn(512, HIDDEN))

    def slow(op):
        def kernel_fn(*args):
            time.sleep(0.005)
            return get_spec(op).oracle(*args)

        return replacement(item, op, kernel_fn)

    result = Integration()
    best = _inductor(item, [slow("matmul"), slow("rmsnorm")], time.perf_counter() + 120, result, "inductor")
    assert list(result.left_out) == ["rmsnorm"]
    assert [kernel.op for kernel in best.kernels] == ["matmul"]


def test_the_mode_that_takes_longest_to_compile_is_measured_apart(profiled, model_file, tmp_path, monkeypatch):
    planned = {op["op"]: op for op in profiled["plan"]["ops"]}
    kernels = [kernel(tmp_path, planned, "rmsnorm", starter_path("rmsnorm", "cpp").read_text())]
    request = {"model": str(model_file), "device": "cpu", "kernels": kernels, "compile_baseline": True}
    monkeypatch.chdir(tmp_path)
    result = Integration(used=["rmsnorm"], compiler="graph")
    _against_max_autotune(request, result, 45.0)
    assert result.notes == []
    for interval in (result.autotune_speedup, result.speedup_over_autotune):
        assert 0 < interval.low <= interval.high
    assert result.compile_speedup is None
    _against_max_autotune(request, result, 2.0)
    assert result.notes == ["torch.compile in mode max-autotune was not measured: 2 s are left"]


FASTER = Interval(low=1.4, estimate=1.5, high=1.6)


def test_what_the_race_found_stands_in_the_result():
    result = Integration(
        used=["rmsnorm", "softmax"], left_out={"matmul": "slow"}, speedup=FASTER, graph_overhead=FASTER
    )
    dropped = {"softmax": "faster without it"}
    adopt(Integration(used=["rmsnorm"], left_out=dropped, speedup=FASTER, compiler="inductor", blocks=9), result)
    assert (result.used, result.compiler, result.blocks) == (["rmsnorm"], "inductor", 9)
    assert result.left_out == {"matmul": "slow", **dropped}
    assert result.graph_overhead == FASTER


def test_without_a_kernel_the_race_is_of_torch_compile_alone():
    stranger = replacement(loaded(Norm(), torch.randn(4, HIDDEN)), "rmsnorm", lambda x, weight, eps: x)
    asked = []

    def raced(chosen, record):
        asked.append((list(chosen), record))
        return Integration(compile_speedup=FASTER)

    result = integrate(toy(), [stranger], budget_s=1, race=raced)
    assert asked == [([], False)]
    assert (result.compile_speedup, result.speedup, result.used) == (FASTER, None, [])


def test_a_race_finds_the_memory_of_the_truth_free():
    item, (shape,) = toy(), {tensor.shape for tensor in output_leaves(toy().model, toy())}
    held = []

    def raced(chosen, record):
        found = (each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == shape)
        held.extend(each.dtype for each in found)
        return

    kernel = replacement(item, "rmsnorm", get_spec("rmsnorm").oracle)
    integrate(item, [kernel], budget_s=1, race=raced)
    assert torch.float64 not in held


def expected(values, dtype="fp32"):
    return Expected(eager=(values.float(),), truth=(values,), truth_dtype="fp64", dtype=dtype)


def test_outputs_are_compared_as_a_tree():
    truth = torch.randn(64, 8, dtype=torch.float64)
    right = truth.float()
    assert disagreement([right * (1 + 1e-6)], expected(truth)) is None
    assert disagreement([right * 1.01], expected(truth)) is not None
    assert disagreement([right * 1.01], expected(truth, "bf16")) is None
    assert "NaN" in disagreement([right.masked_fill(right > 2, float("nan"))], expected(truth))
    assert disagreement([right.double()], expected(truth)) is not None
    assert disagreement([], expected(truth)) is not None


def worker_error(tmp_path, body, kind=ConfigError, deadline_s=60.0):
    path = tmp_path / "bad_model.py"
    head = "import os, time, torch\nfrom torch import nn\n"
    forward = textwrap.indent(textwrap.dedent(body), " " * 8)
    path.write_text(
        head + f"class Model(nn.Module):\n    def forward(self, x):\n{forward}\n"
        "def get_inputs():\n    return [torch.randn(3)]\n"
    )
    with pytest.raises(kind) as failure:
        call_worker(
            {"request": "profile", "model": str(path), "device": "cpu"}, deadline_s=deadline_s, workdir=tmp_path
        )
    assert "Traceback" not in str(failure.value)
    return failure.value


def test_the_models_own_error_comes_back_as_it_was(tmp_path):
    error = worker_error(tmp_path, "raise ValueError('needs four dimensions')")
    assert "needs four dimensions" in str(error)
    assert error.hint


def test_a_crash_in_the_models_native_code_is_told(tmp_path):
    assert "SIGSEGV" in str(worker_error(tmp_path, "os.kill(os.getpid(), 11)", WorkerError))


def test_a_hang_ends_at_the_deadline_with_all_it_started(tmp_path):
    started = time.perf_counter()
    pidfile = tmp_path / "pid"
    body = f"open({str(pidfile)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    assert "did not end" in str(worker_error(tmp_path, body, WorkerError, deadline_s=15))
    assert time.perf_counter() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(pidfile.read_text()), 0)


def test_missing_model_is_a_config_error(tmp_path):
    request = {"request": "profile", "model": str(tmp_path / "nothing.py"), "device": "cpu"}
    with pytest.raises(ConfigError, match=r"nothing\.py"):
        call_worker(request, deadline_s=60, workdir=tmp_path)


def test_the_parents_side_imports_no_torch():
    code = "import sys, autokernel, autokernel.model_worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
