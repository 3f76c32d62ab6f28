"""Which processes run, for tests that start some and expect them to end."""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from roll_lite.processes import adopt_orphans, all_pids, environment_of, prctl, read_stat
from support.paths import SOURCES

PR_SET_CHILD_SUBREAPER = 36


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


def descendants_with(*texts: str) -> set[int]:
    """Those of them that this process has started, or what it started.

    Other tests on the machine, of another worker or of another run, start the same programs.
    """
    return {pid for pid in processes_with(*texts) if _descends(pid)}


def _descends(pid: int) -> bool:
    """From this process."""
    above = pid
    while above > 1 and above != os.getpid():
        try:
            above = read_stat(above).parent
        except OSError:  # it ended meanwhile, and another process adopted its children
            if above == pid:
                return False
            above = pid
    return above == os.getpid()


def sandbox_processes() -> set[int]:
    """Zygotes that this process has started and all their forks, which share the command line."""
    return descendants_with("roll_lite.sandbox.zygote", SOURCES)


@contextmanager
def new_sandbox_processes() -> Iterator[Callable[[], set[int]]]:
    """A function that finds those that began in the block, also where their parent has ended."""
    adopt_orphans()
    before = sandbox_processes()
    try:
        yield lambda: sandbox_processes() - before
    finally:
        prctl("CHILD_SUBREAPER", PR_SET_CHILD_SUBREAPER, 0)


def sleep_argument() -> str:
    """Seconds that no other process sleeps, so that a command line with them is found."""
    return f"{random.randrange(10**5, 10**6)}.{os.getpid()}"


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
