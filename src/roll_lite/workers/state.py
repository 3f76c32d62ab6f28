"""The process of a worker: its limits, the code that runs in it, and the state of the process,
which a reward may change and the next one must not find changed."""

import _signal
import bdb
import faulthandler
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from roll_lite.checks import above
from roll_lite.processes import adopt_orphans, die_with_parent

SHOW_STACK = signal.SIGUSR1
"""Makes a worker print its stack."""
OUT_OF_MEMORY = 86
"""Exit code of a worker that ran out of memory."""
_RUNNING = struct.Struct("qdd")
_SIGNALS = tuple(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_LIMITS = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What workers run, and their limits."""

    noun: str
    """What messages call it: reward or environment."""
    prefix: str
    """What names of its metrics and options begin with: reward or env."""
    jobs_per_worker: int | None
    """Rewards come one by one; None is any number of episodes at once."""
    seconds: float
    """Wall time of one reward, or of one step of an episode."""
    memory_gib: float
    """Memory that a worker, and each of its children, may map in addition to what imports took."""
    output_kib: int
    """Output that one reward or step may print."""

    def __post_init__(self):
        above(0, self, "seconds", "memory_gib", "output_kib")

    @property
    def seconds_option(self) -> str:
        return f"{self.prefix}_seconds={self.seconds}"

    @property
    def took_longer(self) -> str:
        return f"the {self.noun} took longer than {self.seconds_option}"


class Running:
    """Which job's code runs in a worker now, and since when: 24 bytes that the supervisor reads."""

    def __init__(self):
        self._memory = mmap.mmap(-1, _RUNNING.size)  # shared with the processes forked from here
        self._start = time.monotonic()
        self._worker = os.getpid()
        self.busy = 0.0
        """Seconds in which the worker ran code of jobs, as the worker counts them."""
        self.end()

    def belong_to_this_process(self) -> None:
        self._worker = os.getpid()

    def begin(self, job_id: int) -> None:
        self._start = time.monotonic()
        used = time.process_time()
        _RUNNING.pack_into(self._memory, 0, -1, self._start, used)
        _RUNNING.pack_into(self._memory, 0, job_id, self._start, used)

    def end(self) -> None:
        """Also ends a process that the code forked and that comes back here: it is no worker."""
        if os.getpid() != self._worker:
            with suppress(OSError):
                os.write(2, b"a process that user code forked came back from it, and was ended\n")
            os._exit(1)
        _RUNNING.pack_into(self._memory, 0, -1, 0.0, 0.0)
        self.busy += time.monotonic() - self._start

    def read(self) -> tuple[int, float, float]:
        """A job, or -1 for none; when its code began, and the processor time used until then."""
        while (found := _RUNNING.unpack_from(self._memory)) != _RUNNING.unpack_from(self._memory):
            continue  # the worker was just writing
        return found

    def close(self) -> None:
        self._memory.close()


class ProcessState:
    """The working folder, file mode mask, environment, signal handlers, alarm and limits of this
    process, as they are now. What modules keep in their variables is not among them.

    Python reports changes of folder, environment and limits, so that `restore` need not look.
    """

    def __init__(self):
        self._folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._environment = dict(os.environb)
        self._handlers = list(map(_signal.getsignal, _SIGNALS))
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._limits = {number: resource.getrlimit(number) for number in _LIMITS}
        self._changed_names: set[bytes] = set()
        self._has_moved = self._has_new_limits = False
        sys.addaudithook(self._notice)

    def restore(self) -> bool:
        """False if this process may not restore something: a limit that was lowered."""
        try:
            self._restore()
        except (OSError, ValueError):
            return False
        return True

    def _restore(self) -> None:
        os.umask(self._umask)
        if self._has_moved:
            os.fchdir(self._folder)
        if self._changed_names:
            self._restore_environment()
        _signal.alarm(0)
        _signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        # signal.getsignal makes enums, which takes 20 times as long.
        if list(map(_signal.getsignal, _SIGNALS)) != self._handlers:
            self._restore_handlers()
        if self._has_new_limits:
            for number, limit in self._limits.items():
                resource.setrlimit(number, limit)
        self._has_moved = self._has_new_limits = False

    def _notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.chdir":
            self._has_moved = True
        elif event in ("os.putenv", "os.unsetenv"):
            self._changed_names.add(os.fsencode(arguments[0]))
        elif event in ("resource.setrlimit", "resource.prlimit"):
            self._has_new_limits = True

    def _restore_environment(self) -> None:
        for name in list(self._changed_names):
            os.environb.pop(name, None)
            os.unsetenv(name)  # for what was set without os.environ
            if name in self._environment:
                os.environb[name] = self._environment[name]
        self._changed_names.clear()

    def _restore_handlers(self) -> None:
        for number, handler in zip(_SIGNALS, self._handlers, strict=True):
            if handler is not None:  # None is a handler that Python did not set
                signal.signal(number, handler)
        show_stack_when_asked()


def show_stack_when_asked() -> None:
    """Also after user code has replaced the handlers."""
    faulthandler.disable()
    faulthandler.unregister(SHOW_STACK)
    faulthandler.enable(sys.stderr)
    faulthandler.register(SHOW_STACK, sys.stderr)


def set_up(output: int, memory_gib: float) -> None:
    """Make a process that was forked from the supervisor a worker, which prints to `output`."""
    os.setsid()
    adopt_orphans()  # so that the supervisor finds every process that user code leaves behind
    die_with_parent()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.breakpointhook = _no_debugger
    show_stack_when_asked()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _address_space() + int(memory_gib * 2**30)
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v`
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _no_debugger(*args: object, **options: object) -> NoReturn:
    """`breakpoint()` in a worker, which has no terminal: the run ends and says so."""
    raise bdb.BdbQuit


def _address_space() -> int:
    """Bytes that this process has mapped; imported libraries map far more than they use."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


def exit_without_memory() -> NoReturn:
    """While the MemoryError is handled. What it left behind is unknown, so the worker ends."""
    try:
        traceback.print_exc()
        flush_output()
    finally:
        os._exit(OUT_OF_MEMORY)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # user code may have closed or replaced it
            stream.flush()
