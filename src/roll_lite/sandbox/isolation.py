"""Two ways to isolate a program: namespaces with Landlock, or resource limits alone.

Four processes take part. The zygote forks a monitor for each job. The monitor prepares the
isolation, forks, and watches. With namespaces its child is the init process of a pid namespace; it
forks the program, and the whole namespace ends with it.
"""

import math
import os
import resource
import shutil
import sys
import tempfile
from contextlib import suppress

from roll_lite.sandbox import kernel
from roll_lite.sandbox.processes import exit_code, kill_orphans, num_tasks_of
from roll_lite.sandbox.sandbox import Limits

NOBODY = 65534
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
TEMPORARY = "/tmp"
_MAX_FILES = 4096


class Namespaces:
    """User, pid, mount, network, IPC and UTS namespaces, Landlock, no capabilities, and limits."""

    def __init__(self):
        """In the zygote, once: leave the machine's file system."""
        self._proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._is_root = os.geteuid() == 0
        self._folders = _python_folders()
        _enter_mount_namespace(self._proc)
        _enter_jail()

    def prepare(self, limits: Limits) -> None:
        """In the monitor, before it forks."""
        kernel.unshare("mount", "pid", "net", "ipc", "uts")
        options = f"mode=1777,size={limits.disk_mib}m,nr_inodes={_MAX_FILES}"
        flags = kernel.NO_SUID | kernel.NO_DEVICES
        kernel.mount("tmpfs", TEMPORARY, "tmpfs", flags, options)

    def enter(self, limits: Limits) -> None:
        """In the monitor's child; returns in the process that is to run the program."""
        if self._is_root:
            _become_nobody()
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare("user")
        kernel.map_user(NOBODY, uid, gid, self._proc)
        with suppress(OSError):  # read-only /proc/sys; a nested namespace would gain it nothing
            kernel.write_file("sys/user/max_user_namespaces", "0", self._proc)
        kernel.set_inspectable(False)
        kernel.die_with_parent()
        program = os.fork()
        if program:
            _wait_as_init(program)
        os.chdir(TEMPORARY)
        _set_limits(limits, max_tasks=limits.processes + 1)  # init counts too
        kernel.drop_capabilities()
        kernel.forbid_new_privileges()
        kernel.restrict_access(self._folders, [TEMPORARY, *_devices()])

    def clean(self) -> None:
        """In the monitor, after its child has ended; the kernel has removed the namespaces."""


class ResourceLimits:
    """Limits, another user if this is root, and an end to every process that the program started.

    The program can reach the machine's files and network as far as its user may.
    """

    def prepare(self, limits: Limits) -> None:
        kernel.adopt_orphans()
        self._folder = tempfile.mkdtemp(prefix="program-")
        if os.geteuid() == 0:
            os.chown(self._folder, NOBODY, NOBODY)

    def enter(self, limits: Limits) -> None:
        if os.geteuid() == 0:
            _become_nobody()
        os.chdir(self._folder)
        os.setsid()
        kernel.die_with_parent()
        kernel.set_inspectable(False)
        _set_limits(limits, max_tasks=limits.processes + num_tasks_of(os.geteuid()) - 1)
        kernel.forbid_new_privileges()

    def clean(self) -> None:
        kill_orphans()
        _remove_folder(self._folder)


def _enter_mount_namespace(proc: int) -> None:
    """Users other than root need a user namespace for it; `proc` is a descriptor of /proc."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        kernel.unshare("mount")
    else:
        kernel.unshare("user", "mount")
        kernel.map_user(0, uid, gid, proc)


def _python_folders() -> list[str]:
    """The interpreter's modules and the system libraries that they load."""
    folders = [sys.base_prefix + "/lib", os.path.dirname(os.__file__)]
    folders += ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    seen = [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]
    return [f for f in seen if not any(f.startswith(other + "/") for other in seen)]


def _devices() -> list[str]:
    return [path for path in DEVICES if os.path.exists(path)]


def _enter_jail() -> None:
    """In a new mount namespace: replace the root by one that has only what Python reads."""
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    devices = _devices()
    paths = [*_python_folders(), *devices]
    # Open the paths first: the new root is about to cover /tmp, where some of them may be.
    opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths}
    kernel.mount("tmpfs", TEMPORARY, "tmpfs", kernel.NO_SUID, "mode=755,size=1m")
    for path, descriptor in opened.items():
        _bind(f"/proc/self/fd/{descriptor}", TEMPORARY + path, is_device=path in devices)
        os.close(descriptor)
    os.makedirs(TEMPORARY + TEMPORARY, exist_ok=True)
    os.symlink(TEMPORARY, TEMPORARY + "/dev/shm")  # semaphores are files there
    kernel.pivot_root(TEMPORARY)
    _remount_read_only("/", kernel.NO_SUID)


def _bind(source: str, target: str, *, is_device: bool) -> None:
    """Create the target and bind the source to it, folders read-only."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if is_device:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        kernel.mount(source, target, None, kernel.BIND)
        return
    os.makedirs(target, exist_ok=True)
    kernel.mount(source, target, None, kernel.BIND | kernel.RECURSIVE)
    kept = os.statvfs(target).f_flag & kernel.NO_EXEC  # a remount may not lift it
    _remount_read_only(target, kernel.NO_SUID | kernel.NO_DEVICES | kept)


def _remount_read_only(target: str, flags: int) -> None:
    flags |= kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY
    kernel.mount("none", target, None, flags)


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _set_limits(limits: Limits, *, max_tasks: int) -> None:
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
        # SIGXCPU, which tells of the time limit, comes at the first bound, SIGKILL at the second
        last = bound + 1 if what == resource.RLIMIT_CPU and bound != most else bound
        resource.setrlimit(what, (bound, last))


def _wait_as_init(program: int) -> None:
    """Reap children until the program ends, then exit as it did, which ends the namespace."""
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(exit_code(status))


def _remove_folder(folder: str) -> None:
    """Also if the program has removed permissions in it."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder)
