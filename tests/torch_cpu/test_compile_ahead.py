"""The stages' cases are compiled ahead by several children, in the candidate's own folder."""

import textwrap

from autokernel.judge.ahead import compile_ahead
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.worker import Worker
from autokernel.loading import get_spec

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
    with ForkServer() as server:
        compile_ahead(
            spec,
            spec.cases,
            lambda: Worker(server, {"kernel": str(tmp_path / "kernel.py")}, tmp_path),
            first_s=1.0,
            cores=cores,
        )
    files = [path.read_text().splitlines() for path in tmp_path.glob("called-*")]
    expected = ["x".join(map(str, case.tensors["x"].shape)) for case in spec.cases]
    return files, expected


def test_every_case_is_called_once_by_several_children(tmp_path):
    files, expected = called(tmp_path, "pass", cores=3)
    assert len(files) == 2
    assert sorted(shape for lines in files for shape in lines) == sorted(expected)


def test_a_kernel_that_fails_is_left_to_the_stages(tmp_path):
    files, _ = called(tmp_path, "raise RuntimeError('broken')", cores=3)
    assert files == []


def test_two_cores_are_not_worth_it(tmp_path):
    files, _ = called(tmp_path, "pass", cores=2)
    assert files == []
