"""The supervisor process: imports the user's code, forks workers, and kills those that fail.

It is started as a fresh interpreter, so that workers are forked from a process without threads and
without a device. It enforces the time limit itself, so a busy coordinator causes no timeouts.
"""

import json
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
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from roll_lite import output
from roll_lite.checks import UserError
from roll_lite.processes import (
    adopt_orphans,
    children,
    kill_orphans,
    kill_tree,
    lacks_processor,
    state_of,
)
from roll_lite.rewards.registry import import_ahead
from roll_lite.workers.channel import (
    CONTINUES,
    LEAVES,
    NO_JOB,
    ProtocolError,
    SupervisorEnd,
    connect,
    is_verdict,
    read_message,
)
from roll_lite.workers.failures import Failure, user_frames
from roll_lite.workers.loading import unpack
from roll_lite.workers.state import OUT_OF_MEMORY, SHOW_STACK, Running, WorkerOptions
from roll_lite.workers.worker import work_and_exit

_CHUNK = 1 << 16
_SHOWN = 4000
"""Bytes of a worker's output that an error shows."""
_STACK_SECONDS = (2.0, *[0.1] * 19)
"""How long to wait for each piece of a hanging worker's stack."""
_STARVED = 10
"""Code that waits for a processor may take this many times as long as its time limit."""
_RECHECK_SECONDS = 0.05


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """The supervisor's view of one worker."""

    pid: int
    pidfd: int
    """Readable when the process has ended."""
    channel: SupervisorEnd
    output: int
    running: Running
    jobs: dict[int, float] = field(default_factory=dict)
    """When each of its jobs had its last order."""
    printed: bytes = b""
    """The end of what was printed since the code began that `printing` names; `num_printed` counts
    all of it."""
    num_printed: int = 0
    printing: tuple[int, float] = (-1, 0.0)
    is_behind: bool = False
    """Whether messages wait until it reads."""
    is_leaving: bool = False
    """Whether it has asked to be replaced."""
    silent_since: float | None = None
    """When it was first seen to run nothing although it must, if it has not sent anything since."""

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.pidfd, self.channel.fileno(), self.output

    @property
    def output_text(self) -> str:
        """The end of its output, as an appendix to an error message."""
        text = user_frames(self.printed.decode(errors="replace")).strip()
        return f"; it printed:\n{text}" if text else ""

    def post(self, job_id: int, begins: bool, payload: bytes | None) -> None:
        self.jobs[job_id] = time.monotonic()
        if begins:
            self.silent_since = None
        with suppress(ConnectionError):  # it has died, which its pidfd is about to report
            self.channel.post((job_id, begins, payload))

    def read_output(self) -> bytes:
        """What its pipe holds now."""
        try:
            chunk = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return b""
        current = self.running.read()
        if current[0] >= 0 and current != self.printing:
            self.printing = current
            self.printed = b""
            self.num_printed = 0
        self.num_printed += len(chunk)
        self.printed = (self.printed + chunk)[-_SHOWN:]
        return chunk

    def read_stack(self) -> None:
        """Make it print its stack, and read that."""
        os.kill(self.pid, SHOW_STACK)
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            for seconds in _STACK_SECONDS:
                if not selector.select(seconds):
                    break
                self.read_output()

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.output)
        self.channel.close()
        self.running.close()


