"""The kernels whose grids are recorded: right in Triton's interpreter, and compiled by the real compilers off-GPU."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autokernel.native import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "tuner"
sys.path.insert(0, str(FOLDER))

from building import compiler  # noqa: E402
from crew import ChildLost, Stopped, answer_all  # noqa: E402
from workloads import KERNELS, WORKLOADS, grid_of  # noqa: E402

TRITON = sorted(path.stem for path in KERNELS.glob("*.py") if path.stem != "rmsnorm_cuda")

CHECK = """
import random, sys
from pathlib import Path
from autokernel.judge.compare import mismatch
from autokernel.judge.trial import truth_of
from autokernel.loading import get_spec, load_file
from autokernel.spec import build_case, retype
from autokernel.tuner.space import Space

name, path = sys.argv[1], Path(sys.argv[2])
SHAPES = {
    "matmul": [{"a": (100, 72), "b": (72, 130)}, {"a": (64, 64), "b": (64, 64)}],
    "matmul_skinny": [{"a": (16, 600), "b": (600, 130)}],
    "softmax": [{"x": (7, 1500)}, {"x": (7, 100)}],
    "layernorm": [{"x": (7, cols), "weight": (cols,), "bias": (cols,)} for cols in (1500, 100)],
    "cross_entropy": [{"logits": (9, 1500), "targets": (9,)}],
    "rotary_embedding": [{"x": (2, 3, 50, 32), "cos": (50, 16), "sin": (50, 16)}],
    "flash_attention": [{"q": (1, 2, 150, 32), "k": (1, 1, 150, 32), "v": (1, 1, 150, 32)}],
    "fused_mlp": [{"x": (70, 64), "w_gate": (96, 64), "w_up": (96, 64), "w_down": (80, 96)}],
}
SCALARS = {"cross_entropy": [{"reduction": kind} for kind in ("none", "mean", "sum")]}
module = load_file(path, "kernel")
space, spec = Space.read(path.read_text()), get_spec(module.KERNEL_TYPE)
points = [space.locate(module.CONFIG), *random.Random(0).sample(list(space.points()), 4)]
for shapes in SHAPES[name]:
    for scalars in SCALARS.get(name, [{}]):
        case = build_case(spec.op, "", "bf16", scalars=scalars, **shapes)
        case = retype(case, targets="int64") if "targets" in shapes else case
        inputs = spec.make_inputs(case, 3)
        truth, meta = truth_of(spec, inputs)
        for point in points:
            module.CONFIG.update(space.config_at(point))
            output = module.kernel_fn(**inputs)
            assert tuple(output.shape) == meta.shape, (module.CONFIG, output.shape)
            reason = mismatch(output, truth, "bf16", spec.tolerances["bf16"])
            assert reason is None, f"{module.CONFIG}: {reason}"
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRITON)
def test_kernel_is_right_in_the_interpreter(name):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", CHECK, name, str(KERNELS / f"{name}.py")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "right"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in WORKLOADS.items() if one.device == "cuda"])
def test_default_compiles_for_the_gpu_that_is_recorded_on(name, monkeypatch, tmp_path):
    workload = WORKLOADS[name]
    if workload.path.stem.endswith("_cuda") and find_nvcc() is None:
        pytest.skip("no nvcc")
    monkeypatch.setenv("AUTOKERNEL_CUDA_ARCH", "90a")
    monkeypatch.setenv("AUTOKERNEL_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(os, "nice", lambda _: 0)  # this process goes on to other tests
    message = {"workload": name, "config": dict(grid_of(workload).config), "target": "sm_90"}
    answer = compiler()(message)
    assert answer["ok"], answer
    assert 8 <= answer["registers"] <= 255
    assert answer["stack_bytes"] == 0, "the plain default should not spill"
    assert answer["compile_s"] > 0
    assert compiler()(message)["digest"] == answer["digest"]


def test_grids_are_large_and_hold_the_default():
    for name, workload in WORKLOADS.items():
        space = grid_of(workload)
        points = set(space.points())
        assert space.locate(space.config) in points, name
        assert len(points) >= (500 if name not in ("attention_128", "rmsnorm_cpp") else 200), name


def sleeper():
    """Answers at once, but for one message that hangs and one that kills it."""

    def answer(message):
        if message["number"] == 1:
            threading.Event().wait(60)
        if message["number"] == 2:
            os._exit(3)
        return message

    return answer


def test_crew_replaces_children_that_hang_or_die():
    messages = [{"number": number} for number in range(5)]
    answers = answer_all(sleeper, messages, children=2, deadline_s=1.0, stop=threading.Event())
    lost = {number: one.late for number, one in enumerate(answers) if isinstance(one, ChildLost)}
    assert lost == {1: True, 2: False}
    assert [one for one in answers if not isinstance(one, ChildLost)] == [messages[0], messages[3], messages[4]]


def test_crew_stops_when_told():
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        answer_all(sleeper, [{"number": 1}], children=1, deadline_s=60.0, stop=stop)
