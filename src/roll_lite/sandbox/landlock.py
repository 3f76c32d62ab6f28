"""Landlock: a process gives up all files but those that it names, and more where it can."""

import os
import struct
from collections.abc import Iterable
from ctypes import c_int, c_size_t, c_uint32

from roll_lite.sandbox.kernel import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _USE_DEVICE = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _USE_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""By version of Landlock; 16 from 5 on."""
_TCP_BIND_CONNECT = 3
_ABSTRACT_SOCKETS_SIGNALS = 3


def version() -> int:
    """Of the kernel's Landlock, at least 1; OSError where there is none."""
    return syscall("landlock", _CREATE_RULESET, None, c_size_t(0), c_uint32(_GET_VERSION))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """From now on these files and folders alone; no TCP, no signals or abstract sockets to others.

    The last three only where the kernel knows them. Needs `forbid_new_privileges` before it.
    """
    known = version()
    all_rights = (1 << _NUM_FILE_RIGHTS.get(known, 16)) - 1
    ruleset = struct.pack("=QQQ", all_rights, _TCP_BIND_CONNECT, _ABSTRACT_SOCKETS_SIGNALS)
    size = 8 if known < 4 else 16 if known < 6 else 24
    rules = syscall("landlock", _CREATE_RULESET, ruleset, c_size_t(size), c_uint32(0))
    for path in readable:
        _allow(rules, path, _READ)
    for path in writable:
        _allow(rules, path, all_rights)
    syscall("landlock", _RESTRICT_SELF, c_int(rules), c_uint32(0))
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        rights &= _OF_FILES
    rule = struct.pack("=Qi", rights, target)
    syscall("landlock", _ADD_RULE, c_int(rules), c_int(_PATH_BENEATH), rule, c_uint32(0))
    os.close(target)
