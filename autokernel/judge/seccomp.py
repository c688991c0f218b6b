"""A seccomp filter: system calls that no kernel needs, and that lead out of the sandbox, fail with "not permitted".

The filter is a small BPF program over the number and the arguments of each call, assembled here for x86-64 and 64-bit
ARM. It cannot follow pointers, so what depends on a path is Landlock's matter, or is blocked for every path.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autokernel.judge.landlock import give_up_new_privileges

_BLOCKED: Mapping[str, tuple[int | None, int | None]] = {
    # another process's memory and descriptors
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # other views of the file system
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # interfaces with a history of ways into the kernel; io_uring also opens sockets past this filter
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # the user's keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
    # an unfair share of the machine while two kernels are compared
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    # owners and modes of files, which Landlock does not rule
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    # memory and queues that outlive their process
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
"""Calls that always fail: name -> number on (x86-64, 64-bit ARM), None where it does not exist."""

_SOCKET_CALLS = {
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
}
_SOCKET, _SOCKETPAIR, _CLONE, _CLONE3 = (41, 198), (53, 199), (56, 220), (435, 435)
_BY_PROCESS = {"prlimit64": (302, 261), "move_pages": (279, 239)}
_SET_AFFINITY = (203, 122)

_AF_UNIX, _SOCK_DGRAM, _SOCK_TYPE_MASK = 1, 2, 0xF
_NEW_NAMESPACE = 0x7E020000
"""The flags of clone that make a namespace of any kind (mount, cgroup, uts, ipc, user, pid, net)."""

_X32_BIT = 0x40000000
_SECCOMP_SET_MODE_FILTER = 1
_SPEC_ALLOW = 4
"""Without this flag older kernels switch a mitigation on that slows memory accesses: measured code must not pay it."""

# BPF instructions: class and mode, jumps if true and if false, operand.
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, 16
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_DENY = _FAIL | errno.EPERM

Instruction = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    audit: int  # what the kernel calls it in `struct seccomp_data`
    seccomp: int  # number of the system call that installs a filter
    column: int


_ARCHITECTURES = {
    "x86_64": _Architecture(audit=0xC000003E, seccomp=317, column=0),
    "aarch64": _Architecture(audit=0xC00000B7, seccomp=277, column=1),
}


def supported() -> bool:
    """Whether a filter can be assembled for this machine at all."""
    return platform.system() == "Linux" and platform.machine() in _ARCHITECTURES


def install(*, unix_sockets: bool, affinity: bool) -> None:
    """Filter the calls of this thread and of what it starts, for good.

    `unix_sockets` leaves sockets of that family usable; `affinity` lets other threads be pinned to cores (and other
    processes with them, as the filter cannot tell).
    Raises: OSError when the kernel refuses, or on an architecture without a table.
    """
    machine = _ARCHITECTURES.get(platform.machine())
    if machine is None:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {platform.machine()}")
    code = _code(machine, unix_sockets, affinity)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    give_up_new_privileges()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    arguments = (ctypes.c_uint(_SECCOMP_SET_MODE_FILTER), ctypes.c_uint(_SPEC_ALLOW), program)
    if libc.syscall(ctypes.c_long(machine.seccomp), *arguments) != 0:
        code_ = ctypes.get_errno()
        raise OSError(code_, f"seccomp: {os.strerror(code_)}")


@functools.cache
def _code(machine: _Architecture, unix_sockets: bool, affinity: bool) -> bytes:
    return b"".join(struct.pack("=HBBI", *step) for step in assemble(machine, unix_sockets, affinity))


def assemble(machine: _Architecture, unix_sockets: bool, affinity: bool) -> list[Instruction]:
    """The filter's program: the architecture first, then one rule after the other; what no rule names is allowed."""
    column = machine.column
    program: list[Instruction] = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQ, 1, 0, machine.audit),
        _return(_DENY),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if machine.audit == _ARCHITECTURES["x86_64"].audit:
        program += [(_JUMP_GE, 0, 1, _X32_BIT), _return(_DENY)]
    blocked = [*_BLOCKED.values(), *(() if unix_sockets else _SOCKET_CALLS.values())]
    for numbers in blocked:
        program += _rule(numbers[column], [_return(_DENY)])
    others = [*_BY_PROCESS.values(), *(() if affinity else [_SET_AFFINITY])]
    for numbers in others:
        program += _rule(numbers[column], _unless_equal(0, 0))
    family = _unless_equal(0, _AF_UNIX)
    program += _rule(_SOCKET[column], family if unix_sockets else [_return(_DENY)])
    program += _rule(_SOCKETPAIR[column], [*family[:-1], *_deny_datagrams()])
    program += _rule(_CLONE[column], [_argument(0), (_JUMP_SET, 0, 1, _NEW_NAMESPACE), _return(_DENY), _return(_ALLOW)])
    # clone3 keeps its flags behind a pointer; told that it does not exist, C libraries use clone.
    program += _rule(_CLONE3[column], [_return(_FAIL | errno.ENOSYS)])
    return [*program, _return(_ALLOW)]


def _rule(number: int | None, body: Iterable[Instruction]) -> list[Instruction]:
    """`body` for one system call; it must end in a return."""
    steps = list(body)
    return [] if number is None else [(_JUMP_EQ, 0, len(steps), number), *steps]


def _unless_equal(index: int, value: int) -> list[Instruction]:
    """Deny unless that argument, an int, has this value."""
    return [_argument(index), (_JUMP_EQ, 1, 0, value), _return(_DENY), _return(_ALLOW)]


def _deny_datagrams() -> list[Instruction]:
    """A datagram socket of a pair could be connected or sent elsewhere later."""
    return [
        _argument(1),
        (_AND, 0, 0, _SOCK_TYPE_MASK),
        (_JUMP_EQ, 0, 1, _SOCK_DGRAM),
        _return(_DENY),
        _return(_ALLOW),
    ]


def _argument(index: int) -> Instruction:
    """Load the low half of an argument: both architectures are little-endian."""
    return (_LOAD, 0, 0, _AT_ARGUMENTS + 8 * index)


def _return(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)
