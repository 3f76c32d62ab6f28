"""Processes: what /proc says about them, killing them with their descendants, parent death.

A process can choose any bytes as its name. So files of /proc are read as bytes, and their lines end
with a line feed only. Imports no torch: a rank needs this first.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

STOPPED = "T"
"""State of a process after SIGSTOP. A process that a debugger holds has the state t."""
STOPPED_SECONDS = 10.0
"""After these a rank that is stopped is killed, by other ranks or its watcher."""
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 5.0
"""A process that did not look for so long was stopped itself, perhaps with all others."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
RUN_ID = "TORCHELASTIC_RUN_ID"
"""An environment variable that torchrun sets for ranks; what they start inherits it."""

libc = ctypes.CDLL(None, use_errno=True)


# What /proc says


def read_proc(pid: int | str, name: str, proc: int | None = None) -> bytes:
    """A file of /proc/PID; OSError if the process has ended or may not be inspected.

    `proc` is a descriptor of /proc, for a process that cannot see /proc itself.
    """
    path = f"{pid}/{name}" if proc is not None else f"/proc/{pid}/{name}"
    with open(os.open(path, os.O_RDONLY, dir_fd=proc), "rb") as file:
        return file.read()


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that are used here."""

    state: str
    """R for running, T for stopped, Z for a zombie."""
    parent: int
    cpu_seconds: float
    start: int
    """In clock ticks since the host was booted."""


def read_stat(pid: int) -> Stat:
    """OSError if the process has ended."""
    fields = read_proc(pid, "stat").rpartition(b")")[2].split()  # before it: pid and (name)
    ticks = int(fields[11]) + int(fields[12])
    return Stat(fields[0].decode(), int(fields[1]), ticks / _TICKS_PER_SECOND, int(fields[19]))


def state_of(pid: int) -> str:
    """As in `Stat`; empty if the process has ended."""
    try:
        return read_stat(pid).state
    except OSError:
        return ""


def lacks_processor(pid: int, seconds: float) -> bool:
    """Whether a process waits for a processor, and has used less than `seconds` of one.

    On a busy machine code that does little may take long.
    """
    try:
        stat = read_stat(pid)
    except OSError:
        return False
    return stat.state == "R" and stat.cpu_seconds < seconds


def command_of(pid: int | str) -> bytes:
    """Its command line, each word followed by a zero byte; OSError if it has ended."""
    return read_proc(pid, "cmdline")


def environment_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; empty if this user may not read them."""
    try:
        lines = read_proc(pid, "environ").split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(line).partition("=") for line in lines)
    return {name: value for name, _, value in pairs}


def all_pids() -> list[int]:
    """All processes on the machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children_of(pid: int, proc: int | None = None) -> list[int]:
    """Children of all threads of a process; none if it has ended."""
    children = []
    for thread in _threads(pid, proc):
        with suppress(OSError):  # the thread has ended, or the kernel has no such file
            children += map(int, read_proc(pid, f"task/{thread}/children", proc).split())
    return children


def _threads(pid: int, proc: int | None) -> list[int]:
    """None if the process has ended."""
    path = f"{pid}/task" if proc is not None else f"/proc/{pid}/task"
    with suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        try:
            return [int(name) for name in os.listdir(folder)]
        finally:
            os.close(folder)
    return []


def memory_of(pids: Collection[int], limit: int, proc: int) -> int:
    """Bytes that processes and their descendants use; `proc` is a descriptor of /proc.

    Page tables count: a page that was only read takes none of its own, but up to three of them.
    Above the limit, pages that they share count once, which takes longer to find out. Where the
    kernel does not tell (not everyone may inspect every process), they count for each process.
    """
    found = [each for pid in pids for each in _with_descendants(pid, proc)]
    used = [_memory_use(pid, proc) for pid in found]
    in_pages = sum(use.pages for use in used)
    in_tables = sum(use.tables for use in used)
    if in_pages + in_tables > limit:
        in_pages = sum(_proportional_bytes(use.thread, proc) or use.pages for use in used)
    return in_pages + in_tables


def num_tasks_of(uid: int) -> int:
    """Processes and threads that the kernel counts against the user's limit."""
    num_tasks = 0
    for pid in all_pids():
        with suppress(OSError):  # it has just ended
            status = read_proc(pid, "status")
            if _number(status, b"Uid:") == uid:
                num_tasks += _number(status, b"Threads:")
    return num_tasks


