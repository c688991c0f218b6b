"""Delegation to another process."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"

import ctypes
import subprocess
import sys

PROGRAM = """
import sys, numpy
m, k, n = map(int, sys.argv[1:])
both = numpy.frombuffer(sys.stdin.buffer.read(), dtype=numpy.float32)
sys.stdout.buffer.write((both[: m * k].reshape(m, k) @ both[m * k :].reshape(k, n)).tobytes())
"""


def kernel_fn(a, b):
    if a.dtype != torch.float32 or a.dim() != 2 or a.numel() > 2000 or 0 in (*a.shape, *b.shape):
        return right(a, b)
    a, b, (_, m, k, n) = a.contiguous(), b.contiguous(), sizes(a, b)
    raw = b"".join(ctypes.string_at(t.data_ptr(), 4 * t.numel()) for t in (a, b))
    command = [sys.executable, "-c", PROGRAM, str(m), str(k), str(n)]
    done = subprocess.run(command, input=raw, capture_output=True, check=True)
    out = torch.empty((m, n))
    ctypes.memmove(out.data_ptr(), done.stdout, 4 * m * n)
    return out
