"""Every snippet of program.md is compiled; Triton ones run in the interpreter too, C++ ones run."""

import fnmatch
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from autokernel.kernelfile import parse_kernel
from autokernel.loading import get_spec, load_file, specs
from autokernel.native import build, compile_library, find_nvcc
from autokernel.offgpu import compile_launches
from autokernel.playbook import sections, select, snippets
from autokernel.spec import build_case, retype
from autokernel.target import KNOWN_TARGETS

SNIPPETS = list(snippets(sections()))
ANY_GPU = "any GPU"
"""In a heading: the snippet is compiled for every known target."""

SMALL = {
    "matmul": [{"a": (65, 96), "b": (96, 40)}, {"a": (130, 200), "b": (200, 264)}, {"a": (16, 2048), "b": (2048, 64)}],
    "softmax": [{"x": (5, 100)}, {"x": (3, 7, 128)}],
    "layernorm": [{"x": (6, 100), "weight": (100,), "bias": (100,)}],
    "rmsnorm": [{"x": (5, 96), "weight": (96,)}, {"x": (2, 5001), "weight": (5001,)}],
    "flash_attention": [{"q": (1, 4, 150, 32), "k": (1, 2, 150, 32), "v": (1, 2, 150, 32)}],
    "fused_mlp": [{"x": (2, 33, 72), "w_gate": (100, 72), "w_up": (100, 72), "w_down": (72, 100)}],
    "cross_entropy": [{"logits": (9, 5003), "targets": (9,)}],
    "rotary_embedding": [{"x": (2, 3, 21, 48), "cos": (21, 24), "sin": (21, 24)}],
    "reduce": [{"x": (7, 3001)}],
}

RUN = """
    import sys
    from pathlib import Path
    import torch
    from autokernel.judge.compare import mismatch
    from autokernel.judge.trial import truth_of
    from autokernel.loading import get_spec, load_file
    sys.path.insert(0, sys.argv[1])
    from tests.torch_cpu.test_playbook import small_cases
    for path in sys.argv[2:]:
        kernel = load_file(Path(path), "snippet")
        spec = get_spec(kernel.KERNEL_TYPE)
        for number, case in enumerate(small_cases(kernel.KERNEL_TYPE)):
            for dtype in ("bf16", "fp32"):
                if dtype == "fp32" and (number or "TensorDescriptor" in Path(path).read_text()):
                    continue  # descriptors are for 16-bit matrices
                inputs = spec.make_inputs(case.with_dtype(dtype), 7)
                truth, meta = truth_of(spec, inputs)
                output = kernel.kernel_fn(**inputs)
                assert tuple(output.shape) == meta.shape, (path, output.shape)
                reason = mismatch(output, truth, dtype, spec.tolerances[dtype])
                assert reason is None, f"{path} {case.label} {dtype}: {reason}"
        print("passed", path)
"""


def of(language):
    return [pytest.param(s, id=re.sub(r"\W+", "-", f"{s.section.line} {s.section.heading}")) for s in SNIPPETS
            if s.language == language]  # fmt: skip


def is_triton(snippet):
    return "@triton.jit" in snippet.code


def small_cases(op):
    cases = [build_case(op, f"small{i}", **shapes) for i, shapes in enumerate(SMALL[op])]
    return [retype(case, targets="int64") for case in cases] if op == "cross_entropy" else cases


def targets_of(snippet, op):
    """sm_90, and those that the section is about."""
    if ANY_GPU in snippet.section.heading:
        return list(KNOWN_TARGETS)

    def chosen(arch):
        return snippet.section in select(sections(), op=op, backend="triton", arch=arch)

    about = [] if chosen(None) else [target for target in KNOWN_TARGETS if chosen(target)]
    return ["sm_90", *(target for target in about if target != "sm_90")]


def large_inputs(op):
    shapes = {
        "matmul": {"a": (1024, 1024), "b": (1024, 1024)},
        "softmax": {"x": (4096, 4096)},
        "layernorm": {"x": (512, 4096), "weight": (4096,), "bias": (4096,)},
        "rmsnorm": {"x": (512, 4096), "weight": (4096,)},
        "flash_attention": {"q": (1, 8, 512, 128), "k": (1, 2, 512, 128), "v": (1, 2, 512, 128)},
        "fused_mlp": {"x": (512, 1024), "w_gate": (2048, 1024), "w_up": (2048, 1024), "w_down": (1024, 2048)},
        "cross_entropy": {"logits": (64, 32000), "targets": (64,)},
        "rotary_embedding": {"x": (1, 8, 512, 128), "cos": (512, 64), "sin": (512, 64)},
        "reduce": {"x": (512, 4096)},
    }[op]
    inputs = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    if op == "cross_entropy":
        inputs["targets"] = torch.empty(shapes["targets"], dtype=torch.int64)
    return inputs


def test_every_block_has_a_language_that_is_compiled():
    assert {snippet.language for snippet in SNIPPETS} == {"python", "cuda", "cpp"}
    assert len(SNIPPETS) > 25


