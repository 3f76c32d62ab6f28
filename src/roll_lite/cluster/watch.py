"""Who is still alive: beats, lifelines and deadlines.

Each rank sends the controller a beat a second, from a thread of its own, with what its worker does.
A *lifeline* is a call in each direction that is answered only at the end: when a process dies, the
other end hears of it within milliseconds. A process that is stopped keeps its connections, but its
beats cease; somebody on its host looks it up and kills it. A rank whose beats go on, but which has
been in one call past the deadline, is stuck: the error says where.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch.futures import Future

from roll_lite.cluster import rpc
from roll_lite.cluster.call import Call
from roll_lite.cluster.controller import DIED, Controller
from roll_lite.cluster.errors import RoleError, name_ranks, summarise
from roll_lite.cluster.members import Member
from roll_lite.cluster.worker import WORK, Status, Worker
from roll_lite.cluster.world import MEETING_SECONDS

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0  # without a beat, the process is looked up
LOST_SECONDS = 120.0  # a running process may be silent for so long: some code keeps the GIL
ASK_SECONDS = 3.0  # for a look at a process, or a stack
END_SECONDS = 8.0  # for the recipe to leave its `with` after a rank was lost


class Watch:
    """The controller's view of the other ranks."""

    def __init__(self, controller: Controller, worker: Worker, members: Sequence[Member]):
        self._controller = controller
        self._worker = worker
        self._members = members
        self._beats = {rank: (time.monotonic(), None) for rank in range(1, len(members))}
        self._stopping = threading.Event()
        self._parent = os.getppid()
        self._failed_at: float | None = None
        self._forming_since: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        for rank in self._beats:
            lifeline = rpc.send(rank, "lifeline")
            lifeline.add_done_callback(partial(self._on_lifeline, rank))
        self._thread.start()

    def groups_have_formed(self) -> None:
        self._forming_since = None

    def stop(self) -> None:
        """From here on ranks may leave."""
        self._stopping.set()

    def on_beat(self, rank: int, status: Status | None) -> None:
        self._beats[rank] = time.monotonic(), status

    def _on_lifeline(self, rank: int, lifeline: Future) -> None:
        if not self._stopping.is_set():
            self._controller.lose(rank, DIED)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopping.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            if now - before > SILENT_SECONDS / 2:  # it was this process that was stopped
                self._beats = {rank: (now, status) for rank, (_, status) in self._beats.items()}
            before = now
            if os.getppid() != self._parent:  # torchrun died: nobody would clean up after us
                os.kill(os.getpid(), signal.SIGTERM)
            if self._controller.failure:
                self._end_for_sure(now)
            else:
                self._check_start(now)
                self._check_beats(now)
                self._check_deadlines()

    def _check_start(self, now: float) -> None:
        if self._forming_since and now - self._forming_since > MEETING_SECONDS:
            text = f"the process groups did not form within {MEETING_SECONDS:.0f} s"
            self._controller.fail(RoleError(text, role="", method="", rank=0))

    def _end_for_sure(self, now: float) -> None:
        """The recipe may sit in foreign code, where neither the failure nor a signal reaches it."""
        self._failed_at = self._failed_at or now
        if now - self._failed_at > END_SECONDS:
            print(f"RoleError: {self._controller.failure}", file=sys.stderr, flush=True)
            os._exit(1)

    def _check_beats(self, now: float) -> None:
        for rank, (beat, _) in self._beats.items():
            silence = now - beat
            if silence < SILENT_SECONDS:
                continue
            state = self._look_up(rank)
            if state == "stopped":
                self._controller.lose(rank, f"was stopped for {silence:.0f} s and is now killed")
                self._kill(rank)
            elif state == "gone":
                self._controller.lose(rank, DIED)
            elif silence > LOST_SECONDS:
                self._controller.lose(rank, f"has not answered for {silence:.0f} s")

    def _look_up(self, rank: int) -> str:
        """The state of a rank's process, as somebody of its realm sees it."""
        for neighbour in self._neighbours(rank):
            if neighbour == self._worker.rank:
                return self._members[rank].process_state()
            try:
                return rpc.ask(neighbour, "look_up", rank, timeout=ASK_SECONDS)
            except RuntimeError:  # the neighbour is in trouble too; another may answer
                continue
        return "unknown"

    def kill_if_stopped(self, rank: int) -> None:
        if self._look_up(rank) == "stopped":
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        for neighbour in self._neighbours(rank):
            if neighbour == self._worker.rank:
                self._members[rank].kill()
                return
            with suppress(RuntimeError):  # a dead neighbour; another will do
                rpc.ask(neighbour, "kill", rank, timeout=ASK_SECONDS)
                return

    def _neighbours(self, rank: int) -> list[int]:
        realm = self._members[rank].realm
        return [i for i, m in enumerate(self._members) if m.realm == realm and i != rank]

    def _check_deadlines(self) -> None:
        statuses = {rank: status for rank, (_, status) in self._beats.items()}
        statuses[self._worker.rank] = self._worker.status()
        for call in self._controller.pending():
            waits = [_seconds_in(call, statuses.get(rank)) for rank in call.unanswered]
            if max(waits, default=0.0) > call.request.deadline:
                self._controller.fail(self._deadline_error(call, max(waits)))
                return

    def _deadline_error(self, call: Call, seconds: float) -> RoleError:
        """Names ranks outside of collectives first: those inside wait for them."""
        stacks = self._collect_stacks(call.unanswered)
        waiting = [rank for rank, stack in stacks.items() if "torch/distributed" in stack]
        culprits = [rank for rank in stacks if rank not in waiting] or waiting
        lines = [
            f"{call.request.label} is not done on {name_ranks(culprits)} after {seconds:.1f} s; "
            f"its deadline is {call.request.deadline:g} s"
        ]
        if others := [rank for rank in waiting if rank not in culprits]:
            lines.append(f"  {name_ranks(others)} waits in a collective".replace("s wait", " wait"))
        for rank in sorted(stacks, key=lambda rank: (rank not in culprits, rank)):
            lines += [f"--- rank {rank} ({self._members[rank]}) is at ---", stacks[rank].rstrip()]
        request = call.request
        return RoleError(
            "\n".join(lines), role=request.role.name, method=request.method, rank=culprits[0]
        )

    def _collect_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        own = self._worker.rank
        asked = {r: rpc.send(r, "stack", timeout=ASK_SECONDS) for r in ranks if r != own}
        stacks = {own: self._worker.stack()} if own in ranks else {}
        for rank, answer in asked.items():
            try:
                stacks[rank] = answer.wait()
            except RuntimeError as error:  # its text says that there is none, and why
                stacks[rank] = f"(no stack: {summarise(error)})"
        return stacks


