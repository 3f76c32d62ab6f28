"""Runs untrusted programs, from any process: `run_program(source)`."""

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal

from roll_lite.checks import above, at_least

Isolation = Literal["full", "rlimits"]
Kind = Literal["ok", "error", "timeout", "memory", "output"]

_PACKAGES = str(Path(__file__).parents[2])
_START = (
    "import sys; sys.path.append({packages!r}); "
    "from roll_lite.sandbox.zygote import serve; sys.path.pop(); "
    "serve({descriptor}, {isolation!r})"
)


class SandboxError(RuntimeError):
    """The sandbox itself failed; this says nothing about the program."""


class SandboxUnavailable(SandboxError):
    """This machine lacks something that the requested isolation needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    seconds: float = 10.0
    """Wall time; also the CPU time of each process, rounded up."""
    memory_mib: int = 512
    """Address space of each process, including 30 MiB for the interpreter."""
    processes: int = 16
    """Processes and threads at a time, including the process of the tests."""
    output_kib: int = 1024
    """Standard output and standard error together."""
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


@dataclass(slots=True, kw_only=True)
class Job:
    """One run, as it is sent to the zygote."""

    source: str
    stdin: str = ""
    tests: str = ""
    """Code that runs after the program, uses its names, and must run to its end."""
    tests_apart: bool = True
    """Run the tests in their own process, which the program cannot reach, and which exchanges data
    with it (see `remote.py`). False runs them in the program's process, as if appended to it: then
    any test works, but a malicious program can make them pass."""
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    kind: Kind
    """ok: exit code 0, and the tests, if there are any, ran to their end. timeout, memory and
    output name the limit that the program broke. error: any other end."""
    stdout: str
    stderr: str
    seconds: float


def run_program(source: str, *, isolation: Isolation = "full", **options: Any) -> Outcome:
    """Run a Python program once, in a `Sandbox` that all calls of this process share.

    The options are the fields of `Job`.
    """
    return _shared_sandbox(os.getpid(), isolation).run(source, **options)


class Sandbox:
    """A process that forks programs, one at a time.

    isolation="full" raises SandboxUnavailable if the kernel lacks something that it needs.
    isolation="rlimits" enforces the limits and nothing else: the program can reach files, the
    network and, unless this is root, the user's own processes.
    """

    def __init__(self, isolation: Isolation = "full"):
        if isolation not in ("full", "rlimits"):
            raise ValueError(f"isolation={isolation!r} is not known; use full or rlimits")
        self._lock = threading.Lock()
        self._zygote, theirs = Pipe()
        start = _START.format(packages=_PACKAGES, descriptor=theirs.fileno(), isolation=isolation)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", start],
            env=_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        problem = self._receive()
        if problem:
            self.close()
            raise SandboxUnavailable(
                f"isolation={isolation!r} does not work on this machine: {problem}. Run where the "
                "kernel allows namespaces, mounts and Landlock; for programs that you trust, "
                "isolation='rlimits' is enough"
            )

    def run(self, source: str, **options: Any) -> Outcome:
        """Run a Python program once; the options are the fields of `Job`."""
        job = Job(source=source, **options)
        with self._lock:
            with suppress(BrokenPipeError):  # the zygote has ended, which _receive reports
                self._zygote.send(job)
            outcome = self._receive()
        if isinstance(outcome, str):
            raise SandboxError(outcome)
        return outcome

    def close(self) -> None:
        self._zygote.close()
        self._process.wait()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> Outcome | str:
        try:
            return self._zygote.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            raise SandboxError(
                f"the sandbox's process ended with {code}; see its standard error for the reason"
            ) from None


def _environment() -> dict[str, str]:
    """Only the library path; a fixed hash seed gives sets the same order in every run."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {"PYTHONHASHSEED": "0"}


@cache
def _shared_sandbox(pid: int, isolation: Isolation) -> Sandbox:
    """One for each process: a fork must not use its parent's sandbox."""
    sandbox = Sandbox(isolation)
    atexit.register(sandbox.close)
    return sandbox
