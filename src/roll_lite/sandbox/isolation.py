"""The two ways to keep a program in: namespaces and Landlock, or resource limits alone.

Four processes take part. The zygote waits for jobs and forks a keeper for each; the keeper prepares
the place, forks and watches; with namespaces its child is the init of a process namespace, which
forks the program and takes everything with it when it ends.
"""

import math
import os
import resource
import shutil
import tempfile
from contextlib import suppress

from roll_lite.sandbox import kernel
from roll_lite.sandbox.jail import (
    DEVICES,
    TEMPORARY,
    enter_jail,
    mount_temporary,
    python_folders,
)
from roll_lite.sandbox.landlock import restrict
from roll_lite.sandbox.processes import end_orphans, exit_code, num_tasks_of
from roll_lite.sandbox.program import Limits

NOBODY = 65534
EVERY_NAMESPACE = (
    kernel.NEW_MOUNT | kernel.NEW_UTS | kernel.NEW_IPC | kernel.NEW_PID | kernel.NEW_NET
)


class Namespaces:
    """Of users, processes, mounts, network, IPC and names; Landlock; no capabilities; limits."""

    def __init__(self):
        """In the zygote, once: leave the machine's files behind."""
        self._proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._is_root = os.geteuid() == 0
        uid, gid = os.geteuid(), os.getegid()
        self._folders = python_folders()
        if self._is_root:
            kernel.unshare(kernel.NEW_MOUNT)
        else:
            kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNT)
            kernel.map_user(0, uid, gid, self._proc)
        enter_jail()

    def prepare(self, limits: Limits) -> None:
        """In the keeper, before it forks."""
        kernel.unshare(EVERY_NAMESPACE)
        mount_temporary(limits.disk_mib)

    def enter(self, limits: Limits) -> None:
        """In the keeper's child; returns in the process that is to run the program."""
        if self._is_root:
            become_nobody()
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(kernel.NEW_USER)
        kernel.map_user(NOBODY, uid, gid, self._proc)
        with suppress(OSError):  # where /proc/sys is read-only: the program gains nothing by them
            kernel.write_file("sys/user/max_user_namespaces", "0", self._proc)
        kernel.set_inspectable(False)
        kernel.die_with_parent()
        program = os.fork()
        if program:
            _wait_as_init(program)
        os.chdir(TEMPORARY)
        set_limits(limits, max_tasks=limits.processes + 1)  # with init
        kernel.drop_capabilities()
        kernel.forbid_new_privileges()
        restrict(self._folders, [TEMPORARY, *filter(os.path.exists, DEVICES)])

    def clean(self) -> None:
        """In the keeper, after its child has ended, and all else in the namespaces with it."""


class ResourceLimits:
    """Limits, another user where this is root, and an end to every process that was started.

    The program sees the machine's files and network, as far as its user may.
    """

    def prepare(self, limits: Limits) -> None:
        kernel.adopt_orphans()
        self._folder = tempfile.mkdtemp(prefix="program-")
        if os.geteuid() == 0:
            os.chown(self._folder, NOBODY, NOBODY)

    def enter(self, limits: Limits) -> None:
        if os.geteuid() == 0:
            become_nobody()
        os.chdir(self._folder)
        os.setsid()
        kernel.die_with_parent()
        kernel.set_inspectable(False)
        set_limits(limits, max_tasks=limits.processes + num_tasks_of(os.geteuid()) - 1)
        kernel.forbid_new_privileges()

    def clean(self) -> None:
        end_orphans()
        remove_folder(self._folder)


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def set_limits(limits: Limits, *, max_tasks: int) -> None:
    cpu_seconds = math.ceil(limits.seconds) + 1
    for what, bound in (
        (resource.RLIMIT_AS, limits.memory_mib << 20),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, limits.disk_mib << 20),
        (resource.RLIMIT_NPROC, max_tasks),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(what)
        bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
        resource.setrlimit(what, (bound, bound))


def _wait_as_init(program: int) -> None:
    """Reap whatever ends; end as the program did, and with that end everything."""
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(exit_code(status))


def remove_folder(folder: str) -> None:
    """Also where a program has locked parts of it."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder)
