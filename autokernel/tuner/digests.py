"""What makes two configurations the same kernel: the machine code that they compile to and how they launch it.

Of a binary only what is loaded to run counts. Debug sections name the file and lines of the source, and differ between
configurations that are the same instructions. Knows no torch.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LOADED = 2  # SHF_ALLOC
_NO_BYTES = 8  # SHT_NOBITS
_KERNEL_ATTRIBUTES = b".nv.info"  # not loaded, but registers, bounds and shared memory of a cubin's kernels stand here
_NOTES = b".note"  # among them the build id, which covers the debug sections too

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True, slots=True)
class _Section:
    name: bytes
    kind: int
    flags: int
    size: int
    body: bytes


def of_code(binary: bytes) -> str:
    """Digest of a binary without its debug sections; of all of it when it is no 64-bit ELF file."""
    try:
        sections = list(_sections(binary))
    except (struct.error, ValueError):
        return hashlib.sha256(binary).hexdigest()
    digest = hashlib.sha256()
    for section in sections:
        if (section.flags & _LOADED and not section.name.startswith(_NOTES)) or (
            section.name.startswith(_KERNEL_ATTRIBUTES)
        ):
            digest.update(section.name + b"\0" + section.size.to_bytes(8, "little") + section.body)
    return digest.hexdigest()


def together(parts: Iterable[str]) -> str:
    """One short digest of several texts in their order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _sections(binary: bytes) -> Iterator[_Section]:
    """Sections of an ELF file. Raises: ValueError or struct.error when it is none."""
    if binary[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    header = _HEADER.unpack_from(binary)
    start, entry_size, count, names_index = header[6], header[11], header[12], header[13]
    entries = [_SECTION.unpack_from(binary, start + entry_size * i) for i in range(count)]
    if not names_index < len(entries):
        raise ValueError("no section names")
    names = entries[names_index][4]
    for name, kind, flags, _, offset, size, *_ in entries:
        end = binary.find(b"\0", names + name)
        body = b"" if kind == _NO_BYTES else binary[offset : offset + size]
        yield _Section(binary[names + name : end], kind, flags, size, body)
