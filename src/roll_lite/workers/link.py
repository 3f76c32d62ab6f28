"""The coordinator's end: starts the supervisor, and brings answers to whoever waits for them."""

import itertools
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe

from roll_lite.types import Prompt, Score
from roll_lite.workers.calls import Failure
from roll_lite.workers.supervisor import Setup

Answer = tuple[float, Score | Failure]
"""Seconds that the call took, and its result."""

_CLOSE_SECONDS = 10.0
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from roll_lite.workers.supervisor import serve; serve({descriptor})"
)


class SupervisorLink:
    def __init__(self, setup: Setup):
        """Raises RuntimeError where the rewards cannot be imported over there."""
        self._supervisor, theirs = Pipe()
        path = [str(folder) or os.getcwd() for folder in sys.path]
        start = _START.format(path=path, descriptor=theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the coordinator, which then closes
            # Libraries start threads as they are imported, which a fork would leave behind.
            env=os.environ | dict.fromkeys(_ONE_THREAD, "1"),
        )
        theirs.close()
        self._supervisor.send(setup)
        self._check_imports()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._pending: dict[int, Future[Answer]] = {}
        self._reader = threading.Thread(target=self._read, name="reward answers", daemon=True)
        self._reader.start()

    def ask(self, prompt: Prompt, reply: str) -> "Future[Answer]":
        """From any thread."""
        future: Future[Answer] = Future()
        payload = pickle.dumps((prompt, reply))
        with self._lock:
            call_id = next(self._ids)
            self._pending[call_id] = future
            try:
                self._supervisor.send((call_id, payload))
            except OSError:  # nobody is there; the reader has answered the others
                self._settle(call_id, (0.0, self._lost()))
        return future

    def close(self) -> None:
        """End all workers; calls under way fail."""
        with self._lock, suppress(OSError):  # it may have ended before
            self._supervisor.send(None)
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._supervisor.close()

    def _check_imports(self) -> None:
        try:
            problem = self._supervisor.recv()
        except EOFError:
            problem = "their process has ended"
        if problem:
            self._supervisor.close()
            self._process.wait()
            raise RuntimeError(f"workers cannot import the rewards: {problem}")

    def _read(self) -> None:
        while True:
            try:
                call_id, seconds, result = self._supervisor.recv()
            except (EOFError, OSError):
                break
            self._settle(call_id, (seconds, pickle.loads(result)))
        with self._lock:
            for call_id in list(self._pending):
                self._settle(call_id, (0.0, self._lost()))

    def _settle(self, call_id: int, answer: Answer) -> None:
        future = self._pending.pop(call_id)
        if future.set_running_or_notify_cancel():  # else nobody waits any more
            future.set_result(answer)

    def _lost(self) -> Failure:
        return Failure("crash", "the process that holds the reward workers has ended")
