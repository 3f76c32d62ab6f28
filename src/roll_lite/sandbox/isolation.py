"""Two ways to isolate a program: namespaces with Landlock, or resource limits alone.

The zygote forks a monitor for each job. The monitor prepares the isolation, forks the program and
its tests, and watches. With namespaces its first child is the init process of a pid namespace; it
forks the program, and the whole namespace ends with it.
"""

import math
import os
import resource
import socket
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import count, pairwise
from typing import Literal

from roll_lite.processes import (
    adopt_orphans,
    children_of,
    die_with_parent,
    exit_code,
    kill_orphans,
    memory_of,
    num_tasks_of,
    read_proc,
)
from roll_lite.sandbox import kernel
from roll_lite.sandbox.sandbox import Limits, Terms

Role = Literal["program", "tests"]

NOBODY = 65534
READ_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom")
DEVICES = ("/dev/null", *READ_DEVICES)
TEMPORARY = "/tmp"
FOLDERS: dict[Role, str] = {"program": "/program", "tests": "/tests"}
"""The working folder of each process."""
_MAX_FILES = 4096
_MAX_SIGNALS = 1024
"""Timers and signals that wait to be delivered."""
MAX_DESCRIPTORS = 256
"""The zygote and its copies have no higher descriptors."""


def close_all_but(kept: Collection[int]) -> None:
    """Also keeps the three standard streams."""
    for low, high in pairwise([2, *sorted(kept), MAX_DESCRIPTORS]):
        os.closerange(low + 1, high)


class Namespaces:
    """User, pid, mount, network, IPC and UTS namespaces, Landlock, no capabilities, and limits."""

    def __init__(self):
        self._proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.descriptors = {self._proc}
        """What `enter` needs."""
        self._is_root = os.geteuid() == 0
        self._python = _python_folders()

    def enter_jail(self) -> None:
        """In the zygote, once: leave the machine's file system."""
        if self._is_root:
            kernel.unshare("mount")
        else:  # other users need a user namespace for it
            kernel.unshare_user(0, self._proc, "mount")
        _replace_root(self._python)

    def prepare(self, terms: Terms) -> None:
        """In the monitor, before it forks."""
        kernel.leave_keyring()
        kernel.unshare("mount", "net", "ipc", "uts")
        self._socket_bytes = _most_in_a_socket()
        options = f"mode=1777,size={terms.limits.disk_mib}m,nr_inodes={_MAX_FILES}"
        self._folders = [*FOLDERS.values()][: 1 + terms.is_apart]
        for folder in self._folders:
            flags = kernel.NO_SUID | kernel.NO_DEVICES
            kernel.mount("tmpfs", folder, "tmpfs", flags, options)

    def fork(self, role: Role) -> int:
        """As os.fork, in the monitor; the child is in a pid namespace of its own.

        The tests' process is the first one there; the program has an init, which ends with it.
        """
        if role == "tests":
            kernel.unshare("pid")
            return os.fork()
        if init := kernel.fork_init():
            return init
        die_with_parent()
        if program := os.fork():
            close_all_but(())
            _wait_as_init(program)
        return 0

    def enter(self, limits: Limits, role: Role) -> None:
        """In the monitor's child, which is to run the program or the tests."""
        kernel.die_first(self._proc)
        if self._is_root:
            _become_nobody()
        kernel.unshare_user(NOBODY, self._proc)
        with suppress(OSError):  # read-only /proc/sys; a nested namespace would gain it nothing
            kernel.write_file("sys/user/max_user_namespaces", "0", self._proc)
        kernel.set_inspectable(role == "program")  # by the monitor: nothing else sees that process
        die_with_parent()
        os.chdir(FOLDERS[role])
        _set_limits(limits, max_tasks=limits.processes)
        kernel.drop_capabilities()
        kernel.forbid_new_privileges()
        readable = [*self._python, *_present(READ_DEVICES)]
        kernel.restrict_access(readable, [FOLDERS[role], *_present(["/dev/null"])])

    def memory(self, pids: list[int], limit: int) -> int:
        """Bytes that the job uses, files included; exact if they are near the limit.

        Sockets count as if they were full, those too that nobody has accepted or received yet.
        """
        files = [os.statvfs(folder) for folder in self._folders]
        in_kernel = sum((f.f_blocks - f.f_bfree) * f.f_frsize for f in files)
        in_kernel += read_proc("self", "net/unix", self._proc).count(b"\n") * self._socket_bytes
        return in_kernel + memory_of(pids, limit - in_kernel, self._proc)

    def clean(self) -> None:
        """In the monitor, after its children have ended; the kernel has removed the namespaces."""