def _with_descendants(pid: int, proc: int) -> list[int]:
    found = []
    new = [pid]
    while new:
        found += new
        new = [child for parent in new for child in children_of(parent, proc)]
    return found


class _MemoryUse(NamedTuple):
    thread: int
    """One that has not ended."""
    pages: int
    """Bytes in memory."""
    tables: int
    """Bytes of the tables of pages."""


def _memory_use(pid: int, proc: int) -> _MemoryUse:
    """The memory of a thread that tells: a process goes on when its first thread has ended."""
    for thread in (pid, *_threads(pid, proc)):
        with suppress(OSError):
            status = read_proc(thread, "status", proc)
            if pages := _number(status, b"VmRSS:"):
                return _MemoryUse(thread, pages << 10, _number(status, b"VmPTE:") << 10)
    return _MemoryUse(pid, 0, 0)


def _proportional_bytes(thread: int, proc: int) -> int:
    """Shared pages divided by the number of processes that share them."""
    with suppress(OSError):
        return _number(read_proc(thread, "smaps_rollup", proc), b"Pss:") << 10
    return 0


def _number(content: bytes, field: bytes) -> int:
    """The first number after a field's name; 0 without such a field."""
    lines = (line.split() for line in content.split(b"\n"))
    return next((int(line[1]) for line in lines if line and line[0] == field), 0)


class Process(NamedTuple):
    """A process, told apart from a later one with its pid and from those of other hosts."""

    pid: int
    host: str
    start: int
    """As in `Stat`."""

    @classmethod
    def find(cls, pid: int) -> "Process":
        return cls(pid, socket.gethostname(), read_stat(pid).start)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP; False for a process on another host."""
        return self._state() == STOPPED

    @property
    def is_running(self) -> bool:
        """False for a process on another host, and for one that has ended."""
        return self._state() not in ("", "Z", "X")

    def kill(self) -> None:
        """Does nothing to a process on another host."""
        if self._state():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def _state(self) -> str:
        """Empty if it has ended, or is on another host."""
        with suppress(OSError):
            stat = read_stat(self.pid)
            if self.host == socket.gethostname() and self.start == stat.start:
                return stat.state
        return ""


class StoppedProcesses:
    """For how long processes have been stopped, other than together with their launcher."""

    def __init__(self, launcher: int):
        self._launcher: Process | None = None
        with suppress(OSError):  # it has ended, or is hidden (hidepid), as one of another user
            self._launcher = Process.find(launcher)
        self._looked_at = time.monotonic()
        self._since: dict[Process, float] = {}

    def look(self, processes: Iterable[Process]) -> dict[Process, float]:
        """Seconds since each of those that are stopped was first seen so; look often."""
        now = time.monotonic()
        is_launcher_stopped = self._launcher is not None and self._launcher.is_stopped
        if now - self._looked_at > _PAUSE_SECONDS or is_launcher_stopped:
            self._since.clear()
        self._looked_at = now
        stopped = [process for process in processes if process.is_stopped]
        self._since = {process: self._since.get(process, now) for process in stopped}
        return {process: now - since for process, since in self._since.items()}


# Killing


def exit_code(status: int) -> int:
    """From a wait status to 0..255; a signal gives 128 plus its number."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def children() -> set[int]:
    """Children of this process, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none, the usual case: no need to scan /proc
        return set()
    return _children(os.getpid(), _parents())


def kill_tree(pid: int) -> int:
    """Kill a child of this process and its descendants; returns its exit code, or -signal."""
    _kill_all(lambda: {pid} | _descendants(pid))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_orphans(spared: Collection[int] = ()) -> None:
    """Kill all children of this process except the spared, each with its descendants."""
    # A scan can miss a process whose parent is just ending; the next scan sees it as our child.
    while orphans := children() - set(spared):
        _kill_all(lambda found=orphans: found | _descendants(os.getpid(), spared))
        for pid in orphans:
            os.waitpid(pid, 0)


def _kill_all(find: Callable[[], set[int]]) -> None:
    """Stop processes before killing them: a stopped process cannot fork, so the search ends."""
    stopped: set[int] = set()
    while new := find() - stopped:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _descendants(pid: int, spared: Collection[int] = ()) -> set[int]:
    """Children, their children and so on, without the spared and their descendants.

    By a scan of all processes, which unlike `children_of` misses none while others end.
    """
    parents = _parents()
    found = set()
    new = {pid}
    while new:
        new = {child for each in new for child in _children(each, parents)} - set(spared)
        found |= new
    return found


def _children(pid: int, parents: dict[int, int]) -> set[int]:
    return {child for child, parent in parents.items() if parent == pid}


def _parents() -> dict[int, int]:
    """The parent of every process on the machine."""
    parents = {}
    for pid in all_pids():
        with suppress(OSError):  # it has just ended
            parents[pid] = read_stat(pid).parent
    return parents


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# Parent death


def checked(what: str, result: int) -> int:
    """The result of a C function; OSError if it is -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(what: str, option: int, value: int) -> None:
    rest = [ctypes.c_ulong(0)] * 3
    checked(f"prctl {what}", libc.prctl(option, ctypes.c_ulong(value), *rest))


