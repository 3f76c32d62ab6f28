"""Process trees: finding the descendants of a process, and killing them all."""

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

MAX_DESCRIPTORS = 256
"""The zygote and its copies have no higher descriptors."""


def close_all_but(kept: Collection[int]) -> None:
    """Also keeps the three standard streams."""
    for low, high in pairwise([2, *sorted(kept), MAX_DESCRIPTORS]):
        os.closerange(low + 1, high)


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


def memory_of(pids: Collection[int], proc: int, limit: int) -> int:
    """Bytes that processes and their descendants use; `proc` is a descriptor of /proc.

    Above the limit, pages that they share count once, which takes longer to find out. Where the
    kernel does not tell (not everyone may inspect every process), they count for each process.
    """
    found = [each for pid in pids for each in _tree(pid, proc)]
    used = [_kib(f"{pid}/status", "VmRSS:", proc) for pid in found]
    if sum(used) << 10 > limit:
        shares = [_kib(f"{pid}/smaps_rollup", "Pss:", proc) for pid in found]
        used = [share or all_of_it for share, all_of_it in zip(shares, used, strict=True)]
    return sum(used) << 10


def _tree(pid: int, proc: int) -> list[int]:
    """A process and its descendants."""
    found, new = [], [pid]
    while new:
        found += new
        new = [child for parent in new for child in children_of(parent, proc)]
    return found


def children_of(pid: int, proc: int) -> list[int]:
    with suppress(OSError):  # it has ended
        tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        try:
            lists = [_read(f"{task}/children", tasks) for task in os.listdir(tasks)]
        finally:
            os.close(tasks)
        return [int(child) for each in lists for child in each.split()]
    return []


def _kib(path: str, field: str, proc: int) -> int:
    lines = (line.split() for line in _read(path, proc).splitlines())
    return next((int(line[1]) for line in lines if line and line[0] == field), 0)


def _read(path: str, folder: int) -> str:
    """Nothing if the process has ended or may not be inspected."""
    try:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
        with open(descriptor) as file:
            return file.read()
    except OSError:
        return ""


def all_pids() -> list[int]:
    """Of the machine. Path.glob would raise an error if a process ended during the search."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def num_tasks_of(uid: int) -> int:
    """Processes and threads that the kernel counts against the user's limit."""
    num_tasks = 0
    for pid in all_pids():
        with suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines)
            if int(fields["Uid"].split()[0]) == uid:
                num_tasks += int(fields["Threads"])
    return num_tasks


def state_of(pid: int) -> str:
    """R for running, T for stopped, and so on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def lacks_processor(pid: int, seconds: float) -> bool:
    """Whether a process waits for a processor, and has used less than `seconds` of one.

    On a busy machine code that does little may take long.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    state, ticks = fields[0], int(fields[11]) + int(fields[12])
    return state == "R" and ticks / os.sysconf("SC_CLK_TCK") < seconds


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
    """Children, their children and so on, without the spared and their descendants."""
    parents, found, new = _parents(), set(), {pid}
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
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            parents[pid] = int(stat.rpartition(")")[2].split()[1])
    return parents


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
