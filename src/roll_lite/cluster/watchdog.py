"""Failure detection: lifelines, heartbeats and deadlines.

A *lifeline* is an RPC in each direction that is answered only when the program ends. If a process
dies, its connections close, and the RPC fails within milliseconds.

Each rank sends the controller a *heartbeat* every second, from a thread of its own, with the status
of its worker thread. A stopped process (SIGSTOP, a frozen container) keeps its connections but
sends no heartbeats. After HEARTBEAT_TIMEOUT the run fails, and torchrun kills the silent process.

A rank that sends heartbeats but has been in one call longer than its *deadline* is stuck: the run
fails, and the error shows the stacks of the ranks that have not answered.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch.futures import Future

from roll_lite.cluster import wire
from roll_lite.cluster.controller import DIED, Call, Controller
from roll_lite.cluster.errors import RoleError, name_ranks, summarise
from roll_lite.cluster.rendezvous import RENDEZVOUS_SECONDS
from roll_lite.cluster.worker import BACKGROUND, Worker, WorkerStatus

HEARTBEAT_SECONDS = 1.0
HEARTBEAT_TIMEOUT = 120.0  # long, because code that holds the GIL sends no heartbeats either
ANSWER_SECONDS = 4.0  # for the answer to a heartbeat, or for a stack
EXIT_SECONDS = 8.0  # for the recipe to leave its `with` block after a rank was lost


class Watchdog:
    """Runs on the controller and watches all other ranks."""

    def __init__(self, controller: Controller, worker: Worker, processes: Sequence[str]):
        self._controller = controller
        self._worker = worker
        self._processes = processes
        self._heartbeats = {rank: (time.monotonic(), None) for rank in range(1, len(processes))}
        self._stopping = threading.Event()
        self._parent = os.getppid()
        self._failed_at: float | None = None
        self._forming_since: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        for rank in self._heartbeats:
            lifeline = wire.send(rank, "lifeline")
            lifeline.add_done_callback(partial(self._on_lifeline, rank))
        self._thread.start()

    def groups_have_formed(self) -> None:
        self._forming_since = None

    def stop(self) -> None:
        """From here on ranks may exit."""
        self._stopping.set()

    def on_heartbeat(self, rank: int, status: WorkerStatus | None) -> None:
        self._heartbeats[rank] = time.monotonic(), status

    def _on_lifeline(self, rank: int, lifeline: Future) -> None:
        if not self._stopping.is_set():
            self._controller.lose(rank, DIED)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopping.wait(HEARTBEAT_SECONDS / 2):
            now = time.monotonic()
            if now - before > HEARTBEAT_TIMEOUT / 2:  # this process itself was stopped
                self._heartbeats = {r: (now, status) for r, (_, status) in self._heartbeats.items()}
            before = now
            if os.getppid() != self._parent:  # torchrun died, so nothing would end this process
                os.kill(os.getpid(), signal.SIGTERM)
            if self._controller.failure:
                self._force_exit(now)
            else:
                self._check_start(now)
                self._check_heartbeats(now)
                self._check_deadlines()

    def _force_exit(self, now: float) -> None:
        """The recipe may be in foreign code that neither the failure nor a signal interrupts."""
        self._failed_at = self._failed_at or now
        if now - self._failed_at > EXIT_SECONDS:
            print(f"RoleError: {self._controller.failure}", file=sys.stderr, flush=True)
            os._exit(1)

    def _check_start(self, now: float) -> None:
        if self._forming_since and now - self._forming_since > RENDEZVOUS_SECONDS:
            text = f"the process groups did not form within {RENDEZVOUS_SECONDS:.0f} s"
            self._controller.fail(RoleError(text, role="", method="", rank=0))

    def _check_heartbeats(self, now: float) -> None:
        for rank, (last, _) in self._heartbeats.items():
            if now - last > HEARTBEAT_TIMEOUT:
                self._controller.lose(rank, f"sent no heartbeat for {now - last:.0f} s")

    def _check_deadlines(self) -> None:
        statuses = {rank: status for rank, (_, status) in self._heartbeats.items()}
        statuses[self._worker.rank] = self._worker.status()
        for call in self._controller.pending():
            times = [_seconds_in(call, statuses.get(rank)) for rank in call.unanswered]
            if max(times, default=0.0) > call.deadline:
                self._controller.fail(self._deadline_error(call, max(times)))
                return

    def _deadline_error(self, call: Call, seconds: float) -> RoleError:
        """Names ranks outside of collectives first: ranks inside wait for them."""
        stacks = self._collect_stacks(call.unanswered)
        waiting = [rank for rank, stack in stacks.items() if "torch/distributed" in stack]
        stuck = [rank for rank in stacks if rank not in waiting] or waiting
        lines = [
            f"{call.label} is not done on {name_ranks(stuck)} after {seconds:.1f} s; "
            f"its deadline is {call.deadline:g} s"
        ]
        if waiting and waiting != stuck:
            lines.append(f"  waiting in a collective: {name_ranks(waiting)}")
        for rank in sorted(stacks, key=lambda rank: (rank not in stuck, rank)):
            lines += [f"--- rank {rank} ({self._processes[rank]}) is at ---", stacks[rank].rstrip()]
        return RoleError("\n".join(lines), role=call.role.name, method=call.method, rank=stuck[0])

    def _collect_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        own = self._worker.rank
        answers = {r: wire.send(r, "stack", timeout=ANSWER_SECONDS) for r in ranks if r != own}
        stacks = {own: self._worker.stack()} if own in ranks else {}
        for rank, answer in answers.items():
            try:
                stacks[rank] = answer.wait()
            except RuntimeError as error:
                stacks[rank] = f"(no stack: {summarise(error)})"
        return stacks


def _seconds_in(call: Call, status: WorkerStatus | None) -> float:
    """How long a rank has been in a call, or has delayed it by its own background work."""
    if status and status.ticket == call.ticket:
        return status.seconds
    if status and status.ticket == BACKGROUND:
        return min(status.seconds, time.monotonic() - call.issued)
    return 0.0


class Heartbeat:
    """Runs on every other rank: sends its heartbeats, and watches the controller and torchrun."""

    def __init__(self, worker: Worker, controller: str, on_lost: Callable[[int, str], None]):
        """`on_lost(exit_code, reason)` ends this rank; `controller` is the process of rank 0."""
        self._worker = worker
        self._controller = controller
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        wire.send(0, "lifeline").add_done_callback(self._on_lifeline)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _on_lifeline(self, lifeline: Future) -> None:
        if not self._stopping.is_set():
            self._on_lost(1, f"the controller (rank 0, {self._controller}) died")

    def _run(self) -> None:
        last_answer = time.monotonic()
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            try:
                self._send()
                last_answer = time.monotonic()
            except RuntimeError:  # a slow controller; if it died, the lifeline fails too
                self._check_controller(time.monotonic() - last_answer)
            if os.getppid() != self._parent:
                self._on_lost(1, "torchrun died")

    def _send(self) -> None:
        rank, status = self._worker.rank, self._worker.status()
        wire.send(0, "heartbeat", rank, status, timeout=ANSWER_SECONDS).wait()

    def _check_controller(self, silence: float) -> None:
        if silence > HEARTBEAT_TIMEOUT:
            who = f"the controller (rank 0, {self._controller})"
            self._on_lost(1, f"{who} did not answer a heartbeat for {silence:.0f} s")
