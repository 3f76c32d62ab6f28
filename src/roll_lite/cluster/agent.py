"""The processes of ranks, and the torchrun agents that start them. No torch: a rank's first import
asks the kernel to end it with its agent."""

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from roll_lite.sandbox.kernel import die_with_parent

RUN_ID = "TORCHELASTIC_RUN_ID"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
STOPPED = "T"
"""State of a process after SIGSTOP; a debugger's is t."""


def end_with_agent() -> None:
    """Have the kernel kill this process when the torchrun that started it ends, even by SIGKILL.

    Only a rank itself: what a rank starts has its environment, and its parent has it too. The
    thread that starts such a process may end long before the rank does.
    """
    if _variables(os.getppid()).get(RUN_ID):
        return
    with suppress(OSError):  # the watchdog of a cluster looks at the parent, too
        die_with_parent()
    if _is_init(os.getppid()):
        sys.exit("this rank exits: torchrun ended before its first import of roll_lite")


def agent_name() -> str:
    """Unique for each start of ranks by an agent: torchrun makes a folder for their errors."""
    file = os.environ.get(ERROR_FILE)
    return str(Path(file).parent.parent) if file else ""


def agent_pid() -> int:
    """The process that started this rank. Its parent may be its keeper, which forked it."""
    parent = os.getppid()
    with suppress(OSError):  # it has ended
        return int(_stat(parent)[1]) if _command(parent) == _command() else parent
    return parent


def find_rank(rank: int) -> "Process | None":
    """The process of another rank that the agent of this one started, if /proc tells."""
    for pid in children_of(agent_pid()):
        if _variables(pid).get("RANK") == str(rank):
            with suppress(OSError):  # it has ended
                forked = [child for child in children_of(pid) if _command(child) == _command(pid)]
                return Process.find(forked[0] if forked else pid)  # which may be its keeper
    return None


def children_of(pid: int) -> list[int]:
    """Whichever of its threads has started them; none if the process has ended."""
    found, folder = [], Path(f"/proc/{pid}/task")
    with suppress(OSError):  # the process has ended
        for task in os.listdir(folder):
            with suppress(OSError):  # the thread has ended, or the kernel has no such file
                found += map(int, (folder / task / "children").read_text().split())
    return found


class Process(NamedTuple):
    pid: int
    host: str
    born: int
    """In ticks since the host was booted: a process with this pid on another host of this name, or
    a later one, has another."""

    @classmethod
    def find(cls, pid: int) -> "Process":
        return cls(pid, socket.gethostname(), int(_stat(pid)[19]))

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP; False for a process of another host."""
        return self._state() == STOPPED

    def kill(self) -> None:
        """If it is on this host."""
        if self._state():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def _state(self) -> str:
        """Empty if it has ended, or is on another host."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return ""
        is_this = self.host == socket.gethostname() and int(fields[19]) == self.born
        return fields[0] if is_this else ""


def _is_init(pid: int) -> bool:
    """Whether it is what adopts orphans, and no torchrun that is the first process itself."""
    try:
        command = _command(pid)
    except OSError:
        return False
    is_first = pid == 1 or command.split(b"\0")[0].endswith(b"systemd")
    return is_first and b"python" not in command and b"torch" not in command


def _command(pid: int | str = "self") -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _variables(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty if this user may not read it."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(line).partition("=") for line in lines)
    return {name: value for name, _, value in pairs}
