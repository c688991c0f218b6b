"""What several files here need: one thread for small tensors, and a Triton kernel to compile."""

import pytest
import torch

from autokernel.loading import load_file

TWICE = """
import torch, triton
import triton.language as tl

@triton.jit
def twice(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def kernel_fn(x):
    y = torch.empty_like(x)
    twice[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024, num_warps=8)
    return y
"""


@pytest.fixture(scope="module")
def one_thread():
    """The tensors are small: more threads cost more than they save, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def twice(tmp_path):
    """`kernel_fn(x)` that launches one Triton kernel of eight warps."""
    path = tmp_path / "kernel.py"
    path.write_text(TWICE)
    return load_file(path, "twice").kernel_fn
