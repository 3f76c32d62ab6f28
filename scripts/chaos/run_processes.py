"""The processes of a run, as seen from outside: who they are, their state, and faults for them.

Linux only. A program is started with a mark in its environment, which what it starts inherits: so
that is found wherever it was adopted, also what outlives the program. Sandboxes have an empty
environment: they are found as descendants of what has the mark, and from then on by their numbers.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from roll_lite.processes import all_pids, children_of, environment_of

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
    start: int
    """In clock ticks since the machine was booted: numbers are used again."""
    session: int
    is_marked: bool

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start


@dataclass
class Program:
    """One start of a run, under python or torchrun."""

    process: subprocess.Popen
    mark: str
    num_ranks: int
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Identities of all processes that were found."""
    sessions: set[int] = field(default_factory=set)
    """Of those: what they started is in one of them, or has left it itself."""
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
        others = {pid: found for pid in all_pids() if (found := _look(pid, self.mark))}
        own: dict[int, Process] = {}
        while new := [p for p in others.values() if self._is_own(p, own)]:
            own |= {process.pid: others.pop(process.pid) for process in new}
        self.seen |= {process.identity for process in own.values()}
        self.sessions |= {process.session for process in own.values()}
        return list(own.values())

    def notice(self) -> None:
        """Look now and then: a sandbox that was never seen beside its worker is not found later."""
        if time.monotonic() > self.searched_at + SEARCH_SECONDS:
            self.searched_at = time.monotonic()
            self.alive()

    def _is_own(self, process: Process, own: Mapping[int, Process]) -> bool:
        is_known = process.identity in self.seen or process.session in self.sessions
        return process.is_marked or is_known or process.parent in own

    def is_alive(self, pid: int) -> bool:
        """Whether a number is that of a process of it."""
        found = _look(pid, self.mark)
        return found is not None and (found.is_marked or found.identity in self.seen)

    def shared_memory(self) -> list[Path]:
        """What is named after one of its processes."""
        numbers = {str(pid) for pid, _ in self.seen}
        found = Path("/dev/shm").iterdir()
        return [path for path in found if numbers & set(re.findall(r"\d+", path.name))]

    def victims(self) -> dict[str, Process]:
        """By name: agent, rank 0 to the last and their monitors, supervisor, worker, sandbox (the
        process that forks the others of it) and sandbox monitor (the first of each)."""
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
        return named | _in_sandboxes(alive)

    def find(self, victim: str) -> Process | None:
        """The living process of that name. Searches all processes only now and then."""
        known = self.known.get(victim)
        found = known and _look(known.pid, self.mark)
        found = found if found and found.start == known.start else None
        if found and found.rank is not None and victim.startswith("rank"):
            found = self._forked_by(found) or found  # it may have forked since then
        if found is None and time.monotonic() > self.searched_at + SEARCH_SECONDS:
            self.known, self.searched_at = self.victims(), time.monotonic()
            found = self.known.get(victim)
        return found

    def _forked_by(self, monitor: Process) -> Process | None:
        """The rank that a process has forked and monitors."""
        for pid in children_of(monitor.pid):
            child = _look(pid, self.mark)
            if child and (child.rank, child.command) == (monitor.rank, monitor.command):
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


def _in_sandboxes(alive: Sequence[Process]) -> dict[str, Process]:
    """Programs are no victims: nobody can tell one that was killed from one that crashed."""
    named: dict[str, Process] = {}
    of_sandboxes = [p for p in alive if "sandbox.zygote" in p.command]
    zygotes = {p.pid for p in of_sandboxes if not _is_fork(p, alive)}
    for process in of_sandboxes:
        if process.pid in zygotes:
            named.setdefault("sandbox", process)
        elif process.parent in zygotes:
            named.setdefault("sandbox monitor", process)
    return named


def _look(pid: int, mark: str) -> Process | None:
    """A process of the machine; None if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = folder.joinpath("stat").read_bytes().rpartition(b")")[2].split()
        command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:  # it ended meanwhile
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    environment = environment_of(pid)
    is_marked = environment.get(MARK) == mark
    rank = int(environment["RANK"]) if is_marked and "RANK" in environment else None
    return Process(
        pid, int(fields[1]), rank, command.decode(errors="replace"),
        int(fields[19]), int(fields[3]), is_marked,
    )  # fmt: skip


def _status(pid: int, field: str) -> str | None:
    """A field of /proc/PID/status; None if there is no such process or field."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_bytes().split(b"\n"):
            name, _, value = line.partition(b":")  # a process may have any bytes as its name
            if name == field.encode():
                return value.decode(errors="replace").strip()
    return None
