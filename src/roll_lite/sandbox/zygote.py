"""The zygote, and the monitor that it forks for each job.

The zygote is a fresh interpreter that `Sandbox` starts with an empty environment. It has imported
the modules that programs often use. Jobs pass through it as descriptors that it does not read: all
later programs are copies of its memory.

A monitor starts a program and its tests, reads what they print, and ends them. It knows the job's
`Terms` alone. The program's process reads its source from a descriptor, the tests' process reads
the tests from another, and neither is a copy of a process that has read them.
"""

import gc
import marshal
import os
import resource
import secrets
import select
import selectors
import signal
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from roll_lite.processes import exit_code
from roll_lite.sandbox.harness import OUT_OF_MEMORY, PROBLEM, PROGRAM_ENDED, run_and_exit
from roll_lite.sandbox.isolation import (
    MAX_DESCRIPTORS,
    Namespaces,
    ResourceLimits,
    Role,
    close_all_but,
)
from roll_lite.sandbox.sandbox import READY, Kind, Limits, SandboxError, Terms, run_job

PRELOADED = (
    "array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "enum", "fractions",
    "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "queue",
    "random", "re", "statistics", "string", "struct", "textwrap", "typing",
)  # fmt: skip
_NUM_DESCRIPTORS = 3
"""Those that `run_job` hands over."""
SETUP_SECONDS = 30.0
_STARTED = b"+"
_GO_ON = b"g"
_GRACE = 0.2
"""Seconds that a program has to end after its tests, and that tests have after their program."""
_MEMORY_EVERY = 0.05
"""Seconds between two looks at the memory of a job."""
_CHUNK = 1 << 20
_NOTES = 64
"""Bytes that a run may write as notes."""


