"""The small process that imports the rewards, forks workers, and kills those that fail.

It is started as a fresh interpreter, so that workers are forked from a process that has neither
threads nor a device. It alone keeps time: a call has its seconds and no more, however late the
process that asked looks at the answer.
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
from roll_lite.sandbox.processes import children, end_orphans, end_tree
from roll_lite.types import Reward
from roll_lite.workers.calls import Failure, Limits
from roll_lite.workers.loading import PackedRewards, unpack_rewards
from roll_lite.workers.worker import OUT_OF_MEMORY, SHOW_STACK, work_and_exit

_CHUNK = 1 << 16
_SHOWN = 4000
"""Characters of a worker's output that an error shows."""
_STACK_SECONDS, _STACK_PIECES = 0.1, 20
"""A worker that hangs may take so long to say where, line by line, and say so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message to the supervisor; it answers with a text: empty, or what went wrong."""

    rewards: PackedRewards
    num_workers: int
    limits: Limits


@dataclass(slots=True, eq=False)
class Worker:
    pid: int
    end: int
    """Becomes readable when the process ends."""
    calls: Connection
    output: int
    call_id: int | None = None
    start: float = 0.0
    printed: bytes = b""
    """The end of what it printed since the call began, and in `num_printed` how much that was."""
    num_printed: int = 0


class Supervisor:
    def __init__(self, client: Connection, rewards: Mapping[str, Reward], setup: Setup):
        self._client, self._rewards, self._limits = client, rewards, setup.limits
        self._elders = children()
        """What the rewards' modules have started when they were imported."""
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(client, selectors.EVENT_READ)
        for _ in range(setup.num_workers):
            self._add_worker()

    def serve(self) -> None:
        """Until the client says None, or has ended."""
        with suppress(EOFError, ConnectionError):
            while True:
                self._assign()
                ready = {key.fd for key, _ in self._selector.select(self._patience())}
                if self._client.fileno() in ready:
                    message = self._client.recv()
                    if message is None:
                        break
                    self._waiting.append(message)
                for worker in list(self._workers):
                    self._attend(worker, ready)
        for worker in self._workers:
            end_tree(worker.pid)
        end_orphans()

    def _assign(self) -> None:
        for worker in self._workers:
            if worker.call_id is None and self._waiting:
                worker.call_id, payload = self._waiting.popleft()
                worker.printed, worker.num_printed = b"", 0
                worker.start = time.monotonic()
                with suppress(ConnectionError):  # it has died: its end is about to be seen
                    worker.calls.send_bytes(payload)

    def _patience(self) -> float | None:
        """Seconds until a call has to be ended."""
        starts = [worker.start for worker in self._workers if worker.call_id is not None]
        if not starts:
            return None
        return max(0.0, min(starts) + self._limits.seconds - time.monotonic())

    def _attend(self, worker: Worker, ready: set[int]) -> None:
        """Take what the worker said, and end it where it must end."""
        if worker.output in ready:
            with suppress(OSError):  # what people print, they want to see, if anything is open
                os.write(2, self._read_output(worker))
        has_ended = worker.end in ready
        if worker.calls.fileno() in ready:
            has_ended = not self._take_result(worker)
        if worker.num_printed > self._limits.output_kib << 10:
            limit = f"output_kib={self._limits.output_kib}"
            self._replace(worker, Failure("crash", f"the reward printed more than {limit}"))
        elif has_ended:
            self._replace(worker, None)
        elif self._is_late(worker):
            self._replace(worker, self._timeout(worker))

    def _take_result(self, worker: Worker) -> bool:
        """False where the worker has closed its end."""
        try:
            result = worker.calls.recv_bytes()
        except (EOFError, ConnectionError):
            return False
        self._answer(worker, result)
        return True

    def _answer(self, worker: Worker, result: bytes) -> None:
        seconds = time.monotonic() - worker.start
        self._client.send((worker.call_id, seconds, result))
        worker.call_id = None

    def _is_late(self, worker: Worker) -> bool:
        lasts = time.monotonic() - worker.start
        return worker.call_id is not None and lasts >= self._limits.seconds

    def _timeout(self, worker: Worker) -> Failure:
        os.kill(worker.pid, SHOW_STACK)
        with selectors.DefaultSelector() as selector:
            selector.register(worker.output, selectors.EVENT_READ)
            for _ in range(_STACK_PIECES):
                if not selector.select(_STACK_SECONDS):
                    break
                self._read_output(worker)
        text = f"the reward took longer than seconds={self._limits.seconds}{_shown(worker)}"
        return Failure("timeout", text)

    def _read_output(self, worker: Worker) -> bytes:
        """All that the pipe holds."""
        try:
            chunk = os.read(worker.output, _CHUNK)
        except BlockingIOError:
            return b""
        worker.num_printed += len(chunk)
        worker.printed = (worker.printed + chunk)[-_SHOWN:]
        return chunk

    def _replace(self, worker: Worker, failure: Failure | None) -> None:
        """Without a failure given, the worker ended by itself."""
        code = end_tree(worker.pid)
        self._workers.remove(worker)
        end_orphans(known=self._elders | {other.pid for other in self._workers})
        if worker.call_id is not None:
            self._read_output(worker)
            self._answer(worker, pickle.dumps(failure or self._crash(worker, code)))
        for descriptor in (worker.end, worker.calls.fileno(), worker.output):
            self._selector.unregister(descriptor)
        os.close(worker.end)
        os.close(worker.output)
        worker.calls.close()
        self._add_worker()

    def _crash(self, worker: Worker, code: int) -> Failure:
        if code == OUT_OF_MEMORY:
            text = f"the reward needed more than memory_gib={self._limits.memory_gib}"
        elif code < 0:
            text = f"the reward's process was ended by signal {-code} ({signal.strsignal(-code)})"
        else:
            text = f"the reward's process ended itself with exit code {code}"
        return Failure("crash", text + _shown(worker))

    def _add_worker(self) -> None:
        ours, theirs = Pipe()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._leave(ours, reading)
            work_and_exit(theirs, writing, self._rewards, self._limits)
        theirs.close()
        os.close(writing)
        os.set_blocking(reading, False)
        worker = Worker(pid, os.pidfd_open(pid), ours, reading)
        for descriptor in (worker.end, worker.calls.fileno(), worker.output):
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._workers.append(worker)

    def _leave(self, ours: Connection, reading: int) -> None:
        """In a process just forked: it shall not hold the others' ends."""
        self._selector.close()
        self._client.close()
        ours.close()
        os.close(reading)
        for worker in self._workers:
            worker.calls.close()
            os.close(worker.output)
            os.close(worker.end)


def _shown(worker: Worker) -> str:
    text = worker.printed.decode(errors="replace").strip()
    return f"; it printed:\n{text}" if text else ""


def serve(descriptor: int) -> None:
    """The whole life of the process; `link.py` starts it."""
    client = Connection(descriptor)
    adopt_orphans()
    setup = client.recv()
    try:
        rewards = unpack_rewards(setup.rewards)
    except BaseException:  # of any kind: it ran the user's modules
        client.send(traceback.format_exc())
        sys.exit(1)
    supervisor = Supervisor(client, rewards, setup)
    client.send("")
    supervisor.serve()
