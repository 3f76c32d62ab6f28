"""The processes of a run, as seen from outside: who they are, their state, and faults for them.

Linux only. A program is started with a mark in its environment, which all that it starts inherit:
so they are found wherever they were adopted, also those that outlive it.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from roll_lite.processes import all_pids, children_of

MARK = "ROLL_LITE_CHAOS"
LIMITS = {"memory": resource.RLIMIT_AS, "disk": resource.RLIMIT_FSIZE}
"""Faults that are limits: allocations and writes fail, as without memory and on a full disk."""
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGSEGV")
SEARCH_SECONDS = 0.25
"""Between two searches among all processes of the machine."""
LANDING_SECONDS = 60.0
"""Only for a machine that is very busy: a signal lands at once."""


class Process(NamedTuple):
    pid: int
    parent: int
    rank: int | None
    """That torchrun gave it or the process that started it."""
    command: str


@dataclass
class Program:
    """One start of a run, under python or torchrun."""

    process: subprocess.Popen
    mark: str
    num_ranks: int
    seen: set[int] = field(default_factory=set)
    """Numbers of all processes that were found."""
    monitors: set[int] = field(default_factory=set)
    """Processes that have forked their rank, which may be gone."""
    known: dict[str, Process] = field(default_factory=dict)
    searched_at: float = 0.0

    @classmethod
    def start(cls, command: Sequence[str], num_ranks: int, output: Path, temp: Path) -> "Program":
        """In a session of its own, with a folder of its own for temporary files."""
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        # torch's cache is kept on purpose, so it is no temporary file.
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(temp.parent / "inductor"))
        more = {MARK: mark, "TMPDIR": str(temp), "TORCHINDUCTOR_CACHE_DIR": cache}
        with output.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1"} | os.environ | more,
            )
        return cls(process, mark, num_ranks)

    def alive(self) -> list[Process]:
        """All its processes, without zombies."""
        found = [process for pid in all_pids() if (process := _marked(pid, self.mark))]
        self.seen |= {process.pid for process in found}
        return found

    def is_alive(self, pid: int) -> bool:
        """Whether a number is that of a process of it."""
        return _marked(pid, self.mark) is not None

    def shared_memory(self) -> list[Path]:
        """What is named after one of its processes."""
        numbers = {str(pid) for pid in self.seen}
        found = Path("/dev/shm").iterdir()
        return [path for path in found if numbers & set(re.findall(r"\d+", path.name))]

    def victims(self) -> dict[str, Process]:
        """By name: agent, rank 0 to the last and their monitors, supervisor, worker (the first of
        each)."""
        alive, root = self.alive(), self.process.pid
        named: dict[str, Process] = {}
        supervisors = [p for p in alive if "workers.supervisor" in p.command]
        roots = {p.pid for p in supervisors} - {p.pid for p in supervisors if _is_fork(p, alive)}
        for process in alive:
            if process.pid == root:
                named["rank 0" if self.num_ranks == 1 else "agent"] = process
            elif process.parent == root and self.num_ranks > 1 and process.rank is not None:
                rank = self._forked_by(process)
                if process.pid in self.monitors:
                    named[f"monitor {process.rank}"] = process
                if rank or process.pid not in self.monitors:
                    named[f"rank {process.rank}"] = rank or process
            elif process.pid in roots:
                named.setdefault("supervisor", process)
            elif process.parent in roots:
                named.setdefault("worker", process)
        return named

    def find(self, victim: str) -> Process | None:
        """The living process of that name. Searches all processes only now and then."""
        known = self.known.get(victim)
        found = known and _marked(known.pid, self.mark)
        if found and found.rank is not None and victim.startswith("rank"):
            found = self._forked_by(found) or found  # it may have forked since then
        if found is None and time.monotonic() > self.searched_at + SEARCH_SECONDS:
            self.known, self.searched_at = self.victims(), time.monotonic()
            found = self.known.get(victim)
        return found

    def _forked_by(self, monitor: Process) -> Process | None:
        """The rank that a process has forked and monitors."""
        for pid in children_of(monitor.pid):
            child = _marked(pid, self.mark)
            if child and child[2:] == monitor[2:]:
                self.monitors.add(monitor.pid)
                return child
        return None

    def kill_all(self) -> None:
        while alive := self.alive():
            for process in alive:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.02)
            self.process.poll()


def launch(num_ranks: int, max_restarts: int = 0) -> list[str]:
    """As a user does: python, or torchrun for several ranks."""
    if num_ranks == 1:
        return [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--max-restarts={max_restarts}", f"--nproc-per-node={num_ranks}"]


def inject(process: Process, fault: str) -> tuple[str, Callable[[], None]]:
    """Returns what shows that it landed, and how to undo it, which does nothing to the dead."""
    if fault in LIMITS:
        return _limit(process.pid, fault)
    number, pidfd = signal.Signals[fault], os.pidfd_open(process.pid)  # numbers are used again
    ignores = int(_status(process.pid, "SigIgn") or "0", 16) >> (number - 1) & 1
    signal.pidfd_send_signal(pidfd, number)
    landed = _wait_for_landing(process.pid, fault)

    def undo() -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    return "ignored" if ignores else landed, undo


def _wait_for_landing(pid: int, fault: str) -> str:
    end = time.monotonic() + LANDING_SECONDS
    while time.monotonic() < end:
        state = _status(pid, "State")
        if state is None or state[0] in "ZX":
            return "gone"
        if fault == "SIGSTOP" and state[0] == "T":
            return "stopped"
        pending = int(_status(pid, "ShdPnd") or "0", 16) >> (signal.Signals[fault] - 1) & 1
        if fault in ("SIGTERM", "SIGINT") and not pending:
            return "delivered"
        time.sleep(0.002)
    return ""


def _limit(pid: int, fault: str) -> tuple[str, Callable[[], None]]:
    which = LIMITS[fault]
    used = int((_status(pid, "VmSize") or "0").split()[0]) * 1024
    limit = used + 2**20 if fault == "memory" else 4096
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (limit, before[1]))
    found = resource.prlimit(pid, which)[0]

    def undo() -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, which, before)

    return f"limited to {found} bytes", undo


def _is_fork(process: Process, alive: Sequence[Process]) -> bool:
    """Whether its parent has the same command line."""
    return any(p.pid == process.parent and p.command == process.command for p in alive)


def _marked(pid: int, mark: str) -> Process | None:
    folder = Path(f"/proc/{pid}")
    try:
        environment = folder.joinpath("environ").read_bytes()
        if f"{MARK}={mark}".encode() not in environment.split(b"\0"):
            return None
        command = (
            folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
        fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):  # it ended meanwhile, or is another user's
        return None
    ranks = [v for v in environment.split(b"\0") if v.startswith(b"RANK=")]
    rank = int(ranks[0][5:]) if ranks else None
    return None if fields[0] in "ZX" else Process(pid, int(fields[1]), rank, command)


def _status(pid: int, field: str) -> str | None:
    """A field of /proc/PID/status; None if there is no such process or field."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return line.partition(":")[2].strip()
    return None
