"""Failure detection: lifelines, heartbeats and deadlines.

A *lifeline* is an RPC in each direction that is answered only when the program ends. If a process
dies, its connections close, and the RPC fails within milliseconds.

Each rank sends the controller a *heartbeat* every second, from a thread of its own, with the status
of its worker thread. A stopped process (SIGSTOP, a frozen container) keeps its connections but
sends no heartbeats. On the controller's host the kernel tells that it is stopped, and the run fails
soon; otherwise after HEARTBEAT_TIMEOUT. The process is killed: by the controller, or by torchrun.

A rank that sends heartbeats but has been in one call, or in one piece of an object's `work`, longer
than the *deadline* is stuck: the run fails, and the error shows the stacks of the ranks that have
not answered.
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
from roll_lite.cluster.rank_monitor import RankMonitor
from roll_lite.cluster.rank_worker import BACKGROUND, Worker, WorkerStatus
from roll_lite.cluster.rendezvous import RENDEZVOUS_SECONDS
from roll_lite.processes import STOPPED_SECONDS, Process

HEARTBEAT_SECONDS = 1.0
HEARTBEAT_TIMEOUT = 120.0  # long, because code that holds the GIL sends no heartbeats either
SLOW_SECONDS = 10.0  # after all other ranks have answered
ANSWER_SECONDS = 4.0  # for the answer to a heartbeat, or for a stack
STOPPED = "was stopped (SIGSTOP) and is killed"
EXIT_SECONDS = 8.0  # for the recipe to leave its `with` block after a rank was lost


class Watchdog:
    """Runs on the controller and watches all other ranks."""

    def __init__(
        self,
        controller: Controller,
        worker: Worker,
        processes: Sequence[Process],
        deadline: float,
    ):
        """`deadline` is that of a piece of `work`, which no call waits for."""
        self._deadline = deadline
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
        self._thread.start()

    def hold_lifelines(self) -> None:
        for rank in self._heartbeats:
            lifeline = wire.send(rank, "lifeline")
            lifeline.add_done_callback(partial(self._on_lifeline, rank))

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
                self._name_slow_ranks(now)

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
            if rank in self._controller.lost:
                continue
            process = self._processes[rank]
            is_stopped = now - last > STOPPED_SECONDS and process.is_stopped
            if is_stopped or now - last > HEARTBEAT_TIMEOUT:
                silence = f"sent no heartbeat for {now - last:.0f} s"
                self._controller.lose(rank, STOPPED if is_stopped else silence)
                process.kill()  # neither can end by itself

    def _check_deadlines(self) -> None:
        statuses = {rank: status for rank, (_, status) in self._heartbeats.items()}
        statuses[self._worker.rank] = self._worker.status()
        for call in self._controller.pending():
            unanswered = call.unanswered  # a reply may come meanwhile
            times = [_seconds_in(call, statuses.get(rank)) for rank in unanswered]
            if max(times, default=0.0) > call.deadline:
                what = f"{call.label} is not done on {{}} after {max(times):.1f} s"
                self._fail(unanswered, what, call.deadline, call.role.name, call.method)
                return
        working = {r: s.seconds for r, s in statuses.items() if s and s.ticket == BACKGROUND}
        if late := [rank for rank, seconds in working.items() if seconds > self._deadline]:
            what = f"the work of {{}} takes {max(working.values()):.1f} s"
            self._fail(late, what, self._deadline, "", "work")

    def _name_slow_ranks(self, now: float) -> None:
        """Print, once for each call, the one rank that has not answered.

        Ranks that wait for it in a collective have not answered either: then nothing is printed.
        """
        for call in self._controller.pending():
            unanswered = call.unanswered
            seconds = now - call.last_reply
            is_last = len(unanswered) == 1 and len(call.ranks) > 1
            if is_last and seconds > SLOW_SECONDS and not call.is_slow:
                call.is_slow = True
                rank = unanswered[0]
                who = f"rank {rank} ({self._processes[rank]})"
                text = f"{call.label}: {who} is slow; all other ranks answered {seconds:.0f} s ago"
                print(text, file=sys.stderr, flush=True)

    def _fail(
        self, ranks: Sequence[int], what: str, deadline: float, role: str, method: str
    ) -> None:
        """End the run because of ranks that are stuck.

        Ranks outside of collectives are named first: ranks inside wait for them.
        """
        stacks = self._collect_stacks(ranks)
        waiting = [rank for rank, stack in stacks.items() if "torch/distributed" in stack]
        stuck = [rank for rank in stacks if rank not in waiting] or waiting
        lines = [f"{what.format(name_ranks(stuck))}; its deadline is {deadline:g} s"]
        if waiting and waiting != stuck:
            lines.append(f"  waiting in a collective: {name_ranks(waiting)}")
        for rank in sorted(stacks, key=lambda rank: (rank not in stuck, rank)):
            lines += [f"--- rank {rank} ({self._processes[rank]}) is at ---", stacks[rank].rstrip()]
        error = RoleError("\n".join(lines), role=role, method=method, rank=stuck[0])
        self._controller.fail(error)

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

    def __init__(
        self,
        worker: Worker,
        controller: Process,
        on_lost: Callable[[str], None],
        monitor: RankMonitor | None = None,
    ):
        """`on_lost(reason)` ends this rank; `controller` is the process of rank 0."""
        self._monitor = monitor
        self._worker = worker
        self._controller = controller
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self._is_connected = False
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hold_lifeline(self) -> None:
        wire.send(0, "lifeline").add_done_callback(self._on_lifeline)
        self._is_connected = True

    def stop(self) -> None:
        self._stopping.set()

    def _on_lifeline(self, lifeline: Future) -> None:
        if not self._stopping.is_set():
            self._on_lost(f"the controller (rank 0, {self._controller}) died")

    def _run(self) -> None:
        last_answer = time.monotonic()
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            try:
                if self._is_connected:
                    self._send()
                    last_answer = time.monotonic()
            except (MemoryError, RuntimeError) as error:
                # What a handler raises comes back to the caller, as text if it fails before that.
                if _is_of_own_memory(error):
                    self._lose("it has no memory left")
                elif "MemoryError" in repr(error):
                    self._give_up("has no memory left")
                # Otherwise the controller is slow; if it died, the lifeline fails too.
            self._check_controller(time.monotonic() - last_answer)
            if self._monitor:
                self._monitor.wake()
            if os.getppid() != self._parent:
                self._lose("torchrun died")

    def _send(self) -> None:
        status = self._worker.status()
        wire.send(0, "heartbeat", self._worker.rank, status, timeout=ANSWER_SECONDS).wait()

    def _check_controller(self, silence: float) -> None:
        is_stopped = silence > STOPPED_SECONDS and self._controller.is_stopped
        if is_stopped or (silence > HEARTBEAT_TIMEOUT and self._is_connected):
            self._give_up(STOPPED if is_stopped else f"sent no answer for {silence:.0f} s")

    def _give_up(self, why: str) -> None:
        self._controller.kill()
        self._lose(f"the controller (rank 0, {self._controller}) {why}")

    def _lose(self, reason: str) -> None:
        self._on_lost(reason)
        if not self._stopping.wait(EXIT_SECONDS):  # it still waits for others to start
            print(f"rank {self._worker.rank} exits: {reason}", file=sys.stderr, flush=True)
            os._exit(1)


def _is_of_own_memory(error: Exception) -> bool:
    """RPC puts the rank in front of an error of another: "Error on Node 0: MemoryError"."""
    return repr(error) == "MemoryError()" or str(error).startswith("MemoryError")