class ResourceLimits:
    """Limits, another user if this is root, and an end to every process that the program started.

    The program can reach the machine's files and network as far as its user may.
    """

    def __init__(self):
        self._proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.descriptors = {self._proc}

    def prepare(self, terms: Terms) -> None:
        kernel.leave_keyring()
        adopt_orphans()
        self._parent = tempfile.mkdtemp(prefix="program-")  # the program cannot move its folder
        os.chmod(self._parent, 0o711)
        for role in FOLDERS:
            os.mkdir(self._folder(role))
            if os.geteuid() == 0:
                os.chown(self._folder(role), NOBODY, NOBODY)

    def fork(self, role: Role) -> int:
        return os.fork()

    def _folder(self, role: Role) -> str:
        return self._parent + FOLDERS[role]

    def enter(self, limits: Limits, role: Role) -> None:
        kernel.die_first(self._proc)
        if os.geteuid() == 0:
            _become_nobody()
        os.chdir(self._folder(role))
        os.setsid()
        die_with_parent()
        kernel.set_inspectable(False)
        _set_limits(limits, max_tasks=limits.processes + num_tasks_of(os.geteuid()) - 1)
        kernel.forbid_new_privileges()

    def memory(self, pids: list[int], limit: int) -> int:
        return memory_of(children_of(os.getpid(), self._proc), limit, self._proc)

    def clean(self) -> None:
        kill_orphans()
        remove_folder(self._parent)


def _python_folders() -> list[str]:
    """The interpreter's modules and the system libraries that they load."""
    folders = [sys.base_prefix + "/lib", os.path.dirname(os.__file__)]
    folders += ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    seen = [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]
    return [f for f in seen if not any(f.startswith(other + "/") for other in seen)]


def _present(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if os.path.exists(path)]


def _replace_root(python: list[str]) -> None:
    """In a new mount namespace: the new root has only what Python reads, and devices."""
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    devices = _present(DEVICES)
    paths = [*python, *devices]
    # Open the paths first: the new root is about to cover /tmp, where some of them may be.
    opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths}
    kernel.mount("tmpfs", TEMPORARY, "tmpfs", kernel.NO_SUID, "mode=755,size=1m")
    for path, descriptor in opened.items():
        _bind(f"/proc/self/fd/{descriptor}", TEMPORARY + path, is_device=path in devices)
        os.close(descriptor)
    for folder in FOLDERS.values():
        os.makedirs(TEMPORARY + folder, exist_ok=True)
    for path in (TEMPORARY, "/dev/shm"):  # semaphores are files in the latter
        with suppress(FileExistsError):  # a Python that lives in /tmp; then programs have no /tmp
            os.symlink(FOLDERS["program"], TEMPORARY + path)
    kernel.pivot_root(TEMPORARY)
    _remount_read_only("/", kernel.NO_SUID)


def _bind(source: str, target: str, *, is_device: bool) -> None:
    """Create the target and bind the source to it, read-only: of a device that means its times."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if is_device:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    else:
        os.makedirs(target, exist_ok=True)
    kernel.mount(source, target, None, kernel.BIND | kernel.RECURSIVE)
    flags = kernel.NO_SUID | (0 if is_device else kernel.NO_DEVICES)
    kept = os.statvfs(target).f_flag & kernel.NO_EXEC  # a remount may not lift it
    _remount_read_only(target, flags | kept)


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
        (resource.RLIMIT_SIGPENDING, _MAX_SIGNALS),
        (resource.RLIMIT_RTPRIO, 0),  # a real-time program would keep its monitor from running
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_CORE, 1),  # with 0 the kernel would still hand a dump to a program
    ):
        _, most = resource.getrlimit(what)
        bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
        # SIGXCPU, which tells of the time limit, comes at the first bound, SIGKILL at the second
        last = bound + 1 if what == resource.RLIMIT_CPU and bound != most else bound
        resource.setrlimit(what, (bound, last))


def _most_in_a_socket() -> int:
    """Bytes: the kernel takes one more message, of up to half the size, below the limit."""
    with socket.socket(socket.AF_UNIX) as plain:
        return plain.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) * 3 // 2


def _wait_as_init(program: int) -> None:
    """Reap children until the program ends, then exit as it did, which ends the namespace."""
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(exit_code(status))


def remove_folder(folder: str) -> None:
    """Remove what a program has left: also folders without permissions, nested thousandfold.

    What is in a folder is moved up before the folder is removed, so no path becomes long. What
    cannot be removed stays: a program of the same user can still change something.
    """
    numbers = count()
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        while names := os.listdir(top):
            for name in names:
                _empty_or_remove(name, top, numbers)
    os.close(top)
    with suppress(OSError):
        os.rmdir(folder)


def _empty_or_remove(name: str, top: int, numbers: Iterator[int]) -> None:
    """Remove a file; move the entries of a folder to the top and remove it."""
    if not _is_opened_folder(name, top):
        os.unlink(name, dir_fd=top)
        return
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    for entry in os.listdir(inside):
        _is_opened_folder(entry, inside)  # a folder without permissions cannot be moved
        os.rename(entry, f"moved-{next(numbers)}", src_dir_fd=inside, dst_dir_fd=top)
    os.close(inside)
    os.rmdir(name, dir_fd=top)


def _is_opened_folder(name: str, parent: int) -> bool:
    """Whether it is a folder, which is given all permissions then."""
    is_folder = stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
    if is_folder:
        os.chmod(name, 0o700, dir_fd=parent)
    return is_folder
