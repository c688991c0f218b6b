"""The playbook's GPU snippets on a GPU: CUDA ones do what each claims, Triton ones agree with the oracles."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from autokernel.judge.compare import mismatch
from autokernel.judge.trial import truth_of
from autokernel.loading import get_spec, load_file
from autokernel.native import build
from autokernel.playbook import sections, snippets
from tests.torch_cpu.test_playbook import is_triton, small_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

HOPPER = ("row_sums_fp32", "products")


def of(language):
    chosen = [snippet for snippet in snippets(sections()) if snippet.language == language]
    return [pytest.param(s, id=re.sub(r"\W+", "-", f"{s.section.line} {s.section.heading}")) for s in chosen]


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def empty(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


@pytest.mark.parametrize("snippet", of("cuda"))
def test_cuda_snippet_is_right(snippet, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOKERNEL_BUILD_DIR", str(tmp_path))
    (name,) = re.findall(r'extern "C" int (\w+)\(', snippet.code)
    if name in HOPPER and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    CHECKS[name](getattr(build(snippet.code, backend="cuda"), name))
    torch.cuda.synchronize()


@pytest.mark.parametrize("snippet", [p for p in of("python") if is_triton(p.values[0])])
def test_triton_snippet_is_right(snippet, tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(snippet.code)
    kernel = load_file(path, "snippet")
    spec = get_spec(kernel.KERNEL_TYPE)
    for case in small_cases(kernel.KERNEL_TYPE):
        inputs = spec.make_inputs(case.with_dtype("bf16"), 7)
        truth, _ = truth_of(spec, inputs)
        moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        output = kernel.kernel_fn(**moved).cpu()
        reason = mismatch(output, truth, "bf16", spec.tolerances["bf16"])
        assert reason is None, f"{case.label}: {reason}"


def scale(function):
    x, y = randn(1_000_000, dtype=torch.float32), empty(1_000_000)
    function(x, y, 250_000, 1.5)
    torch.testing.assert_close(y, x * 1.5)


def rmsnorm(function):
    for cols in (512, 4096, 16384):
        x, w, y = randn(33, cols), randn(cols), empty(33, cols, dtype=torch.bfloat16)
        function(x, w, y, 33, cols // 8, 1e-6)
        expected = F.rms_norm(x.float(), (cols,), w.float(), 1e-6)
        torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


def matmul(function):
    a, b, out = randn(192, 80, dtype=torch.float16), randn(80, 128, dtype=torch.float16), empty(192, 128)
    function(a, b, out, 192, 128, 80)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-3, atol=1e-2)


def lse2(function):
    x, parts, out = randn(5, 10_007, dtype=torch.float32), empty(5, 4, 2), empty(5)
    x[2, :5000] = float("-inf")
    function(x, parts, torch.zeros(5, dtype=torch.int32, device="cuda"), out, 5, 10_007, 4)
    torch.testing.assert_close(out, torch.logsumexp(x * math.log(2), 1) / math.log(2), rtol=1e-5, atol=1e-5)


def matmul_nt(function):
    for k in (32, 64, 96, 512):
        a, b, out = randn(128, k), randn(192, k), empty(128, 192)
        function(a, b, out, 128, 192, k)
        torch.testing.assert_close(out, a.float() @ b.float().T, rtol=1e-3, atol=1e-2)


def row_sums_fp32(function):
    x, out = randn(1001, 2052, dtype=torch.float32), empty(1001)
    function(x, out, 1001, 2052, 132)
    torch.testing.assert_close(out, x.sum(1), rtol=1e-4, atol=1e-3)


def products(function):
    x, y, out = randn(64, 64), randn(32, 64), empty(2, 64, 32)
    function(x, y, out)
    torch.testing.assert_close(out, (x.float() @ y.float().T).expand(2, 64, 32), rtol=1e-3, atol=1e-2)


def cross_entropy_rows(function):
    for classes in (5, 1000, 50_257):
        logits, out = randn(17, classes) * 4, empty(17)
        targets = torch.randint(classes, (17,), device="cuda")
        targets[3] = -100
        function(logits, targets, out, 17, classes, -100)
        expected = F.cross_entropy(logits.float(), targets, reduction="none")
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def rotary_halves(function):
    x, angles = randn(6, 77, 128), randn(77, 64, dtype=torch.float32)
    y = empty(6, 77, 128, dtype=torch.bfloat16)
    cos, sin = angles.cos(), angles.sin()
    function(x, cos, sin, y, 6, 77, 8)
    a, b = x.float().chunk(2, -1)
    torch.testing.assert_close(y.float(), torch.cat([a * cos - b * sin, b * cos + a * sin], -1), rtol=1e-2, atol=1e-2)


def sum_columns(function):
    x, out = randn(3, 203, 148, dtype=torch.float32), empty(3, 148)
    function(x, out, 3, 203, 37)
    torch.testing.assert_close(out, x.sum(1), rtol=1e-4, atol=1e-4)


def attention_64(function):
    for seq, causal in ((64, True), (200, True), (333, False), (1024, True)):
        q, k, v = (randn(6, seq, 64) for _ in range(3))
        out = empty(6, seq, 64, dtype=torch.bfloat16)
        function(q, k, v, out, 6, seq, 0.125, causal)
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


CHECKS = {
    check.__name__: check
    for check in (
        scale,
        rmsnorm,
        matmul,
        lse2,
        matmul_nt,
        row_sums_fp32,
        products,
        cross_entropy_rows,
        rotary_halves,
        sum_columns,
        attention_64,
    )
}
