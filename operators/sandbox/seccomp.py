"""The system calls that a sandboxed program is denied: a seccomp filter, put together without a library.

Namespaces already take away the network, the files and the other processes. The filter closes what they do not: memory
that no resource limit counts (memfd, System V shared memory), socket families that a network namespace does not
separate (vsock), kernel key rings, and calls with a long record of kernel bugs. Denied calls fail with EPERM, so that a
program gets an exception and not a signal.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050000
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

# name: number on x86_64, on aarch64 (None: there is no such call)
_DENIED: dict[str, tuple[int, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "swapon": (167, 224),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60), "acct": (163, 89), "syslog": (103, 116),
}  # fmt: skip
_SOCKET = {"x86_64": 41, "aarch64": 198}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_FAMILIES = (1, 2, 10)
"""Unix, IPv4, IPv6."""


def denied_calls() -> bytes | None:
    """The filter as the kernel takes it; null on a processor whose call numbers are not listed here."""
    machine = platform.machine()
    if machine not in _AUDIT:
        return None
    column = 0 if machine == "x86_64" else 1
    numbers = sorted(number for pair in _DENIED.values() if (number := pair[column]) is not None)
    deny = _statement(_RETURN, _DENY | errno.EPERM)
    program = [
        _statement(_LOAD, 4),
        _jump(_EQUAL, _AUDIT[machine], 1, 0),
        _statement(_RETURN, _KILL),
        _statement(_LOAD, 0),
    ]
    if machine == "x86_64":  # the x32 calls have numbers of their own for the same things
        program += [_jump(_AT_LEAST, _X32, 0, 1), deny]
    for number in numbers:
        program += [_jump(_EQUAL, number, 0, 1), deny]
    family = [_statement(_LOAD, 16)]
    for left, value in zip(range(len(_FAMILIES), 0, -1), _FAMILIES, strict=True):
        family.append(_jump(_EQUAL, value, left, 0))
    family += [deny, _statement(_RETURN, _ALLOW)]
    program += [
        _jump(_EQUAL, _SOCKET[machine], 1, 0),
        _jump(_EQUAL, _SOCKETPAIR[machine], 0, len(family)),
        *family,
        _statement(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _statement(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, yes: int, no: int) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