def _seconds_in(call: Call, status: Status | None) -> float:
    """How long a rank has been in a call, or kept it waiting for what the rank does by itself."""
    if status and status.ticket == call.ticket:
        return status.seconds
    if status and status.ticket == WORK:
        return min(status.seconds, time.monotonic() - call.issued)
    return 0.0


class Pulse:
    """A serving rank's side: its beats, and an eye on the controller."""

    def __init__(
        self, worker: Worker, members: Sequence[Member], leave: Callable[[int, str], None]
    ):
        self._worker = worker
        self._members = members
        self._leave = leave
        self._stopping = threading.Event()
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        rpc.send(0, "lifeline").add_done_callback(self._on_lifeline)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """What a rank does for the watch."""
        return {
            "stack": self._worker.stack,
            "look_up": lambda rank: self._members[rank].process_state(),
            "kill": lambda rank: self._members[rank].kill(),
        }

    def _on_lifeline(self, lifeline: Future) -> None:
        if not self._stopping.is_set():
            self._leave(1, f"the controller (rank 0, {self._members[0]}) died")

    def _run(self) -> None:
        heard = time.monotonic()
        while not self._stopping.wait(BEAT_SECONDS):
            try:
                rpc.ask(0, "beat", self._worker.rank, self._worker.status(), timeout=SILENT_SECONDS)
                heard = time.monotonic()
            except RuntimeError:  # a dead controller ends the lifeline as well; this is a slow one
                self._check_controller(time.monotonic() - heard)
            if os.getppid() != self._parent:
                self._leave(1, "torchrun died")

    def _check_controller(self, silence: float) -> None:
        controller, own = self._members[0], self._members[self._worker.rank]
        if controller.realm == own.realm and controller.process_state() == "stopped":
            controller.kill()
            self._leave(1, f"the controller (rank 0, {controller}) was stopped and is now killed")
        elif silence > LOST_SECONDS:
            self._leave(1, f"the controller (rank 0, {controller}) did not answer {silence:.0f} s")
