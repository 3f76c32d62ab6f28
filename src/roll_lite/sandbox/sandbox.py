"""Runs untrusted programs, from any process: `run_program(source)`."""

import atexit
import marshal
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar

from roll_lite.checks import above, at_least

Isolation = Literal["full", "rlimits"]
Kind = Literal["ok", "error", "timeout", "memory", "output"]
T = TypeVar("T")

MAX_SHARED = 4
"""Programs of one process that run at the same time; there are many worker processes."""
READY = "ready"
"""The zygote's first answer, if it can run programs."""
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
"""Signals that end a sandbox which starts, and say nothing about this machine."""
CLOSE_SECONDS = 5.0
"""For a sandbox to end; one that was stopped (SIGSTOP) never does."""
_LONGEST_ANSWER = 1 << 16
_PACKAGES = str(Path(__file__).parents[2])
_START = (
    "import sys; sys.path.append({packages!r}); "
    "from roll_lite.sandbox.zygote import serve; sys.path.pop(); "
    "serve({descriptor}, {isolation!r})"
)


class SandboxError(RuntimeError):
    """The sandbox itself failed; this says nothing about the program."""


class SandboxEnded(SandboxError):
    """The sandbox's process died, or the monitor of a program: another sandbox may work."""


class SandboxUnavailable(SandboxError):
    """This machine lacks something that the requested isolation needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    seconds: float = 10.0
    """Wall time of a run; also the CPU time of each process, rounded up."""
    memory_mib: int = 512
    """Memory of all processes and files together; also the address space of each process, which
    includes 30 MiB for the interpreter."""
    processes: int = 16
    """Processes and threads of the program at a time, including the one copied for each test."""
    output_kib: int = 1024
    """Standard output and standard error together, of a run."""
    disk_mib: int = 64
    """Files in the temporary folder (with isolation="rlimits", each file)."""
    open_files: int = 64
    """File descriptors of each process."""

    def __post_init__(self):
        above(0, self, "seconds")
        at_least(64, self, "memory_mib")
        at_least(2, self, "processes")
        at_least(1, self, "output_kib", "disk_mib")
        at_least(8, self, "open_files")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the monitor of a job knows: nothing that the program or its tests contain."""

    num_runs: int
    has_tests: bool
    is_apart: bool
    """Whether the tests have a process of their own."""
    seconds: float
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    kind: Kind
    """ok: exit code 0, and the tests, if there are any, ran to their end. timeout, memory and
    output name the limit that the program broke. error: any other end."""
    stdout: str
    """What this run printed."""
    stderr: str
    """What all runs of the job printed."""
    seconds: float
    """Wall time of all runs of the job."""


def run_program(source: str, *, isolation: Isolation = "full", **options: Any) -> Outcome:
    """Run a Python program once, in one of the `Sandbox`es that all calls of this process share.

    The options are those of `Sandbox.run`.
    """
    shared = _shared_sandboxes(os.getpid(), isolation)
    return shared.run(lambda sandbox: sandbox.run(source, **options))


def run_repeatedly(source: str, *, isolation: Isolation = "full", **options: Any) -> list[Outcome]:
    """As `Sandbox.run_repeatedly`, in a `Sandbox` that all calls of this process share."""
    shared = _shared_sandboxes(os.getpid(), isolation)
    return shared.run(lambda sandbox: sandbox.run_repeatedly(source, **options))


class Sandbox:
    """A process that forks programs, one at a time: `with Sandbox() as sandbox`.

    isolation="full" raises SandboxUnavailable if the kernel lacks something that it needs.
    isolation="rlimits" has the limits and the filter of system calls alone: the program can reach
    files, the network and, unless this is root, the user's own processes.
    """

    def __init__(self, isolation: Isolation = "full"):
        if isolation not in ("full", "rlimits"):
            raise ValueError(f"isolation={isolation!r} is not known; use full or rlimits")
        self._isolation = isolation
        self._lock = threading.Lock()

    def start(self) -> "Sandbox":
        self._zygote, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = _START.format(
            packages=_PACKAGES, descriptor=theirs.fileno(), isolation=self._isolation
        )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", start],
            env=_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        answer = self._zygote.recv(_LONGEST_ANSWER).decode()
        if answer != READY:
            self.close()
            if -self._process.returncode in FROM_OUTSIDE:
                raise SandboxEnded(self._why_it_ended())
            raise SandboxUnavailable(
                f"isolation={self._isolation!r} does not work on this machine: "
                f"{answer or self._why_it_ended()}. "
                "Run where the kernel allows namespaces, mounts, Landlock and seccomp; for "
                "programs that you trust, isolation='rlimits' is enough"
            )
        return self

    def run(self, source: str, *, stdin: str = "", tests: str = "", **options: Any) -> Outcome:
        """Run a Python program once; options are `tests_apart` and `limits` of `run_job`."""
        runs = {"inputs": [stdin], "tests": [tests] if tests else []}
        return self.run_repeatedly(source, **runs, **options)[0]

    def run_repeatedly(self, source: str, **options: Any) -> list[Outcome]:
        """Run a Python program for each input or each of the tests, until a run fails.

        This takes a fraction of the time of single runs, because the runs share namespaces, the
        folder of their files, and what earlier runs left in it. There is at least one outcome.
        There are fewer than runs if one fails, `seconds` have passed, or the program cannot be
        copied for the next. The options are those of `run_job`.
        """
        with self._lock:
            try:
                return run_job(self._hand_over, source, **options)
            except (EOFError, ConnectionError):
                raise SandboxEnded(self._why_it_ended()) from None

    def close(self) -> None:
        self._zygote.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "Sandbox":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_over(self, descriptors: list[int]) -> None:
        socket.send_fds(self._zygote, [b"job"], descriptors)

    def _why_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "the monitor of a program was killed"
        return f"the sandbox's process ended with {code}; see its standard error for the reason"


