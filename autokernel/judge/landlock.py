"""Landlock by its three system calls: what a process may do in the file system, with TCP, and to other processes.

A process can only give rights up, and gives them up for all that it starts. No privilege is needed. What a kernel's
version of the interface (its ABI) does not know is left out; which files may be used is decided elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Mapping

from autokernel.machine import landlock_abi

# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE

READ = EXECUTE | READ_FILE | READ_DIR
DEVICE = READ | WRITE_FILE
ALL = (1 << 15) - 1
"""Every right up to truncation. The one on devices' ioctl, which GPU drivers live on, is left to everybody."""

LEAST_ABI = 2
"""The first version forbids every rename from one folder into another, without which compilers' caches do not work."""

_TCP_ABI, _SCOPE_ABI = 4, 6
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1


def usable_abi() -> int:
    """The kernel's version of Landlock, 0 where it has none that serves."""
    abi = landlock_abi() or 0
    return abi if abi >= LEAST_ABI else 0


def restrict(abi: int, rights: Mapping[str, int], *, scope_sockets: bool = True) -> None:
    """Leave this thread, and what it starts, with `rights` (path -> rights beneath it) and no TCP.

    From ABI 6 on it can also send no signal to processes that are not so restricted, nor (with `scope_sockets`) connect
    to their abstract UNIX sockets. Paths that do not exist are passed over.
    Raises: OSError when the kernel refuses.
    """
    handled = _known(abi)
    fields = [handled, _BIND_TCP | _CONNECT_TCP] if abi >= _TCP_ABI else [handled]
    if abi >= _SCOPE_ABI:
        fields.append(_SCOPE_SIGNALS | (_SCOPE_ABSTRACT_SOCKETS if scope_sockets else 0))
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    try:
        for path, access in rights.items():
            _allow(ruleset, path, access & handled)
        give_up_new_privileges()
        _syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def give_up_new_privileges() -> None:
    """No program that is started from here on gains rights by its set-user-id bit; Landlock and seccomp require it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, *(ctypes.c_ulong(value) for value in (1, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")


def _known(abi: int) -> int:
    unknown = (0 if abi >= 2 else _REFER) | (0 if abi >= 3 else _TRUNCATE)
    return ALL & ~unknown


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            access &= _OF_FILES
        rule = struct.pack("=Qi", access, fd)
        _syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_RULE_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(fd)


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock system call {number}: {os.strerror(code)}")
    return result
