"""Which processes run, for tests that start some and expect them to end."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from roll_lite.processes import all_pids, environment_of, read_stat
from support.paths import SOURCES


def processes_with(*texts: str) -> set[int]:
    """Processes whose command line holds all the texts; zombies have no command line."""
    found = set()
    for pid in all_pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if all(text.encode() in command for text in texts):
            found.add(pid)
    return found


def sandbox_processes() -> set[int]:
    """Zygotes of these sources and all their forks, which share the command line.

    Without those of pytest's other workers, which run tests of sandboxes at the same time.
    """
    found = processes_with("roll_lite.sandbox.zygote", SOURCES)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return found
    return {pid for pid in found if not _is_of_another_worker(pid)}


def _is_of_another_worker(pid: int) -> bool:
    """Whether it descends from a child of pytest's controller that is not this process."""
    above, here = pid, None
    while above > 1 and above not in (os.getpid(), os.getppid()):
        try:
            parent = read_stat(above).parent
        except OSError:  # it ended meanwhile, and another process adopted its children
            if above == pid:
                return True  # there is none
            above = pid
            continue
        above, here = parent, above
    return above == os.getppid() and here != os.getpid()


def is_running(pid: int) -> bool:
    """False for zombies too: the process that adopted them may be slow to reap them."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def child_of_rank(parent: int, rank: int) -> int:
    """The process of a rank, among the children of torchrun."""
    for pid in all_pids():
        with suppress(OSError):  # it has ended
            if read_stat(pid).parent == parent and environment_of(pid).get("RANK") == str(rank):
                return pid
    raise AssertionError(f"no rank {rank}")


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """The time is only a safety net."""
    deadline = time.monotonic() + seconds
    while not condition():  # asked once: what was true may change at once
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(condition, process, log):
    while not condition():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
