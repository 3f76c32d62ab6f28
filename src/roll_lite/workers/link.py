"""The coordinator's side of a supervisor process: starts it, and carries the messages of jobs."""

import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

from roll_lite.workers.failures import Failure, describe
from roll_lite.workers.loading import pack
from roll_lite.workers.worker import Work, WorkerLimits

Receiver = Callable[[float, Any], None]
"""Called with the seconds since a job was assigned to a worker, and with a message of the job."""

_CLOSE_SECONDS = 10.0
_FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""Otherwise every thread of a worker maps 64 MiB, which count against its memory limit."""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from roll_lite.workers.supervisor import serve; serve({descriptor})"
)


class SupervisorLink:
    """Starts the supervisor process, and matches its messages to the jobs. Nothing here blocks its
    caller: a thread writes, and another one reads."""

    def __init__(
        self, work: Work, table: Mapping[str, Any], num_workers: int, limits: WorkerLimits
    ):
        """Raises RuntimeError if the supervisor cannot import what the table refers to."""
        self._words = work.words
        setup = work, pack(table, work.words), num_workers, limits
        self._connection, theirs = Pipe()
        path = [str(folder) or os.getcwd() for folder in sys.path]
        start = _START.format(path=path, descriptor=theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C interrupts only the coordinator, which then closes
            # Libraries start threads on import, and threads do not survive a fork.
            env=os.environ | dict.fromkeys(_ONE_THREAD, "1") | _FEW_ARENAS,
        )
        theirs.close()
        self._connection.send(setup)
        self._check_imports()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._receivers: dict[int, Receiver] | None = {}
        """By job; None when the supervisor has ended."""
        self._outgoing: SimpleQueue[tuple[int, bool, bytes | None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"{work.words.one} workers", daemon=True)
            for target in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, payload: bytes, receive: Receiver) -> int:
        """Begin a job, from any thread. Another thread calls `receive` with its messages, of which
        the last is a Failure if the job's worker died."""
        with self._lock:
            job_id = next(self._ids)
            if self._receivers is not None:
                self._receivers[job_id] = receive
                self._outgoing.put((job_id, True, payload))
                return job_id
        receive(0.0, self._failure)
        return job_id

    def send(self, job_id: int, payload: bytes | None) -> None:
        """A further message for a job; None cancels it. One that has ended does not get it."""
        self._outgoing.put((job_id, False, payload))

    def close(self) -> None:
        self._outgoing.put(None)
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _check_imports(self) -> None:
        try:
            problem = self._connection.recv()
        except EOFError:
            problem = "the supervisor process has ended"
        if problem:
            self._connection.close()
            self._process.wait()
            raise RuntimeError(f"workers cannot import the {self._words.table}: {problem}")

    def _write(self) -> None:
        with suppress(OSError):  # the supervisor has ended, which the reader finds out too
            while True:
                messages = [self._outgoing.get() for _ in range(max(1, self._outgoing.qsize()))]
                self._connection.send(messages)
                if None in messages:
                    break

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                job_id, has_ended, seconds, payload = self._connection.recv()
                with self._lock:
                    receive = self._receivers[job_id]
                    if has_ended:
                        del self._receivers[job_id]
                receive(seconds, _loaded(payload))
        with self._lock:
            receivers, self._receivers = self._receivers, None
        for receive in receivers.values():
            receive(0.0, self._failure)

    @property
    def _failure(self) -> Failure:
        return Failure("crash", f"the supervisor of the {self._words.one} workers has ended")


def _loaded(payload: bytes) -> Any:
    """A message of a worker; a Failure if this process cannot read it."""
    try:
        return pickle.loads(payload)
    except Exception as error:  # user code may send anything
        return describe(error)