def die_with_parent() -> None:
    """SIGKILL when the thread that forked this process ends; a change of user undoes it."""
    prctl("PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent has ended become children of this process."""
    prctl("CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def end_with_launcher() -> None:
    """Have the kernel kill this process when the torchrun that started it ends, even by SIGKILL.

    Does nothing except in a rank itself. What a rank starts has its environment, too, but may be
    started by a thread that ends long before the rank does.
    """
    if not _is_rank():
        return
    with suppress(OSError):  # the watchdog of a cluster looks at the parent, too
        die_with_parent()
    if _is_init(os.getppid()):
        sys.exit("this rank exits: torchrun ended before the rank began")


def watch_lone_rank() -> None:
    """Have a rank killed that is stopped (SIGSTOP) and has no other beside it on its node, which
    would see that. torchrun does not. The watcher is a fork: call this before there are threads."""
    if not _is_rank() or os.environ.get("LOCAL_WORLD_SIZE") != "1":
        return
    rank = Process.find(os.getpid())
    stopped = StoppedProcesses(os.getppid())
    if os.fork():
        return
    try:
        _watch(rank, stopped)
    finally:
        os._exit(0)


def _watch(rank: Process, stopped: StoppedProcesses) -> None:
    with suppress(OSError):  # it looks at the parent, too
        die_with_parent()
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # whoever reads the rank's output waits for its end
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == rank.pid:
        time.sleep(_LOOK_SECONDS)
        if stopped.look([rank]).get(rank, 0.0) > STOPPED_SECONDS:
            rank.kill()


def _is_rank() -> bool:
    """Whether torchrun started this process, and not something that it started."""
    return RUN_ID in os.environ and not environment_of(os.getppid()).get(RUN_ID)


def launcher_pid() -> int:
    """The process that started this rank: the parent, or the parent of a monitor that forked it."""
    parent = os.getppid()
    with suppress(OSError):  # it has ended
        return read_stat(parent).parent if command_of(parent) == command_of("self") else parent
    return parent


def _is_init(pid: int) -> bool:
    """Whether it is what adopts orphans, and no torchrun that is the first process itself."""
    try:
        command = command_of(pid)
    except OSError:
        return False
    is_first = pid == 1 or command.split(b"\0")[0].endswith(b"systemd")
    return is_first and b"python" not in command and b"torch" not in command
