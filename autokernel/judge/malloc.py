"""glibc's malloc, told what the judge needs of it; elsewhere than on Linux nothing happens."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, 1 << 30
_M_PERTURB = -6  # glibc's mallopt parameter: fill fresh memory with ~byte and freed memory with byte


def poison(byte: int) -> None:
    """Have malloc fill what it hands out; 0 ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_PERTURB, byte)


def keep_freed_memory() -> None:
    """Have free leave memory to this process: many outputs at once would get fresh pages every time, and a kernel that
    fills them would be timed with the system's work for that."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