class Supervisor:
    """The client sends lists of orders, and gets lists of messages (job id, whether it has ended,
    seconds that the worker had the job since the last order for it, the fields of the worker's
    message or a Failure)."""

    def __init__(
        self,
        client: Connection,
        table: Mapping[str, Any],
        num_workers: int,
        options: WorkerOptions,
    ):
        self._client = client
        self._table = table
        self._options = options
        self._from_imports = children()
        """Processes that the user's modules started on import."""
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(client, selectors.EVENT_READ)
        self._next_check = 0.0
        """No code reaches the time limit before."""
        self._outgoing: list[tuple[int, bool, float, Any]] = []
        self._shown: set[str] = set()
        """What workers did that is no job's failure."""
        for _ in range(num_workers):
            self._add_worker()

    def serve(self) -> None:
        """Until the client sends None or has ended."""
        with suppress(EOFError, ConnectionError):
            while True:
                ready = {key.fd: mask for key, mask in self._selector.select(self._seconds_left())}
                if self._client.fileno() in ready:
                    messages = self._client.recv()
                    if None in messages:
                        break
                    for message in messages:
                        self._take_order(*message)
                for worker in list(self._workers):
                    self._check(worker, ready)
                if time.monotonic() >= self._next_check:
                    self._check_time()
                self._assign()  # first: workers run meanwhile
                self._send()
        for worker in self._workers:
            kill_tree(worker.pid)
        kill_orphans()

    def _send(self) -> None:
        if self._outgoing:
            self._client.send_bytes(pickle.dumps(self._outgoing))  # faster than `send`
            self._outgoing = []

    def _note(self, num_replaced: int) -> None:
        self._outgoing.append((NO_JOB, False, 0.0, num_replaced))

    def _take_order(self, job_id: int, begins: bool, payload: bytes | None) -> None:
        if job_id == NO_JOB:
            self._note(0)
            return
        if begins:
            self._waiting.append((job_id, payload))
            self._assign()  # at once, for messages that follow this one
            return
        if payload is None and (waiting := [job for job in self._waiting if job[0] == job_id]):
            self._waiting.remove(waiting[0])
            cancelled = Failure("crash", f"{self._it} was cancelled")
            self._outgoing.append((job_id, True, 0.0, cancelled))
            return
        for worker in self._workers:  # none has the job if it ended meanwhile
            if job_id in worker.jobs:
                worker.post(job_id, False, payload)
                self._watch_writing(worker)

    def _assign(self) -> None:
        """Give waiting jobs to the workers that have the fewest."""
        most = self._options.jobs_per_worker
        while self._waiting:
            worker = min(self._workers, key=lambda worker: len(worker.jobs))
            if most is not None and len(worker.jobs) >= most:
                break
            job_id, payload = self._waiting.popleft()
            worker.post(job_id, True, payload)
            self._watch_writing(worker)

    def _watch_writing(self, worker: WorkerProcess) -> None:
        """Be woken when a worker can take the rest of its messages."""
        if worker.is_behind == worker.channel.is_flushed:
            worker.is_behind = not worker.is_behind
            reads = selectors.EVENT_READ
            writes = selectors.EVENT_WRITE
            self._selector.modify(worker.channel, reads | writes if worker.is_behind else reads)

    def _seconds_left(self) -> float | None:
        """Until the time limit must be checked; None if no worker has a job."""
        if not any(worker.jobs for worker in self._workers):
            return None
        return max(0.0, self._next_check - time.monotonic())

    def _check_time(self) -> None:
        """Replace workers whose code runs for too long, and those that neither run nor answer."""
        for worker in list(self._workers):
            if late := self._late(worker):
                self._replace(worker, late)
            elif self._is_silent(worker):
                limit = self._options.seconds_option
                self._replace_for(worker, f"did nothing for {limit}, with work left")
        now = time.monotonic()
        running = [worker.running.read() for worker in self._workers]
        starts = [start if job_id >= 0 else now for job_id, start, _ in running]
        self._next_check = max(min(starts) + self._options.seconds, now + _RECHECK_SECONDS)

    def _check(self, worker: WorkerProcess, ready: Mapping[int, int]) -> None:
        """Read what the worker sent, and replace it if it ended or broke a limit."""
        if worker.output in ready:
            with suppress(OSError):  # show what user code prints, unless standard error is closed
                os.write(2, worker.read_output())
        has_ended = worker.pidfd in ready
        events = ready.get(worker.channel.fileno(), 0)
        if events & selectors.EVENT_WRITE:
            with suppress(ConnectionError):
                worker.channel.flush()
            self._watch_writing(worker)
        if events & selectors.EVENT_READ:
            try:
                has_ended |= not self._take_messages(worker)
            except ProtocolError as error:
                self._replace_for(worker, str(error))
                return
        if worker.num_printed > self._options.output_kib << 10:
            text = f"{self._it} printed more than output_kib={self._options.output_kib}"
            self._replace(worker, Failure("crash", text))
        elif has_ended or worker.is_leaving:
            self._replace(worker, None)

    @property
    def _it(self) -> str:
        return f"the {self._options.noun}"

    def _take_messages(self, worker: WorkerProcess) -> bool:
        """False if the worker has closed its connection."""
        is_open = worker.channel.read()
        for job_id, state, payload in worker.channel.messages():
            if job_id not in worker.jobs:
                raise ProtocolError("answered twice, or without being asked")
            self._answer(worker, job_id, state != CONTINUES, self._checked(payload))
            worker.is_leaving |= state == LEAVES
        if worker.channel.has_part and not worker.jobs:
            raise ProtocolError("sent something without being asked")
        return is_open

    def _checked(self, payload: bytes) -> Any:
        """The fields of a message that the client can read. They are data: a message as an object
        would take longer to send."""
        try:
            fields = json.loads(payload.decode())
            message = read_message(fields)
            if self._options.jobs_per_worker == 1 and not is_verdict(message):
                raise UserError
        except Exception:  # user code may have sent anything
            raise ProtocolError("sent a message that cannot be read") from None
        return fields

    def _answer(self, worker: WorkerProcess, job_id: int, has_ended: bool, message: Any) -> None:
        seconds = time.monotonic() - worker.jobs[job_id]
        worker.silent_since = None
        if has_ended:
            del worker.jobs[job_id]
        self._outgoing.append((job_id, has_ended, seconds, message))

    def _is_silent(self, worker: WorkerProcess) -> bool:
        """Whether a worker that must run a job's code, or finish a message, has done neither for as
        long as the time limit. One that was stopped must do so too: episodes may wait for it."""
        one_by_one = self._options.jobs_per_worker == 1
        must = worker.jobs and (
            one_by_one or worker.channel.has_part or state_of(worker.pid) == "T"
        )
        if not must or worker.running.read()[0] >= 0:
            worker.silent_since = None
            return False
        if worker.silent_since is None:
            worker.silent_since = time.monotonic()
        seconds = time.monotonic() - worker.silent_since
        most = self._options.seconds
        is_starved = state_of(worker.pid) == "R" and seconds < _STARVED * most
        return seconds >= most and not is_starved

    def _late(self, worker: WorkerProcess) -> Failure | None:
        """The timeout of code that reached the time limit. Its stack is read and the worker stopped
        then."""
        late = job_id, start, used = worker.running.read()
        seconds = time.monotonic() - start
        most = self._options.seconds
        if job_id < 0 or seconds < most:
            return None
        is_starved = lacks_processor(worker.pid, used + most)
        if is_starved and seconds < _STARVED * most:
            return None
        worker.read_stack()
        os.kill(worker.pid, signal.SIGSTOP)
        if worker.running.read() != late:
            os.kill(worker.pid, signal.SIGCONT)  # it returned at the last moment
            return None
        lacked = "had to wait for a processor"
        why = lacked if is_starved else "did not lack a processor, so it is not tried again"
        text = f"{self._options.took_longer}; its process {why}{worker.output_text}"
        return Failure("timeout", text, is_final=not is_starved)

    def _replace_for(self, worker: WorkerProcess, deed: str) -> None:
        """Replace a worker for what is not known to be the fault of a job that it has."""
        if deed not in self._shown:
            self._shown.add(deed)
            note = f"a {self._options.noun} worker {deed}; it was replaced (shown once, and counted"
            with suppress(OSError):
                os.write(2, f"{note} in {self._options.prefix}/replaced)\n".encode())
        self._replace(worker, Failure("crash", f"{self._it}'s process {deed}", "unknown"))

    def _replace(self, worker: WorkerProcess, failure: Failure | None) -> None:
        """`failure` is None for a worker that ended by itself."""
        code = kill_tree(worker.pid)
        self._workers.remove(worker)
        kill_orphans(spared=self._from_imports | {other.pid for other in self._workers})
        worker.channel.stop()
        with suppress(ProtocolError):
            while self._take_messages(worker):  # what it had sent before
                continue
        worker.read_output()
        self._note(1)
        was_killed = failure is None and code == -signal.SIGKILL
        self._fail_jobs(worker, failure or self._crash(worker, code), was_killed)
        for descriptor in worker.descriptors:
            self._selector.unregister(descriptor)
        worker.close()
        self._add_worker()
        self._send()  # now: to replace many takes long, and the client waits for signs of life

    def _fail_jobs(self, worker: WorkerProcess, failure: Failure, was_killed: bool) -> None:
        """All jobs of a worker that died; the one whose code was running is to blame, unless it is
        known that this need not be so, or the worker was killed from outside: by an operator, or by
        the kernel because the machine's memory was used up."""
        running, *_ = worker.running.read()
        for job_id in list(worker.jobs):
            others = "other" if running >= 0 else "unknown"
            runner = "unknown" if was_killed else "this"
            culprit = runner if job_id == running else others
            if failure.culprit == "unknown":
                culprit = "unknown"
            self._answer(worker, job_id, True, replace(failure, culprit=culprit))

    def _crash(self, worker: WorkerProcess, code: int) -> Failure:
        if code == OUT_OF_MEMORY:
            text = f"{self._it} needed more than memory_gib={self._options.memory_gib}"
        elif code < 0:
            text = f"{self._it}'s process was ended by signal {-code} ({signal.strsignal(-code)})"
        else:
            text = f"{self._it}'s process ended itself with exit code {code}"
        return Failure("crash", text + worker.output_text)

    def _add_worker(self) -> None:
        ours, theirs = connect()
        reading, writing = os.pipe()
        running = Running()
        pid = os.fork()
        if pid == 0:
            self._close_inherited(ours, reading)
            work_and_exit(theirs, writing, self._table, self._options, running)
        theirs.close()
        os.close(writing)
        os.set_blocking(reading, False)
        worker = WorkerProcess(pid, os.pidfd_open(pid), ours, reading, running)
        for descriptor in worker.descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._workers.append(worker)

    def _close_inherited(self, ours: SupervisorEnd, reading: int) -> None:
        """In a new worker: close the supervisor's ends of all connections."""
        self._selector.close()
        self._client.close()
        ours.close()
        os.close(reading)
        for worker in self._workers:
            worker.close()


def serve(descriptor: int) -> None:
    """Run the supervisor process, which `link.SupervisorLink` starts.

    It answers the first message with a string: empty, or an import error.
    """
    # SIGTERM may reach all processes of a job. The run still needs its workers then, and ends this
    # process by closing the connection. Not SIG_IGN, which programs of rewards would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    output.protect()
    client = Connection(descriptor)
    adopt_orphans()
    packed, num_workers, options = client.recv()
    try:
        table = unpack(packed)
    except BaseException:  # importing the user's modules may raise anything
        client.send(traceback.format_exc())
        sys.exit(1)
    with suppress(OSError):  # the run has ended meanwhile
        client.send("")
        import_ahead(table.values())  # while the run starts
        Supervisor(client, table, num_workers, options).serve()
