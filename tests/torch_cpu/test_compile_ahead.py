"""The stages' cases are compiled ahead by several children, without a GPU, in the candidate's own folder."""

import textwrap
import time

from autokernel.judge import places
from autokernel.judge.ahead import CompileAhead
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.worker import Worker
from autokernel.loading import get_spec, starter_path
from autokernel.target import KNOWN_TARGETS

RECORDING = """
    import os
    import torch

    def kernel_fn(x, weight, eps=1e-6):
        {fault}
        with open(f"called-{{os.getpid()}}", "a") as file:
            file.write("x".join(map(str, x.shape)) + chr(10))
        return torch.empty_like(x)
"""


def called(tmp_path, fault, cores):
    (tmp_path / "kernel.py").write_text(textwrap.dedent(RECORDING).format(fault=fault))
    spec = get_spec("rmsnorm")
    target = {"kernel": str(tmp_path / "kernel.py")}
    with (
        ForkServer() as server,
        CompileAhead(spec, spec.cases, lambda: Worker(server, target, tmp_path), cores=cores) as ahead,
    ):
        enough = ahead.works()
        for case in spec.cases:
            ahead.await_case(case)
    files = [path.read_text().splitlines() for path in tmp_path.glob("called-*")]
    expected = ["x".join(map(str, case.tensors["x"].shape)) for case in spec.cases]
    return files, expected, enough


def test_every_case_is_called_once_by_several_children(tmp_path):
    files, expected, enough = called(tmp_path, "import time; time.sleep(0.4)", cores=4)
    assert len(files) == 2
    assert sorted(shape for lines in files for shape in lines) == sorted(expected)
    assert enough


def test_a_kernel_that_fails_everywhere_is_left_to_the_stages(tmp_path):
    files, _, enough = called(tmp_path, "raise RuntimeError('broken')", cores=4)
    assert files == []
    assert not enough


def test_one_case_that_fails_does_not_keep_its_child_from_the_others(tmp_path):
    files, expected, enough = called(tmp_path, "assert x.shape[-1] != 4096", cores=4)
    wanted = [shape for shape in expected if not shape.endswith("x4096")]
    assert len(wanted) < len(expected)
    assert sorted(shape for lines in files for shape in lines) == sorted(wanted)
    assert enough


def test_when_all_children_have_died_nobody_waits_for_them(tmp_path):
    files, _, enough = called(tmp_path, "os._exit(1)", cores=4)
    assert files == []
    assert not enough


def test_a_case_is_there_before_the_rest(tmp_path):
    fault = "import time; time.sleep(x.shape[-1] == 4096 and 60)"
    (tmp_path / "kernel.py").write_text(textwrap.dedent(RECORDING).format(fault=fault))
    spec, target = get_spec("rmsnorm"), {"kernel": str(tmp_path / "kernel.py")}
    slow = [case for case in spec.cases if case.tensors["x"].shape[-1] == 4096]
    quick = [case for case in spec.cases if case not in slow]
    with (
        ForkServer() as server,
        CompileAhead(spec, [*slow[:1], *quick], lambda: Worker(server, target, tmp_path), cores=4) as ahead,
    ):
        start = time.perf_counter()
        for case in quick:
            ahead.await_case(case)
        assert time.perf_counter() - start < 30
    assert slow
    assert len(list(tmp_path.glob("called-*"))) == 1


def test_two_cores_are_not_worth_it(tmp_path):
    files, _, enough = called(tmp_path, "pass", cores=3)
    assert files == []
    assert enough


def test_triton_kernels_are_compiled_for_a_gpu_that_the_children_do_not_have(tmp_path):
    (tmp_path / "kernel.py").write_text(starter_path("softmax", "triton").read_text())
    spec, target = get_spec("softmax"), {"kernel": str(tmp_path / "kernel.py")}

    def start():
        return Worker(server, target, tmp_path, compiling_for=KNOWN_TARGETS["sm_90"])

    with ForkServer("cuda", builds=tmp_path) as server, CompileAhead(spec, spec.cases[:5], start, cores=4) as ahead:
        assert ahead.works()
        for case in spec.cases[:5]:
            ahead.await_case(case)
    assembly = [path.read_text() for path in (tmp_path / places.TRITON).rglob("*.ptx")]
    assert len(assembly) >= 2
    assert all(".target sm_90" in text for text in assembly)
