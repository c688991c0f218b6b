"""What a candidate's compiled libraries take from others, read from their files: BLAS, ATen, vendors, other processes.

A library that multiplies matrices by calling someone else's has to name that function, or to look it up by name.
"""

from __future__ import annotations

import re
from pathlib import Path

from autokernel.judge.audit import OTHERS_WORK

LOOKS_UP = re.compile(rb"\0(dlsym|dlvsym|dlopen|dlmopen|__libc_dlsym)\0")
STARTS = re.compile(rb"\0(system|popen|fork|vfork|posix_spawnp?|execv[ep]*|execl[ep]*)\0")
_NAMES = re.compile(rb"\0([A-Za-z_][\w@.]{3,200})(?=\0)")


def borrowed(folder: Path, device: str) -> str | None:
    """What the first suspicious library below `folder` borrows, in words; None when there is none.

    nvcc links CUDA's runtime into each library, and that looks up the driver: on a GPU only the names count.
    """
    for path in sorted(folder.rglob("*.so")):
        if path.is_symlink() or not path.is_file():
            continue
        text = path.read_bytes()
        for match in _NAMES.finditer(text):
            if OTHERS_WORK.match(match[1].decode()):
                return f"its library takes {match[1].decode()} from another"
        if device == "cpu" and (found := LOOKS_UP.search(text) or STARTS.search(text)):
            return f"its library calls {found[1].decode()}"
    return None
