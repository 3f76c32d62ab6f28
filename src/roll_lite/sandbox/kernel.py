"""System calls that Python does not offer: namespaces, mounts, capabilities, Landlock, seccomp."""

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Iterable
from contextlib import suppress
from ctypes import c_int, c_size_t, c_uint32, c_ulong

from roll_lite.processes import checked, libc, prctl
from roll_lite.sandbox.syscalls import NUMBERS, filter_for

_NAMESPACES = {
    "mount": 0x0002_0000, "uts": 0x0400_0000, "ipc": 0x0800_0000,
    "user": 0x1000_0000, "pid": 0x2000_0000, "net": 0x4000_0000,
}  # fmt: skip

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_PR_SET_SECCOMP, _SECCOMP_FILTER = 22, 2
_JOIN_SESSION_KEYRING = 1
_CAPABILITY_VERSION_3 = 0x2008_0522

_FILTERS = {machine: filter_for(machine) for machine in NUMBERS}


def _syscall(what: str, number: int, *arguments: object) -> int:
    return checked(what, libc.syscall(ctypes.c_long(number), *arguments))


def _number(call: str) -> int:
    numbers = NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(f"{call}: its number on {platform.machine()} is not known here")
    return numbers[call]


def unshare(*namespaces: str) -> None:
    """Move this process to new namespaces."""
    flags = sum(_NAMESPACES[name] for name in namespaces)
    checked(f"new namespaces ({', '.join(namespaces)})", libc.unshare(c_int(flags)))


def fork_init() -> int:
    """As os.fork, but the child is the first process of a new pid namespace.

    Python is not told, so the child can do little more than fork. After `unshare` os.fork does the
    same for one namespace; a process cannot leave that to fork into a second.
    """
    flags = c_ulong(_NAMESPACES["pid"] | signal.SIGCHLD)
    return _syscall("clone", _number("clone"), flags, *[None] * 4)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    result = libc.mount(*encoded, c_ulong(flags), options.encode())
    checked(f"mount {target}", result)


def pivot_root(new_root: str) -> None:
    """Make a folder that is a mount point the root, and unmount the old root."""
    os.chdir(new_root)
    # This mounts the old root on top of the new one
    _syscall("pivot_root", _number("pivot_root"), b".", b".")
    checked("umount2", libc.umount2(b".", _DETACH))
    os.chdir("/")


def forbid_new_privileges() -> None:
    prctl("NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def set_inspectable(is_inspectable: bool) -> None:
    """Whether processes of the same user may read this process's memory."""
    prctl("DUMPABLE", _PR_SET_DUMPABLE, int(is_inspectable))


def die_first(proc: int) -> None:
    """When the machine runs out of memory. `proc` is a descriptor of /proc."""
    with suppress(OSError):  # someone set it to the most already
        write_file("self/oom_score_adj", "1000", proc)


def leave_keyring() -> None:
    """Join a new, empty session keyring."""
    with suppress(OSError):  # a kernel without keys, or a container that takes the call away
        _syscall("keyctl", _number("keyctl"), c_int(_JOIN_SESSION_KEYRING), None)


def filter_calls() -> None:
    """Refuse system calls that programs do not need, for good. See `syscalls.py`."""
    instructions = _FILTERS.get(platform.machine())
    if instructions is None:
        raise OSError(f"seccomp: the system calls of {platform.machine()} are not known here")
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("=H6xQ", len(instructions) // 8, ctypes.addressof(buffer))
    arguments = c_ulong(_SECCOMP_FILTER), program, c_ulong(0), c_ulong(0)
    checked("prctl SECCOMP", libc.prctl(_PR_SET_SECCOMP, *arguments))


def drop_capabilities() -> None:
    header = (c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    checked("capset", libc.capset(header, (c_uint32 * 6)()))


def map_user(inside: int, outside_uid: int, outside_gid: int, proc: int) -> None:
    """In a new user namespace: map its only user and group, `inside`, to these outside.

    `proc` is a descriptor of /proc.
    """
    set_inspectable(True)  # otherwise the files below belong to root
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside_uid} 1"),
        ("gid_map", f"{inside} {outside_gid} 1"),
    ):
        write_file(f"self/{name}", text, proc)


def write_file(path: str, text: str, folder: int) -> None:
    descriptor = os.open(path, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


# Landlock: its system calls have the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _USE_DEVICE = 1 << 14, 1 << 15
_RIGHTS_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _USE_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Rights that each version of Landlock knows; 16 from version 5 on."""
_TCP_BIND_CONNECT = 3
_ABSTRACT_SOCKETS_SIGNALS = 3


def restrict_access(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow this process only these files and folders; OSError without Landlock.

    Also forbids TCP, and signals and abstract sockets to other processes, if the kernel's Landlock
    can. Call `forbid_new_privileges` first.
    """
    version = _syscall("landlock", _CREATE_RULESET, None, c_size_t(0), c_uint32(_GET_VERSION))
    all_rights = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    ruleset = struct.pack("=QQQ", all_rights, _TCP_BIND_CONNECT, _ABSTRACT_SOCKETS_SIGNALS)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _syscall("landlock", _CREATE_RULESET, ruleset, c_size_t(size), c_uint32(0))
    for path in readable:
        _allow(rules, path, _READ)
    for path in writable:
        _allow(rules, path, all_rights)
    _syscall("landlock", _RESTRICT_SELF, c_int(rules), c_uint32(0))
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        rights &= _RIGHTS_OF_FILES
    rule = struct.pack("=Qi", rights, target)
    _syscall("landlock", _ADD_RULE, c_int(rules), c_int(_PATH_BENEATH), rule, c_uint32(0))
    os.close(target)
