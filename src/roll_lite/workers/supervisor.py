"""The supervisor process: imports the rewards, forks workers, and kills those that fail.

It is started as a fresh interpreter, so that workers are forked from a process without threads and
without a device. It enforces the time limit itself, so a busy coordinator causes no timeouts.
"""

import os
import pickle
import selectors
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from roll_lite.sandbox.kernel import adopt_orphans
from roll_lite.sandbox.processes import children, kill_orphans, kill_tree
from roll_lite.types import Reward
from roll_lite.workers.failures import RewardFailure, user_frames
from roll_lite.workers.loading import unpack_rewards
from roll_lite.workers.worker import OUT_OF_MEMORY, SHOW_STACK, WorkerLimits, work_and_exit

_CHUNK = 1 << 16
_SHOWN = 4000
"""Bytes of a worker's output that an error shows."""
_STACK_SECONDS, _STACK_READS = 0.1, 20
"""How long to wait for each piece of a hanging worker's stack, and how many pieces to read."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """The supervisor's view of one worker."""

    pid: int
    pidfd: int
    """Readable when the process has ended."""
    calls: Connection
    output: int
    call_id: int | None = None
    start: float = 0.0
    printed: bytes = b""
    """The end of what the current call printed; `num_printed` counts all of it."""
    num_printed: int = 0

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.pidfd, self.calls.fileno(), self.output

    @property
    def output_text(self) -> str:
        """The end of its output, as an appendix to an error message."""
        text = user_frames(self.printed.decode(errors="replace")).strip()
        return f"; it printed:\n{text}" if text else ""

    def assign(self, call_id: int, payload: bytes) -> None:
        self.call_id, self.start = call_id, time.monotonic()
        self.printed, self.num_printed = b"", 0
        with suppress(ConnectionError):  # it has died, which its pidfd is about to report
            self.calls.send_bytes(payload)

    def read_output(self) -> bytes:
        """Whatever its pipe holds now."""
        try:
            chunk = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return b""
        self.num_printed += len(chunk)
        self.printed = (self.printed + chunk)[-_SHOWN:]
        return chunk

    def read_stack(self) -> None:
        """Make it print its stack, and read that."""
        os.kill(self.pid, SHOW_STACK)
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            for _ in range(_STACK_READS):
                if not selector.select(_STACK_SECONDS):
                    break
                self.read_output()

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.output)
        self.calls.close()


class Supervisor:
    def __init__(
        self,
        client: Connection,
        rewards: Mapping[str, Reward],
        num_workers: int,
        limits: WorkerLimits,
    ):
        self._client, self._rewards, self._limits = client, rewards, limits
        self._from_imports = children()
        """Processes that the rewards' modules started on import."""
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(client, selectors.EVENT_READ)
        for _ in range(num_workers):
            self._add_worker()

    def serve(self) -> None:
        """Until the client sends None or has ended."""
        with suppress(EOFError, ConnectionError):
            while True:
                self._assign()
                ready = {key.fd for key, _ in self._selector.select(self._seconds_left())}
                if self._client.fileno() in ready:
                    message = self._client.recv()
                    if message is None:
                        break
                    self._waiting.append(message)
                for worker in list(self._workers):
                    self._check(worker, ready)
        for worker in self._workers:
            kill_tree(worker.pid)
        kill_orphans()

    def _assign(self) -> None:
        for worker in self._workers:
            if worker.call_id is None and self._waiting:
                worker.assign(*self._waiting.popleft())

    def _seconds_left(self) -> float | None:
        """Until the next call reaches its time limit; None if no call is running."""
        starts = [worker.start for worker in self._workers if worker.call_id is not None]
        if not starts:
            return None
        return max(0.0, min(starts) + self._limits.seconds - time.monotonic())

    def _check(self, worker: WorkerProcess, ready: set[int]) -> None:
        """Read what the worker sent, and replace it if it ended or broke a limit."""
        if worker.output in ready:
            with suppress(OSError):  # show what rewards print, unless standard error is closed
                os.write(2, worker.read_output())
        has_ended = worker.pidfd in ready
        if worker.calls.fileno() in ready:
            has_ended = not self._take_result(worker)
        if worker.num_printed > self._limits.output_kib << 10:
            limit = f"output_kib={self._limits.output_kib}"
            self._replace(worker, RewardFailure("crash", f"the reward printed more than {limit}"))
        elif has_ended:
            self._replace(worker, None)
        elif self._is_late(worker):
            worker.read_stack()
            text = f"the reward took longer than seconds={self._limits.seconds}"
            self._replace(worker, RewardFailure("timeout", text + worker.output_text))

    def _take_result(self, worker: WorkerProcess) -> bool:
        """False if the worker has closed its connection."""
        try:
            result = worker.calls.recv_bytes()
        except (EOFError, ConnectionError):
            return False
        self._answer(worker, result)
        return True

    def _answer(self, worker: WorkerProcess, result: bytes) -> None:
        seconds = time.monotonic() - worker.start
        self._client.send((worker.call_id, seconds, result))
        worker.call_id = None

    def _is_late(self, worker: WorkerProcess) -> bool:
        elapsed = time.monotonic() - worker.start
        return worker.call_id is not None and elapsed >= self._limits.seconds

    def _replace(self, worker: WorkerProcess, failure: RewardFailure | None) -> None:
        """`failure` is None for a worker that ended by itself."""
        code = kill_tree(worker.pid)
        self._workers.remove(worker)
        kill_orphans(spared=self._from_imports | {other.pid for other in self._workers})
        if worker.call_id is not None:
            worker.read_output()
            self._answer(worker, pickle.dumps(failure or self._crash(worker, code)))
        for descriptor in worker.descriptors:
            self._selector.unregister(descriptor)
        worker.close()
        self._add_worker()

    def _crash(self, worker: WorkerProcess, code: int) -> RewardFailure:
        if code == OUT_OF_MEMORY:
            text = f"the reward needed more than memory_gib={self._limits.memory_gib}"
        elif code < 0:
            text = f"the reward's process was ended by signal {-code} ({signal.strsignal(-code)})"
        else:
            text = f"the reward's process ended itself with exit code {code}"
        return RewardFailure("crash", text + worker.output_text)

    def _add_worker(self) -> None:
        ours, theirs = Pipe()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._close_inherited(ours, reading)
            work_and_exit(theirs, writing, self._rewards, self._limits)
        theirs.close()
        os.close(writing)
        os.set_blocking(reading, False)
        worker = WorkerProcess(pid, os.pidfd_open(pid), ours, reading)
        for descriptor in worker.descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._workers.append(worker)

    def _close_inherited(self, ours: Connection, reading: int) -> None:
        """In a new worker: close the supervisor's ends of all connections."""
        self._selector.close()
        self._client.close()
        ours.close()
        os.close(reading)
        for worker in self._workers:
            worker.close()


def serve(descriptor: int) -> None:
    """Run the supervisor process, which `pool.SupervisorLink` starts.

    It answers the first message with a string: empty, or an import error.
    """
    # SIGTERM may reach all processes of a job. The run still needs its rewards then, and ends this
    # process by closing the connection. Not SIG_IGN, which programs of rewards would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    client = Connection(descriptor)
    adopt_orphans()
    packed, num_workers, limits = client.recv()
    try:
        rewards = unpack_rewards(packed)
    except BaseException:  # importing the user's modules may raise anything
        client.send(traceback.format_exc())
        sys.exit(1)
    supervisor = Supervisor(client, rewards, num_workers, limits)
    with suppress(OSError):  # the run has ended meanwhile
        client.send("")
        supervisor.serve()
