"""What a program is run with, what becomes of it, and the errors of the sandbox itself."""

from dataclasses import dataclass
from typing import Literal

from roll_lite.checks import above, at_least

Isolation = Literal["full", "rlimits"]
Kind = Literal["ok", "error", "timeout", "memory", "output"]


class SandboxError(RuntimeError):
    """The sandbox failed, and nothing is known about the program."""


class SandboxUnavailable(SandboxError):
    """This machine lacks something that the isolation asked for needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    seconds: float = 10.0
    """Wall time; also the CPU time of each process, rounded up."""
    memory_mib: int = 512
    """Address space of each process, the interpreter's own 30 MiB included."""
    processes: int = 16
    """Processes and threads at a time, that of the tests included."""
    output_kib: int = 1024
    """Standard output and standard error together."""
    disk_mib: int = 64
    """Files in the temporary directory (with isolation="rlimits", each of them)."""
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
    """One run, as it travels to the process that does it."""

    source: str
    tests: str
    tests_apart: bool
    stdin: str
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    kind: Kind
    """ok: exit code 0, and the tests, if there were any, came to their end. error: anything else
    that the program did by itself. The others name the limit that it broke."""
    stdout: str
    stderr: str
    seconds: float
