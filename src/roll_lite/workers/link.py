"""The coordinator's side of a supervisor process: starts it, and carries the messages of jobs.

The supervisor keeps the time of workers, and this side keeps the supervisor's: one that died or
does not answer is replaced, and its jobs are told, so that they can be asked again.
"""

import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

from roll_lite.processes import STOPPED, state_of
from roll_lite.workers.channel import NO_JOB, Ask, End, Order, read_message
from roll_lite.workers.failures import Failure
from roll_lite.workers.loading import Packed
from roll_lite.workers.state import WorkerOptions

Receiver = Callable[[float, Ask | End | Failure], None]
"""Called with a message of a job, after the seconds that a worker took for it."""
Setup = tuple[Packed, int, WorkerOptions]

_CLOSE_SECONDS = 10.0
_PING_SECONDS = 2.0
_MAX_SILENT = 30
"""A supervisor is killed that sends nothing while it is asked this often for a sign of life. This
is counted rather than timed: a coordinator that was suspended has not asked."""
_MAX_STOPPED = 4
"""And one that is found stopped (SIGSTOP) as often, because it does not go on by itself."""
_FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""Otherwise every thread of a worker maps 64 MiB, which count against its memory limit."""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from roll_lite.workers.supervisor import serve; serve({descriptor})"
)


class SupervisorLink:
    """Jobs for the workers of a supervisor process, which is started again if it ends."""

    def __init__(self, packed: Packed, num_workers: int, options: WorkerOptions):
        """Raises RuntimeError if the supervisor cannot import what the table refers to."""
        self._setup: Setup = packed, num_workers, options
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_replaced = self._num_told = 0
        self._supervisor = self._start_supervisor()

    def start(self, payload: bytes, receive: Receiver) -> int:
        """Begin a job, from any thread. Another thread calls `receive` with its messages, of which
        the last is a Failure if the job's worker or the supervisor died."""
        job_id = next(self._ids)
        self._supervisor.start(job_id, payload, receive)
        return job_id

    def send(self, job_id: int, payload: bytes | None) -> None:
        """A further message for a job; None cancels it. One that has ended does not get it."""
        self._supervisor.send(job_id, payload)

    @property
    def num_jobs(self) -> int:
        return self._supervisor.num_jobs

    def take_num_replaced(self) -> int:
        """Workers that were replaced since the last call of this method."""
        before = self._num_told
        self._num_told = self._num_replaced
        return self._num_told - before

    def close(self) -> None:
        """Running jobs fail."""
        with self._lock:
            self._is_closed = True
        self._supervisor.close()

    def _start_supervisor(self) -> "_Supervisor":
        return _Supervisor(self._setup, self._count_replaced, self._replace)

    def _count_replaced(self, num_workers: int) -> None:
        self._num_replaced += num_workers

    def _replace(self, ended: "_Supervisor") -> Failure:
        """The failure of the jobs of a supervisor that has ended."""
        _, num_workers, options = self._setup
        with self._lock:
            if self._is_closed:
                return Failure("crash", f"the {options.noun} workers were closed")
            text = f"the supervisor of the {options.noun} workers {ended.why}"
            note = "it is started again, and what its workers did is repeated"
            print(f"{text}; {note}", file=sys.stderr, flush=True)
            self._count_replaced(num_workers)
            try:
                self._supervisor = self._start_supervisor()
            except (RuntimeError, OSError) as error:
                text = f"{text}, and cannot be started again: {error}"
            return Failure("crash", text, "supervisor")