def serve(descriptor: int, kind: str) -> None:
    """Fork monitors one after another. The first answer says why the isolation fails, or READY."""
    client = socket.socket(fileno=os.dup(descriptor))  # a low number, so that programs close it
    os.close(descriptor)
    # These may reach all processes of a job. The run still needs this one, and ends it itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        import_module(name)
    selectors.DefaultSelector = selectors.PollSelector  # programs have no epoll
    gc.disable()  # until a program starts: collecting copies the memory that forks share
    gc.freeze()
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    try:
        isolation = Namespaces() if kind == "full" else ResourceLimits()
        if isinstance(isolation, Namespaces):
            isolation.enter_jail()
        trial = partial(_fork_monitor, isolation)
        [outcome] = run_job(trial, "", tests=["pass"], seconds=SETUP_SECONDS)
        os.wait()
        if outcome.kind == "error":  # else every program would fail, and count as wrong
            raise SandboxError(outcome.stderr)
    except (OSError, AttributeError, SandboxError, EOFError) as error:
        # AttributeError: a C library without the function
        client.send((str(error).strip() or type(error).__name__).splitlines()[-1].encode())
        return
    client.send(READY.encode())
    with suppress(ConnectionError):
        while descriptors := socket.recv_fds(client, 1, _NUM_DESCRIPTORS)[1]:  # else it has ended
            monitor = _fork_monitor(isolation, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(monitor, 0)


def _fork_monitor(isolation: Namespaces | ResourceLimits, descriptors: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        monitor_and_exit(isolation, *descriptors)
    return pid


def monitor_and_exit(
    isolation: Namespaces | ResourceLimits, client: int, program: int, tests: int
) -> NoReturn:
    connection = Connection(client)
    try:
        terms = marshal.loads(connection.recv_bytes())
        terms = Terms(**terms | {"limits": Limits(**terms["limits"])})
        answer = Monitor(terms, isolation, connection).run(program, tests)
    except SandboxError as error:
        answer = {"problem": str(error)}
    except BaseException:  # the process ends here, so report anything
        answer = {"problem": traceback.format_exc()}
    with suppress(ConnectionError):  # the client has closed or ended
        connection.send_bytes(marshal.dumps(answer))
    os._exit(0)


@dataclass(slots=True)
class Child:
    """A process that runs the program or the tests, as its monitor knows it."""

    pid: int
    end: int
    """A descriptor that becomes readable when the process ends."""
    notes: socket.socket
    """What the harness reports. Programs do not have the other end."""
    code: int | None = None
    """Its exit code, when it has ended."""
    ended_by_itself: bool = False

    def kill(self) -> None:
        self.ended_by_itself = self.code is not None
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = exit_code(os.waitpid(self.pid, 0)[1])


class Monitor:
    def __init__(self, terms: Terms, isolation: Namespaces | ResourceLimits, client: Connection):
        self._terms = terms
        self._isolation = isolation
        self._client = client
        self._token = secrets.token_hex(16).encode()
        """Sent by the harness when a run has ended well."""
        self._children: list[Child] = []
        """The program's, then, if they are apart, the tests'; the last one decides."""
        self._read: dict[int, bytearray] = {}
        """What was read, by descriptor: stdout, stderr, and the notes of each child."""
        self._ends: list[int] = []
        """How much the program had printed when each run before the last ended."""
        self._num_before = 0
        """Bytes of all that was read when the last run began."""
        self._start = self._run_start = time.monotonic()
        self._next_look = self._start + _MEMORY_EVERY
        self._is_started = False
        self._ended_at: float | None = None
        """When the deciding process ended."""

    def run(self, program: int, tests: int) -> dict[str, Any]:
        """The answer to the client. Raises SandboxError if a process could not be started."""
        self._isolation.prepare(self._terms)
        try:
            self._start_processes(program, tests)
            broken_limit = self._watch()
        finally:  # what is left would count against the limits of later jobs
            for child in self._children:
                child.kill()
            seconds = time.monotonic() - self._start
            self._isolation.clean()
        self._drain()
        return self._answer(broken_limit) | {"seconds": seconds}

    def _start_processes(self, program: int, tests: int) -> None:
        reading, writing = zip(*(os.pipe() for _ in range(2)), strict=True)
        ours, theirs = socket.socketpair()
        self._fork("program", writing, program, ours if self._terms.is_apart else None)
        if self._terms.is_apart:
            self._fork("tests", writing, tests, theirs)
        for descriptor in (*writing, program, tests):
            os.close(descriptor)
        ours.close()
        theirs.close()
        for descriptor in (*reading, *(child.notes.fileno() for child in self._children)):
            os.set_blocking(descriptor, False)
            self._read[descriptor] = bytearray()

    def _fork(
        self, role: Role, streams: tuple[int, ...], part: int, link: socket.socket | None
    ) -> None:
        notes, theirs = socket.socketpair()
        pid = self._isolation.fork(role)
        if pid:
            theirs.close()
            self._children.append(Child(pid, os.pidfd_open(pid), notes))
            return
        try:
            self._become(role, streams, part, theirs, link)
        finally:
            os._exit(1)

    def _become(
        self,
        role: Role,
        streams: tuple[int, ...],
        part: int,
        notes: socket.socket,
        link: socket.socket | None,
    ) -> NoReturn:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for descriptor, target in zip(streams, (1, 2), strict=True):
                os.dup2(descriptor, target)
            kept = {part, notes.fileno()} | ({link.fileno()} if link else set())
            close_all_but(kept | self._isolation.descriptors)
            self._isolation.enter(self._terms.limits, role)
            close_all_but(kept)
            notes.send(_STARTED)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1].name
            notes.send(f"{type(error).__name__} in {where}: {error}".encode())
            os._exit(1)
        connection = Connection(link.detach()) if link else None
        run_and_exit(role, part, notes, self._token, connection)

    def _watch(self) -> Kind | None:
        """Until the job or the client ends, or a limit is broken, which is returned."""
        ends = {child.end: child for child in self._children}
        poll = select.poll()  # which runs less Python than `selectors`
        for descriptor in (*self._read, *ends, self._client.fileno()):
            poll.register(descriptor, select.POLLIN)
        while ends and (left := self._seconds_left()) > 0:
            ready = {descriptor for descriptor, _ in poll.poll(1e3 * min(left, _MEMORY_EVERY))}
            for descriptor in ready & self._read.keys():
                if not self._take(descriptor):
                    poll.unregister(descriptor)
            for descriptor in ready & ends.keys():
                poll.unregister(descriptor)
                self._note_end(ends.pop(descriptor))
            self._note_runs()
            if self._client.fileno() in ready:
                return None
            if broken := self._broken_limit():
                return broken
        return None if self._deciding.code is not None else "timeout"

    @property
    def _deciding(self) -> Child:
        return self._children[-1]

    def _seconds_left(self) -> float:
        """The time limits count from the moment at which all processes are set up."""
        now = time.monotonic()
        limits = self._terms.limits
        if self._ended_at is not None:
            return self._ended_at + _GRACE - now
        if not self._is_started and all(map(self._notes, self._children)):
            self._start = self._run_start = now
            self._is_started = True
        if not self._is_started:
            return self._start + SETUP_SECONDS - now
        all_end = self._start + min(self._terms.seconds, self._terms.num_runs * limits.seconds)
        return min(all_end, self._run_start + limits.seconds) - now

    def _note_end(self, child: Child) -> None:
        child.code = exit_code(os.waitpid(child.pid, 0)[1])
        if child is self._deciding:
            self._ended_at = time.monotonic()

    def _note_runs(self) -> None:
        """Restart the clock for the run that follows each that has ended well, and let it start."""
        while self._num_runs_ended() > len(self._ends):
            stdout, stderr, *_ = self._read
            self._take(stdout)
            self._take(stderr)
            self._ends.append(len(self._read[stdout]))
            self._num_before = sum(map(len, self._read.values()))
            self._run_start = time.monotonic()
            with suppress(OSError):  # it was the last
                self._deciding.notes.send(_GO_ON)

    def _num_runs_ended(self) -> int:
        """Runs that have ended well, by the notes of the harness."""
        tokens = self._notes(self._deciding).removeprefix(_STARTED)
        num_tokens = len(tokens) // len(self._token)
        return num_tokens if tokens == self._token * num_tokens else 0

    def _notes(self, child: Child) -> bytearray:
        return self._read[child.notes.fileno()]

    def _broken_limit(self) -> Kind | None:
        limits = self._terms.limits
        now = time.monotonic()
        num_read = sum(map(len, self._read.values())) - self._num_before
        if num_read > (limits.output_kib << 10) + _NOTES:
            return "output"
        if now < self._next_look:
            return None
        pids = [child.pid for child in self._children if child.code is None]
        limit = limits.memory_mib << 20
        # Twice: where processes end during a look, pages that they shared count more than once.
        is_broken = all(self._isolation.memory(pids, limit) > limit for _ in range(2))
        self._next_look = time.monotonic() + _MEMORY_EVERY  # a look at large processes takes long
        return "memory" if is_broken else None

    def _take(self, descriptor: int) -> bool:
        """Read what is there; False at the end."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._read[descriptor] += chunk
        return bool(chunk)

    def _drain(self) -> None:
        """What is left after all writers have ended: less than a chunk in each pipe."""
        for descriptor in self._read:
            self._take(descriptor)

    def _answer(self, broken_limit: Kind | None) -> dict[str, Any]:
        """The runs that ended well, and, if there is one, the run that ended the process."""
        for child in self._children:
            if not self._notes(child).startswith(_STARTED):
                raise SandboxError(f"the program was not started: {_text(self._notes(child))}")
        problem = self._notes(self._deciding).partition(PROBLEM)[2]
        if problem and self._terms.is_apart:
            raise SandboxError(f"{_text(problem)}; run such tests with tests_apart=False")
        stdout, stderr, *_ = self._read.values()
        kinds = self._kinds(broken_limit)
        if self._terms.has_tests and kinds[-1] == "error" and self._code() == 0:
            stderr += b"the program ended before its tests did\n"
        starts = [0, *self._ends][: len(kinds)]
        printed = [_text(stdout[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]
        return {"runs": list(zip(kinds, printed, strict=True)), "stderr": _text(stderr)}

    def _kinds(self, broken_limit: Kind | None) -> list[Kind]:
        terms = self._terms
        num_ended = self._num_runs_ended()
        kinds: list[Kind] = ["ok"] * num_ended
        has_all = terms.is_apart and num_ended == terms.num_runs
        is_end_of_tests = terms.has_tests and self._deciding.code == 0 and not broken_limit
        if has_all or (is_end_of_tests and num_ended):
            return kinds
        last = broken_limit or _kind(self._code(), has_passed=not terms.has_tests)
        return [*kinds[: terms.num_runs - 1], last]

    def _code(self) -> int:
        """The exit code of the process that ended the job."""
        program = self._children[0]
        deciding = self._deciding
        if deciding.code in (PROGRAM_ENDED, 128 + signal.SIGKILL) and program.ended_by_itself:
            return program.code
        return 1 if deciding.code == PROGRAM_ENDED else deciding.code


def _kind(code: int, has_passed: bool) -> Kind:
    if code == 128 + signal.SIGXCPU:
        return "timeout"
    if code in (OUT_OF_MEMORY, 128 + signal.SIGKILL):  # the kernel kills when memory runs out
        return "memory"
    return "ok" if code == 0 and has_passed else "error"


def _text(printed: bytearray) -> str:
    return printed.decode(errors="replace")
