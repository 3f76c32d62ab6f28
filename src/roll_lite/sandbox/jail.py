"""A file system of nothing but what Python reads, and a temporary folder for each program."""

import os
import sys

from roll_lite.sandbox.kernel import (
    BIND,
    NO_DEVICES,
    NO_EXEC,
    NO_SUID,
    PRIVATE,
    READ_ONLY,
    RECURSIVE,
    REMOUNT,
    mount,
    pivot_root,
)

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
TEMPORARY = "/tmp"
_MAX_FILES = 4096


def python_folders() -> list[str]:
    """Where the interpreter's modules and the libraries that they load lie."""
    folders = [sys.base_prefix + "/lib", os.path.dirname(os.__file__)]
    folders += ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    seen = [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]
    return [f for f in seen if not any(f.startswith(other + "/") for other in seen)]


def enter_jail() -> None:
    """In a mount namespace just entered: the root becomes an empty one with Python's folders."""
    mount("none", "/", None, RECURSIVE | PRIVATE)
    devices = [path for path in DEVICES if os.path.exists(path)]
    paths = [*python_folders(), *devices]
    # Opened first: the new root is about to cover /tmp, and one of them may lie there.
    opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths}
    mount("tmpfs", TEMPORARY, "tmpfs", NO_SUID, "mode=755,size=1m")
    for path, descriptor in opened.items():
        _show(f"/proc/self/fd/{descriptor}", TEMPORARY + path, is_device=path in devices)
        os.close(descriptor)
    os.makedirs(TEMPORARY + TEMPORARY, exist_ok=True)
    os.symlink(TEMPORARY, TEMPORARY + "/dev/shm")  # where semaphores are files
    pivot_root(TEMPORARY)
    mount("none", "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID)


def _show(source: str, target: str, *, is_device: bool) -> None:
    """The file or folder at the target, which is made, and read-only."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if is_device:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(source, target, None, BIND)
        return
    os.makedirs(target, exist_ok=True)
    mount(source, target, None, BIND | RECURSIVE)
    kept = os.statvfs(target).f_flag & NO_EXEC  # what was forbidden must stay so
    mount("none", target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | kept)


def mount_temporary(num_mib: int) -> None:
    """An empty folder for one program, in a mount namespace of its own, with which it vanishes."""
    options = f"mode=1777,size={num_mib}m,nr_inodes={_MAX_FILES}"
    mount("tmpfs", TEMPORARY, "tmpfs", NO_SUID | NO_DEVICES, options)