class _Supervisor:
    """A supervisor process, whose messages are matched to the jobs. Nothing here blocks its caller:
    one thread writes, one reads, and one asks for signs of life."""

    def __init__(
        self,
        setup: Setup,
        on_replaced: Callable[[int], None],
        on_end: Callable[["_Supervisor"], Failure],
    ):
        """`on_replaced` is told how many workers were replaced; `on_end` gives the failure of the
        jobs that the process leaves behind."""
        self._on_replaced = on_replaced
        self._on_end = on_end
        noun = setup[-1].noun
        self._connection, self._process = _start_process(setup)
        _check_imports(self._connection, self._process, noun)
        self._lock = threading.Lock()
        self._receivers: dict[int, Receiver] | None = {}
        """By job; None when the supervisor has ended."""
        self._failure = Failure("crash", f"the {noun} workers cannot be started", "supervisor")
        self._num_heard = 0
        self._is_silent = False
        self._has_ended = threading.Event()
        self._outgoing: SimpleQueue[Order | None] = SimpleQueue()
        self._reader, *self._others = [
            threading.Thread(target=target, name=f"{noun} workers", daemon=True)
            for target in (self._read, self._write, self._watch)
        ]
        for thread in (self._reader, *self._others):
            thread.start()

    def start(self, job_id: int, payload: bytes, receive: Receiver) -> None:
        with self._lock:
            if self._receivers is not None:
                self._receivers[job_id] = receive
                self._outgoing.put((job_id, True, payload))
                return
        receive(0.0, self._failure)

    def send(self, job_id: int, payload: bytes | None) -> None:
        self._outgoing.put((job_id, False, payload))

    @property
    def num_jobs(self) -> int:
        return len(self._receivers or ())

    @property
    def why(self) -> str:
        """What became of it."""
        return "did not answer and was killed" if self._is_silent else "has ended"

    def close(self) -> None:
        self._outgoing.put(None)
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()

    def _write(self) -> None:
        with suppress(OSError):  # the supervisor has ended, which the reader finds out too
            while True:
                messages = [self._outgoing.get() for _ in range(max(1, self._outgoing.qsize()))]
                self._connection.send_bytes(pickle.dumps(messages))  # faster than `send`
                if None in messages:
                    break

    def _read(self) -> None:
        """Until the supervisor ends. Whatever stops this, all jobs are told in the end."""
        try:
            with suppress(EOFError, OSError):
                while True:
                    for message in self._connection.recv():
                        self._deliver(*message)
                    self._num_heard += 1
        finally:
            self._end()

    def _deliver(self, job_id: int, has_ended: bool, seconds: float, sent: Any) -> None:
        if job_id == NO_JOB:
            self._on_replaced(sent)
            return
        with self._lock:
            receive = self._receivers[job_id]
            if has_ended:
                del self._receivers[job_id]
        receive(seconds, sent if isinstance(sent, Failure) else read_message(sent))

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._has_ended.set()
        self._outgoing.put(None)
        for thread in self._others:
            thread.join()
        self._connection.close()
        try:
            self._failure = self._on_end(self)
        finally:
            with self._lock:
                receivers = self._receivers
                self._receivers = None
            for receive in receivers.values():
                receive(0.0, self._failure)

    def _watch(self) -> None:
        """Kill a supervisor that hangs or was stopped: then the reader goes on."""
        num_silent = num_stopped = 0
        num_heard = -1
        while not self._has_ended.wait(_PING_SECONDS):
            num_silent = num_silent + 1 if num_heard == self._num_heard else 0
            num_heard = self._num_heard
            num_stopped = num_stopped + 1 if state_of(self._process.pid) == STOPPED else 0
            if num_silent == _MAX_SILENT or num_stopped == _MAX_STOPPED:
                self._is_silent = True
                self._process.kill()
                break
            self._outgoing.put((NO_JOB, False, None))


def _start_process(setup: Setup) -> tuple[Any, subprocess.Popen]:
    connection, theirs = Pipe()
    path = [str(folder) or os.getcwd() for folder in sys.path]
    start = _START.format(path=path, descriptor=theirs.fileno())
    process = subprocess.Popen(
        [sys.executable, "-c", start],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C interrupts only the coordinator, which then closes
        # Libraries start threads on import, and threads do not survive a fork.
        env=os.environ | dict.fromkeys(_ONE_THREAD, "1") | _FEW_ARENAS,
    )
    theirs.close()
    connection.send(setup)
    return connection, process


def _check_imports(connection: Any, process: subprocess.Popen, noun: str) -> None:
    """Imports may take as long as they like, but a process that was stopped does not go on."""
    num_stopped = 0
    while num_stopped < _MAX_STOPPED and not connection.poll(_PING_SECONDS):
        num_stopped = num_stopped + 1 if state_of(process.pid) == STOPPED else 0
    if was_stopped := num_stopped == _MAX_STOPPED:
        process.kill()
    try:
        problem = connection.recv()
    except EOFError:
        why = "was stopped (SIGSTOP) and has been killed" if was_stopped else "has ended"
        problem = f"the supervisor process {why}"
    if problem:
        connection.close()
        process.wait()
        raise RuntimeError(f"{noun} workers cannot import their code: {problem}")
