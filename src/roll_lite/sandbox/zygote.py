"""The zygote, which forks a monitor for each program, and the monitor, which runs and watches it.

The zygote is a fresh interpreter that `Sandbox` starts with an empty environment. It has imported
the modules that programs often use.
"""

import os
import pickle
import resource
import secrets
import selectors
import signal
import time
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import NoReturn

from roll_lite.sandbox.harness import CANNOT_CROSS, OUT_OF_MEMORY, run_and_exit
from roll_lite.sandbox.isolation import Namespaces, ResourceLimits
from roll_lite.sandbox.processes import exit_code
from roll_lite.sandbox.sandbox import Job, Kind, Outcome, SandboxError

PRELOADED = (
    "array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "enum", "fractions",
    "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "queue",
    "random", "re", "statistics", "string", "struct", "textwrap", "typing",
)  # fmt: skip
_STARTED = b"+"
_SETUP_SECONDS = 30.0
_CHUNK = 1 << 16
_MAX_DESCRIPTORS = 256


def serve(descriptor: int, isolation: str) -> None:
    """Run jobs one after another. The first answer says why the isolation fails, or nothing."""
    client = Connection(os.dup(descriptor))  # a low number, so that programs close it
    os.close(descriptor)
    for name in PRELOADED:
        import_module(name)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_DESCRIPTORS, _MAX_DESCRIPTORS))
    try:
        place = Namespaces() if isolation == "full" else ResourceLimits()
    except (OSError, AttributeError) as error:  # AttributeError: a C library without the function
        client.send(str(error))
        return
    trial = pickle.loads(_run(Job(source=""), place, client))
    client.send(trial.strip().splitlines()[-1] if isinstance(trial, str) else "")
    with suppress(EOFError, ConnectionError):  # the client has closed or ended
        while True:
            client.send_bytes(_run(client.recv(), place, client))


def _run(job: Job, place: Namespaces | ResourceLimits, client: Connection) -> bytes:
    """Run a job in a forked monitor, because the monitor enters namespaces; a pickled answer."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _monitor_and_exit(job, place, client, writing)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    status = os.waitpid(pid, 0)[1]
    return answer or pickle.dumps(f"the monitor of a program ended with {status}")


def _monitor_and_exit(
    job: Job, place: Namespaces | ResourceLimits, client: Connection, answers: int
) -> NoReturn:
    try:
        answer = Monitor(job, place, client).run()
    except BaseException:  # the process ends here, so report anything
        answer = traceback.format_exc()
    with open(answers, "wb") as file:
        pickle.dump(answer, file)
    os._exit(0)


class Monitor:
    """Runs one program: feeds it, reads what it prints, and kills it at its limits."""

    def __init__(self, job: Job, place: Namespaces | ResourceLimits, client: Connection):
        self._job, self._place, self._client = job, place, client
        self._token = secrets.token_bytes(16)
        """Written by the tests when they have run to their end; no program can know it."""
        self._printed: dict[int, bytearray] = {}
        """By the reading end of a pipe: stdout, stderr and, last, the notes of the harness."""
        self._start, self._is_started = time.monotonic(), False

    def run(self) -> Outcome:
        """Raises SandboxError if the program could not be started."""
        self._place.prepare(self._job.limits)
        stdin = os.memfd_create("stdin")
        with open(stdin, "wb", closefd=False) as file:
            file.write(self._job.stdin.encode(errors="surrogatepass"))
        os.lseek(stdin, 0, os.SEEK_SET)
        reading, writing = zip(*(os.pipe() for _ in range(3)), strict=True)
        pid = os.fork()
        if pid == 0:
            self._become_program(stdin, *writing)
        for descriptor in (stdin, *writing):
            os.close(descriptor)
        self._printed = {descriptor: bytearray() for descriptor in reading}
        broken_limit = self._watch(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = exit_code(os.waitpid(pid, 0)[1])
        seconds = time.monotonic() - self._start
        self._place.clean()
        self._drain()
        return self._outcome(code, broken_limit, seconds)

    def _become_program(self, stdin: int, stdout: int, stderr: int, note: int) -> NoReturn:
        try:
            for descriptor, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
                os.dup2(descriptor, target)
            self._place.enter(self._job.limits)
            os.closerange(3, note)
            os.closerange(note + 1, _MAX_DESCRIPTORS)
            os.write(note, _STARTED)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1].name
            os.write(2, f"{type(error).__name__} in {where}: {error}".encode())
            os._exit(1)
        run_and_exit(self._job, note, self._token)

    def _watch(self, pid: int) -> Kind | None:
        """Until the program ends, the client ends, or a limit is broken, which is returned."""
        end = os.pidfd_open(pid)
        most = (self._job.limits.output_kib << 10) + len(_STARTED + self._token)
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._printed, end, self._client.fileno()):
                selector.register(descriptor, selectors.EVENT_READ)
            while ready := selector.select(self._seconds_left()):
                descriptors = {key.fd for key, _ in ready}
                for descriptor in descriptors & self._printed.keys():
                    if not self._read(descriptor):
                        selector.unregister(descriptor)
                if sum(map(len, self._printed.values())) > most:
                    return "output"
                if descriptors & {end, self._client.fileno()}:
                    return None
        return "timeout"

    def _seconds_left(self) -> float:
        """The time limit counts from the moment at which the program's process is set up."""
        if not self._is_started and [*self._printed.values()][-1]:
            self._start, self._is_started = time.monotonic(), True
        allowed = self._job.limits.seconds if self._is_started else _SETUP_SECONDS
        return max(0.0, self._start + allowed - time.monotonic())

    def _read(self, descriptor: int) -> bool:
        chunk = os.read(descriptor, _CHUNK)
        self._printed[descriptor] += chunk
        return bool(chunk)

    def _drain(self) -> None:
        """Read what is left in the pipes, after all their writers have ended."""
        for descriptor in self._printed:
            os.set_blocking(descriptor, False)
            with suppress(BlockingIOError):
                while self._read(descriptor):
                    pass

    def _outcome(self, code: int, broken_limit: Kind | None, seconds: float) -> Outcome:
        stdout, stderr, note = self._printed.values()
        if not note.startswith(_STARTED):
            raise SandboxError(f"the program was not started: {_text(stderr)}")
        if code == CANNOT_CROSS and self._job.tests and self._job.tests_apart:
            raise SandboxError(f"{_text(stderr).strip()}; run such tests with tests_apart=False")
        has_passed = not self._job.tests or note == _STARTED + self._token
        if broken_limit is None and code == 0 and not has_passed:
            stderr += b"the program ended before its tests did\n"
        return Outcome(
            kind=broken_limit or _kind(code, has_passed),
            stdout=_text(stdout),
            stderr=_text(stderr),
            seconds=seconds,
        )


def _kind(code: int, has_passed: bool) -> Kind:
    if code == 128 + signal.SIGXCPU:
        return "timeout"
    if code in (OUT_OF_MEMORY, 128 + signal.SIGKILL):  # the kernel kills when memory runs out
        return "memory"
    return "ok" if code == 0 and has_passed else "error"


def _text(printed: bytearray) -> str:
    return printed.decode(errors="replace")
