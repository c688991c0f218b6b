"""The GPU corpus without a GPU: right kernels are right in Triton's interpreter, and everything compiles for sm_90."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from autokernel.judge.stages import STAGES
from autokernel.loading import load_file
from autokernel.native import find_nvcc
from autokernel.offgpu import compile_launches
from autokernel.records import Verdict

FOLDER = Path(__file__).parents[1] / "gpu"
corpus = load_file(FOLDER / "corpus.py", "gpu_corpus")
WRONG, RIGHT = corpus.fragments("wrong"), corpus.fragments("right")
CALLABLE = [fragment for fragment in (*WRONG, *RIGHT) if not fragment.needs_gpu]

# Texts by name: bases, and the fragments that have device code of their own.
TRITON = {name: corpus.base_text(name) for name in corpus.BASES if name.endswith("triton")}
TRITON |= {f.path.stem: f.text for f in CALLABLE if f.backend == "triton" and "@triton.jit" in f.own}
CUDA = {name: corpus.base_text(name) for name in corpus.BASES if name.endswith("cuda")}
CUDA |= {f.path.stem: f.text for f in CALLABLE if f.backend == "cuda" and "SOURCE =" in f.own}
RIGHT_TRITON = {name: text for name, text in TRITON.items() if name in corpus.BASES}
RIGHT_TRITON |= {f.path.stem: f.text for f in RIGHT if f.backend == "triton" and not f.needs_gpu}

CHECK = """
    import random, sys
    from pathlib import Path
    from autokernel.judge.compare import mismatch
    from autokernel.judge.trial import truth_of
    from autokernel.kernelfile import parse_kernel
    from autokernel.loading import get_spec, load_file

    MOST_ELEMENTS, MOST_ROWS, PER_KERNEL = 8_000, 300, 4
    for path in map(Path, sys.argv[1:]):
        kernel = load_file(path, path.stem)
        spec = get_spec(kernel.KERNEL_TYPE)
        small = [
            case for case in (*spec.cases, *spec.edges)
            if sum(meta.numel for meta in case.tensors.values()) < MOST_ELEMENTS
            and all(max(meta.shape[:-1], default=0) < MOST_ROWS for meta in case.tensors.values())
        ]
        strided = [case for case in small if any(meta.stride for meta in case.tensors.values())]
        others = random.sample(small, min(PER_KERNEL, len(small)))
        chosen = {case.name: case for case in (small[0], *strided[:1], *others)}
        calls = [(case, "fp32") for case in chosen.values()] + [(small[0], "fp16")]
        for case, dtype in calls:
            case = case.with_dtype(dtype)
            inputs = spec.make_inputs(case, random.getrandbits(40))
            truth, meta = truth_of(spec, inputs)
            output = kernel.kernel_fn(**inputs)
            assert (tuple(output.shape), output.dtype) == (meta.shape, inputs[next(iter(inputs))].dtype), case.name
            reason = mismatch(output, truth, dtype, spec.tolerances[dtype])
            assert reason is None, f"{path.stem}, {case.name} {dtype}: {reason}"
        print(path.stem)
"""


def written(tmp_path, name, text):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    return path


def user_inputs(op, dtype):
    """A call on CPU tensors of the user's shapes, with whatever is in memory: a compiler does not look."""
    case = corpus.user_case(op, dtype).case
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64}
    return {name: torch.zeros(meta.shape, dtype=dtypes[meta.dtype]) for name, meta in case.tensors.items()}


def test_the_corpus_is_large_and_says_what_it_expects():
    assert len(WRONG) >= 32
    assert len(RIGHT) >= 14
    stages = {name for name, _ in STAGES} | {"timing", "sanitizer"}
    for fragment in WRONG:
        assert fragment.caught_by in stages, fragment.path.name
        assert fragment.verdict in set(Verdict) - {"PASS"}, fragment.path.name
    for fragment in RIGHT:
        assert (fragment.caught_by, fragment.verdict) == ("", "PASS"), fragment.path.name
    for fragment in (*WRONG, *RIGHT):
        assert fragment.kind, f"{fragment.path.name} does not say what it is"
        assert "\n" not in fragment.kind
        compile(fragment.text, fragment.path.name, "exec")


def test_every_base_and_every_stage_has_a_wrong_kernel():
    assert {fragment.base for fragment in WRONG} == set(corpus.BASES)
    assert {name for name, _ in STAGES} <= {fragment.caught_by for fragment in WRONG}


def test_right_triton_kernels_are_right_in_the_interpreter(tmp_path):
    """In processes of their own: whether Triton interprets is decided when a kernel is defined."""
    paths = [str(written(tmp_path, name, text)) for name, text in RIGHT_TRITON.items()]

    def check(paths):
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CHECK), *paths]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(check, [paths[::2], paths[1::2]]):
            assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", list(TRITON))
def test_triton_compiles_off_gpu(tmp_path, name):
    module = load_file(written(tmp_path, name, TRITON[name]), f"gpu_corpus_{name}")
    launches = compile_launches(module.kernel_fn, user_inputs(module.KERNEL_TYPE, "bf16"), "sm_90")
    assert launches
    assert all(launch.shared_bytes <= 227 << 10 for launch in launches)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_cuda_compiles(tmp_path):
    def compiled(name):
        module = load_file(written(tmp_path, name, CUDA[name]), f"gpu_corpus_{name}")
        source = tmp_path / f"{name}.cu"
        source.write_text(module.ACCESS + module.SOURCE)
        command = [find_nvcc(), "-std=c++17", "-cubin", "-arch=sm_90", source.name, "-o", f"{name}.cubin"]
        return name, subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(2) as pool:
        for name, done in pool.map(compiled, CUDA):
            assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
            assert "warning" not in done.stderr, f"{name}: {done.stderr[-2000:]}"
