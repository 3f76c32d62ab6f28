"""One role call: what is asked of whom, and how it ends."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from roll_lite.cluster.codec import Message, decode
from roll_lite.cluster.device_map import Role
from roll_lite.cluster.errors import role_error
from roll_lite.cluster.worker import Reply

COLLECTS = ("first", "replicas", "all")
STRAGGLER_SECONDS = 1.0  # after a failure: for others to fail too, or to finish


@dataclass(frozen=True, slots=True)
class Request:
    """A role call before it has a ticket."""

    role: Role
    method: str
    contents: Sequence[tuple]
    """Positional and keyword arguments for each replica."""
    collect: str
    """first, replicas or all: whose results come back."""
    deadline: float
    """Seconds that a rank may be in the call."""

    @property
    def label(self) -> str:
        return f"{self.role.name}.{self.method}"

    @property
    def wanted_ranks(self) -> tuple[int, ...]:
        firsts = tuple(replica[0] for replica in self.role.replicas)
        return {"first": firsts[:1], "replicas": firsts, "all": self.role.ranks}[self.collect]


class Call:
    """A call under way. Its future is done when every rank has answered, or one has failed."""

    def __init__(self, request: Request, ticket: int):
        self.request = request
        self.ticket = ticket
        self.issued = time.monotonic()
        self.future: Future = Future()
        self._replies: dict[int, Reply] = {}  # in the order of arrival
        self._lock = threading.Lock()

    @property
    def unanswered(self) -> list[int]:
        return [rank for rank in self.request.role.ranks if rank not in self._replies]

    def deliver(self, rank: int, reply: Reply) -> None:
        with self._lock:
            is_first_failure = reply.failure and not any(r.failure for r in self._replies.values())
            self._replies[rank] = reply
        if not self.unanswered:
            self._finish()
        elif is_first_failure:
            # Others may wait in a collective for the rank that failed, and never answer.
            timer = threading.Timer(STRAGGLER_SECONDS, self._finish)
            timer.daemon = True
            timer.start()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if not self.future.done():
                self.future.set_exception(error)

    def _finish(self) -> None:
        failures = [reply.failure for reply in list(self._replies.values()) if reply.failure]
        if failures:
            role, method = self.request.role.name, self.request.method
            self.fail(role_error(role, method, failures, self.unanswered))
            return
        try:
            values = [_unpack(self._replies[rank].value) for rank in self.request.wanted_ranks]
        except Exception as error:  # of any kind: unpickling runs code of the result's classes
            self.fail(error)
            return
        with self._lock:
            if not self.future.done():
                self.future.set_result(values[0] if self.request.collect == "first" else values)


def _unpack(value: Any) -> Any:
    return decode(value) if isinstance(value, Message) else value