def test_tags_name_what_exists():
    for section in sections():
        for pattern in section.tags.get("op", ()):
            assert fnmatch.filter([*specs(), "graph_gelu_0a1b2c3d"], pattern), section.heading
        assert set(section.tags.get("backend", ())) <= {"triton", "cuda", "cpp"}, section.heading


@pytest.mark.parametrize("snippet", of("python"))
def test_python_snippet_is_a_kernel_file(snippet, tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(snippet.code)
    parsed = parse_kernel(snippet.code)
    assert set(parsed.config) == set(parsed.tunables)
    module = load_file(path, "snippet")
    names = list(get_spec(parsed.kernel_type).signature.parameters)
    code = module.kernel_fn.__code__
    assert list(code.co_varnames[: code.co_argcount]) == names
    if not is_triton(snippet):
        return
    for target in targets_of(snippet, parsed.kernel_type):
        launches = compile_launches(module.kernel_fn, large_inputs(parsed.kernel_type), target)
        assert launches
        for launch in launches:
            assert launch.shared_bytes <= KNOWN_TARGETS[target].shared_bytes, target
            if target == "sm_90":
                assert launch.stack_bytes == 0, "registers spill"


@pytest.mark.slow
def test_triton_snippets_are_right_in_the_interpreter(tmp_path):
    """In one process of its own: whether Triton interprets is decided when a kernel is defined."""
    paths = []
    for snippet in filter(is_triton, SNIPPETS):
        paths.append(tmp_path / f"line{snippet.section.line}.py")
        paths[-1].write_text(snippet.code)
    root = os.fspath(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(RUN), root, *map(str, paths)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    assert done.stdout.count("passed ") == len(paths)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("snippet", of("cuda"))
def test_cuda_snippet_compiles(snippet, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOKERNEL_BUILD_DIR", str(tmp_path))
    assert compile_library(snippet.code, backend="cuda", arch="90a").is_file()


@pytest.mark.parametrize("snippet", of("cpp"))
def test_cpp_snippet_compiles_without_warnings(snippet, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOKERNEL_BUILD_DIR", str(tmp_path))
    lib = build(snippet.code, flags=["-O2", "-Wall", "-Werror", "-Wno-psabi", "-Wno-unknown-pragmas"])
    (name,) = re.findall(r'extern "C" int (\w+)\(', snippet.code)
    CPP_CHECKS[name](getattr(lib, name))


def squares(function):
    x, y = torch.randn(3, 1003), torch.empty(3)
    function(x, y, 3, 1003)
    torch.testing.assert_close(y, x.square().sum(1))


def scale_bf16(function):
    x = torch.randn(64).bfloat16()
    x[3], x[4] = float("nan"), float("inf")
    y = torch.empty_like(x)
    function(x, y, 2, 1.7)
    torch.testing.assert_close(y, (x.float() * 1.7).bfloat16(), rtol=0, atol=0, equal_nan=True)


def silu(function):
    x = torch.cat([torch.linspace(-100, 100, 4000), torch.tensor([float("nan"), 0.0] + [float("inf")] * 6)])
    y = torch.empty_like(x)
    function(x, y, len(x) // 8)
    torch.testing.assert_close(y, torch.nn.functional.silu(x), rtol=1e-6, atol=1e-7, equal_nan=True)


def total(function):
    x, out = torch.randn(100_003), torch.empty(())
    function(x, out, x.numel())
    torch.testing.assert_close(out, x.double().sum().float(), rtol=1e-6, atol=1e-5)


def layernorm(function):
    x, w, b = torch.randn(3, 1001) + 100, torch.randn(1001), torch.randn(1001)
    y = torch.empty_like(x)
    function(x, w, b, y, 3, 1001, 1e-5)
    expected = torch.nn.functional.layer_norm(x.double(), (1001,), w.double(), b.double()).float()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def tiles(function):
    lanes = 32 if has_avx512() else 16  # what -march=native makes of NV * LANES
    a, b = torch.randn(12, 50), torch.randn(50, 3 * lanes)
    rows = torch.stack([a[i : i + 6].T.contiguous() for i in (0, 6)])
    panels = torch.stack([b[:, j * lanes : (j + 1) * lanes].contiguous() for j in range(3)])
    c = torch.zeros(12, 3 * lanes)
    function(rows, panels, c, 2, 3, 50)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


def lse(function):
    x, y = torch.randn(3, 5003) * 20, torch.empty(3)
    x[1, :2500] = float("-inf")
    function(x, y, 3, 5003)
    torch.testing.assert_close(y, torch.logsumexp(x, 1))


def rotary_halves(function):
    x, angles = torch.randn(2, 21, 3, 48).transpose(1, 2), torch.randn(21, 24)
    y = torch.empty(2, 3, 21, 48)
    function(x, angles.cos(), angles.sin(), y, 2, 3, 21, 24, *x.stride()[:3])
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    torch.testing.assert_close(y, torch.cat([a * cos - b * sin, b * cos + a * sin], -1))


def has_avx512():
    path = Path("/proc/cpuinfo")
    return path.exists() and " avx512f " in path.read_text()


CPP_CHECKS = {
    function.__name__: function for function in (squares, scale_bf16, silu, total, layernorm, tiles, lse, rotary_halves)
}
