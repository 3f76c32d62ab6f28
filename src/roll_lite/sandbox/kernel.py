"""System calls that Python does not offer: namespaces, mounts, capabilities."""

import ctypes
import os
import platform

NEW_MOUNT, NEW_UTS, NEW_IPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
NEW_USER, NEW_PID, NEW_NET = 0x1000_0000, 0x2000_0000, 0x4000_0000

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x2008_0522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """A call that has the same number on every machine, or whose number the caller looked up."""
    return _checked(what, _libc.syscall(ctypes.c_long(number), *arguments))


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode())
    _checked(f"mount {target}", result)


def pivot_root(new_root: str) -> None:
    """Make the folder, a mount point, the root; the old root is gone."""
    number = _SYS_PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root: its number on {platform.machine()} is not known here")
    os.chdir(new_root)
    syscall("pivot_root", number, b".", b".")  # the old root now lies on top of the new one
    _checked("umount2", _libc.umount2(b".", _DETACH))
    os.chdir("/")


def _prctl(what: str, option: int, value: int) -> None:
    rest = [ctypes.c_ulong(0)] * 3
    _checked(f"prctl {what}", _libc.prctl(option, ctypes.c_ulong(value), *rest))


def die_with_parent() -> None:
    """SIGKILL when the thread that forked this process ends; a change of user undoes it."""
    _prctl("PDEATHSIG", _PR_SET_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Descendants whose parent has ended become children of this process."""
    _prctl("CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    _prctl("NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def set_inspectable(is_inspectable: bool) -> None:
    """Whether processes of the same user may read this one's memory."""
    _prctl("DUMPABLE", _PR_SET_DUMPABLE, int(is_inspectable))


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))


def map_user(inside: int, outside_uid: int, outside_gid: int, proc: int) -> None:
    """In a user namespace just entered: the only user and group, `inside`, are these outside.

    `proc` is a descriptor of /proc.
    """
    set_inspectable(True)  # else the files below belong to root
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