def run_job(
    hand_over: Callable[[list[int]], None],
    source: str,
    *,
    inputs: Sequence[str] = ("",),
    tests: Sequence[str] = (),
    tests_apart: bool = True,
    seconds: float = math.inf,
    limits: Limits = Limits(),  # noqa: B008 (it is frozen)
) -> list[Outcome]:
    """Run a program for each input or each of the tests; the job ends with the first that fails.

    The program starts anew for each of `inputs`, its standard input. `tests` are code that runs
    after the program, uses its names, and must run to its end: the program is loaded once, and
    copied for each; there is one input then. `seconds` is the wall time of all runs.

    With `tests_apart` the tests have a process of their own, which the program cannot reach, and
    which exchanges data with it (see `remote.py`). Without, the first of them runs in the program's
    process, as if appended to it: then any test works, but a malicious program can make it pass.

    The terms go to a monitor through the first of the descriptors that are handed over, the source
    and the tests to their processes through the other two: who forks the monitor reads none of it.
    marshal is the format that touches the least memory: every page costs a copy in a fork.
    """
    is_apart = bool(tests) and tests_apart
    terms = Terms(
        num_runs=len(tests if is_apart else inputs),
        has_tests=bool(tests),
        is_apart=is_apart,
        seconds=seconds,
        limits=limits,
    )
    together = [] if tests_apart else list(tests[:1])
    program = {"source": source, "inputs": list(inputs), "tests": together}
    parts = [_readable(part) for part in (program, list(tests))]
    monitor, theirs = Pipe()
    with monitor:
        try:
            hand_over([theirs.fileno(), *parts])
        finally:
            theirs.close()
            for part in parts:
                os.close(part)
        monitor.send_bytes(marshal.dumps(asdict(terms)))
        answer = marshal.loads(_receive(monitor))
        with suppress(EOFError, ConnectionError):  # when the monitor has ended
            monitor.recv_bytes()
    if "problem" in answer:
        raise SandboxError(answer["problem"])
    stderr = answer["stderr"]
    seconds = answer["seconds"]
    return [
        Outcome(kind=kind, stdout=printed, stderr=stderr, seconds=seconds)
        for kind, printed in answer["runs"]
    ]


def _receive(monitor: Connection) -> bytes:
    """A monitor's answer; EOFError also if it died in the middle of it."""
    try:
        return monitor.recv_bytes()
    except OSError:
        raise EOFError from None


def _readable(part: Any) -> int:
    """A descriptor from which one process can read the part of a job."""
    descriptor = os.memfd_create("job")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(marshal.dumps(part))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _environment() -> dict[str, str]:
    """Only the library path; a fixed hash seed gives sets the same order in every run."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {"PYTHONHASHSEED": "0"}


class SharedSandboxes:
    """As many sandboxes as threads have used at the same time, up to MAX_SHARED."""

    def __init__(self, isolation: Isolation):
        self._isolation = isolation
        self._idle: list[Sandbox] = []
        self._places = threading.Semaphore(MAX_SHARED)

    def run(self, job: Callable[[Sandbox], T]) -> T:
        """A job in a sandbox that no other thread uses; once more, in a new one, if that dies.

        Only once: with limits alone a program may be what kills its monitor.
        """
        with self._places:
            try:
                return self._run_in(self._idle_or_new(), job)
            except SandboxEnded:
                return self._run_in(self._new(), job)

    def _run_in(self, sandbox: Sandbox, job: Callable[[Sandbox], T]) -> T:
        """The sandbox is kept for the next job, unless it died."""
        has_died = False
        try:
            return job(sandbox)
        except SandboxEnded:
            has_died = True
            raise
        finally:
            if has_died:
                atexit.unregister(sandbox.close)
                sandbox.close()
            else:
                self._idle.append(sandbox)

    def _idle_or_new(self) -> Sandbox:
        with suppress(IndexError):
            return self._idle.pop()
        return self._new()

    def _new(self) -> Sandbox:
        sandbox = Sandbox(self._isolation).start()
        atexit.register(sandbox.close)
        return sandbox


@cache
def _shared_sandboxes(pid: int, isolation: Isolation) -> SharedSandboxes:
    """Each process has its own: a fork must not use its parent's sandboxes."""
    return SharedSandboxes(isolation)
