"""Who started whom, and the end of all that a process has started."""

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path


def exit_code(status: int) -> int:
    """Of a process that was waited for, 0 to 255; a signal adds its number to 128."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def children() -> set[int]:
    """Of this process, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none at all, as nearly always: no need to look at every process
        return set()
    return _children(os.getpid(), _parents())


def end_tree(pid: int) -> int:
    """Kill a child of this process with all that it started; returns its exit code, or -signal."""
    _end(lambda: {pid} | _below(pid))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def end_orphans(known: Collection[int] = ()) -> None:
    """Kill all children of this process but the known, with all that they started."""
    # A look can miss a process whose parent ends meanwhile; it is our child then, and seen next.
    while orphans := children() - set(known):
        _end(lambda found=orphans: found | _below(os.getpid(), known))
        for pid in orphans:
            os.waitpid(pid, 0)


def num_tasks_of(uid: int) -> int:
    """Processes and threads that the kernel counts against the user's limit."""
    num_tasks = 0
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended meanwhile
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
            if int(fields["Uid"].split()[0]) == uid:
                num_tasks += int(fields["Threads"])
    return num_tasks


def _end(find: Callable[[], set[int]]) -> None:
    """Stopped first: who is stopped forks no more, so that the search comes to an end."""
    stopped: set[int] = set()
    while new := find() - stopped:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _below(pid: int, apart_from: Collection[int] = ()) -> set[int]:
    """Children, their children and so on; those left out with all of theirs."""
    parents, found, new = _parents(), set(), {pid}
    while new:
        new = {child for each in new for child in _children(each, parents)} - set(apart_from)
        found |= new
    return found


def _children(pid: int, parents: dict[int, int]) -> set[int]:
    return {child for child, parent in parents.items() if parent == pid}


def _parents() -> dict[int, int]:
    """The parent of every process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return parents


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
