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
_TRIAL = Job(source="", inputs=[""], tests=[], seconds=_SETUP_SECONDS)


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
    trial = pickle.loads(_run(_TRIAL, place, client))
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
    """Runs one program: reads what it prints, and kills it at its limits."""

    def __init__(self, job: Job, place: Namespaces | ResourceLimits, client: Connection):
        self._job, self._place, self._client = job, place, client
        self._token = secrets.token_bytes(16)
        """Written by the harness when a run has ended well; no program can write it there."""
        self._printed: dict[int, bytearray] = {}
        """By the reading end of a pipe: stdout, stderr and, last, the notes of the harness."""
        self._start = self._run_start = time.monotonic()
        self._is_started, self._num_ended = False, 0

    def run(self) -> list[Outcome]:
        """Raises SandboxError if the program could not be started."""
        self._place.prepare(self._job.limits)
        reading, writing = zip(*(os.pipe() for _ in range(3)), strict=True)
        pid = os.fork()
        if pid == 0:
            self._become_program(*writing)
        for descriptor in writing:
            os.close(descriptor)
        self._printed = {descriptor: bytearray() for descriptor in reading}
        broken_limit = self._watch(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = exit_code(os.waitpid(pid, 0)[1])
        seconds = time.monotonic() - self._start
        self._place.clean()
        self._drain()
        return self._outcomes(code, broken_limit, seconds)

    def _become_program(self, stdout: int, stderr: int, note: int) -> NoReturn:
        try:
            for descriptor, target in ((stdout, 1), (stderr, 2)):
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
        notes = len(_STARTED) + 2 * len(self._token)  # a run also marks the end of what it printed
        most = self._job.num_runs * ((self._job.limits.output_kib << 10) + notes)
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
        """The time limits count from the moment at which the program's process is set up."""
        now, limits = time.monotonic(), self._job.limits
        if not self._is_started and [*self._printed.values()][-1]:
            self._start = self._run_start = now
            self._is_started = True
        if not self._is_started:
            return max(0.0, self._start + _SETUP_SECONDS - now)
        if self._num_runs_ended() > self._num_ended:
            self._run_start, self._num_ended = now, self._num_runs_ended()
        all_end = self._start + min(self._job.seconds, self._job.num_runs * limits.seconds)
        return max(0.0, min(all_end, self._run_start + limits.seconds) - now)

    def _num_runs_ended(self) -> int:
        """Runs that have ended well, by the notes of the harness."""
        tokens = [*self._printed.values()][-1].removeprefix(_STARTED)
        num_tokens = len(tokens) // len(self._token)
        return num_tokens if tokens == self._token * num_tokens else 0

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

    def _outcomes(self, code: int, broken_limit: Kind | None, seconds: float) -> list[Outcome]:
        """Of the runs that ended well, and, if there is one, of the run that ended the process."""
        stdout, stderr, note = self._printed.values()
        has_tests, num_ended = bool(self._job.tests), self._num_runs_ended()
        if not note.startswith(_STARTED):
            raise SandboxError(f"the program was not started: {_text(stderr)}")
        if code == CANNOT_CROSS and has_tests and self._job.tests_apart:
            raise SandboxError(f"{_text(stderr).strip()}; run such tests with tests_apart=False")
        kinds: list[Kind] = ["ok"] * num_ended
        if code or broken_limit or not (has_tests and num_ended):
            last = broken_limit or _kind(code, has_passed=not has_tests)
            kinds = [*kinds[: self._job.num_runs - 1], last]
        if has_tests and code == 0 and not (num_ended or broken_limit):
            stderr += b"the program ended before its tests did\n"
        printed = [*map(_text, stdout.split(self._token)), *[""] * len(kinds)]
        return [
            Outcome(kind=kind, stdout=text, stderr=_text(stderr), seconds=seconds)
            for kind, text in zip(kinds, printed, strict=False)
        ]


def _kind(code: int, has_passed: bool) -> Kind:
    if code == 128 + signal.SIGXCPU:
        return "timeout"
    if code in (OUT_OF_MEMORY, 128 + signal.SIGKILL):  # the kernel kills when memory runs out
        return "memory"
    return "ok" if code == 0 and has_passed else "error"


def _text(printed: bytearray) -> str:
    return printed.decode(errors="replace")
