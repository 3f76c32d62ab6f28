"""What isolation needs of the kernel, each thing tried on its own in a process that then ends."""

import os
from collections.abc import Callable

from roll_lite.sandbox import kernel, landlock
from roll_lite.sandbox.jail import TEMPORARY, python_folders

_NAMESPACES = {
    "mount namespace": kernel.NEW_MOUNT,
    "pid namespace": kernel.NEW_PID,
    "net namespace": kernel.NEW_NET,
    "ipc namespace": kernel.NEW_IPC,
    "uts namespace": kernel.NEW_UTS,
}


def missing_mechanisms() -> dict[str, str]:
    """What the kernel refuses, and its reason; empty where isolation is possible."""
    trials = {name: _try_namespace(flag) for name, flag in _NAMESPACES.items()}
    trials |= {
        "user namespace": lambda: kernel.unshare(kernel.NEW_USER),
        "mounts of one's own": _try_mount,
        "Landlock": _try_landlock,
        "no_new_privs": kernel.forbid_new_privileges,
    }
    reasons = {name: reason_against(trial) for name, trial in trials.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def reason_against(trial: Callable[[], None]) -> str:
    """Why the trial fails in a process of its own; empty if it does not."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            trial()
        except BaseException as error:  # a C library without the call, say; the process ends here
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        reason = file.read()
    os.waitpid(pid, 0)
    return reason


def _try_namespace(flag: int) -> Callable[[], None]:
    return lambda: _enter(flag)


def _enter(flag: int) -> None:
    """As the sandbox does: root needs no user namespace for it, and others do."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        kernel.unshare(flag)
    else:
        kernel.unshare(kernel.NEW_USER | flag)
        kernel.map_user(0, uid, gid, os.open("/proc", os.O_PATH))


def _try_mount() -> None:
    _enter(kernel.NEW_MOUNT)
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("tmpfs", TEMPORARY, "tmpfs", kernel.NO_SUID, "size=1m")


def _try_landlock() -> None:
    kernel.forbid_new_privileges()
    landlock.restrict(python_folders(), [])
