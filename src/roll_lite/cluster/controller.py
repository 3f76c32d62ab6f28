"""The controller's side of role calls: tickets, what is under way, and how a call ends."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pickle import PicklingError
from typing import Any

from roll_lite.cluster import rpc
from roll_lite.cluster.codec import Message, decode, encode
from roll_lite.cluster.device_map import DeviceMap, Role
from roll_lite.cluster.errors import Failure, RoleError, role_error, summarise
from roll_lite.cluster.members import Member
from roll_lite.cluster.worker import Order, Reply, Worker

COLLECTS = ("first", "replicas", "all")
DIED = "died (its connection closed)"
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


class Controller:
    """Hands out tickets from one counter and sends calls to ranks."""

    def __init__(self, worker: Worker, device_map: DeviceMap, members: Sequence[Member]):
        self._worker = worker
        self._device_map = device_map
        self._members = members
        self._lock = threading.Lock()
        self._ticket = 0
        self._last: dict[int, int] = {}
        self._pending: dict[int, Call] = {}
        self.failure: RoleError | None = None
        """Set when a rank is lost: nothing can be called any more."""

    def issue(self, request: Request) -> Future:
        if self.failure:
            raise self.failure
        contents = self._contents_by_rank(request)
        role, method, wanted = request.role.name, request.method, request.wanted_ranks
        with self._lock:
            self._ticket += 1
            call = self._pending[self._ticket] = Call(request, self._ticket)
            orders = {
                rank: Order(
                    ticket=call.ticket,
                    previous=self._last.get(rank, 0),
                    role=role,
                    method=method,
                    content=content,
                    is_wanted=rank in wanted,
                )
                for rank, content in contents.items()
            }
            self._last.update(dict.fromkeys(orders, call.ticket))
        call.future.add_done_callback(lambda _: self._pending.pop(call.ticket))
        for rank in sorted(orders, reverse=True):  # rank 0, this process, last: it takes the GIL
            self._send(call, rank, orders[rank])
        return call.future

    def pending(self) -> list[Call]:
        """Calls under way, oldest first."""
        with self._lock:
            return list(self._pending.values())

    def wait_for_all(self) -> None:
        """Calls that were started and not waited for end too, or raise."""
        for call in self.pending():
            call.future.result()

    def fail(self, error: RoleError) -> None:
        """End all calls under way and all to come."""
        with self._lock:
            self.failure = self.failure or error
        for call in self.pending():
            call.fail(self.failure)

    def lose(self, rank: int, why: str) -> None:
        """End everything because a rank is gone; the first one lost is the one to name."""
        roles = [role.name for role in self._device_map.roles_of(rank)]
        call = next((c for c in self.pending() if rank in c.unanswered), None)
        doing = "it had no call"
        if call:
            doing = f"{call.request.label} was called {time.monotonic() - call.issued:.1f} s before"
        self.fail(
            RoleError(
                f"rank {rank} ({', '.join(roles) or 'no role'}; {self._members[rank]}) {why}; "
                f"{doing}",
                role=call.request.role.name if call else "",
                method=call.request.method if call else "",
                rank=rank,
            )
        )

    def _contents_by_rank(self, request: Request) -> dict[int, Message | tuple]:
        """What each rank gets; equal contents are encoded once, for the own rank not at all."""
        encoded: dict[int, Message] = {}
        contents = {}
        for replica, content in zip(request.role.replicas, request.contents, strict=True):
            for rank in replica:
                if rank == self._worker.rank:
                    contents[rank] = content
                    continue
                if id(content) not in encoded:
                    encoded[id(content)] = _pack(request, content)
                contents[rank] = encoded[id(content)]
        return contents

    def _send(self, call: Call, rank: int, order: Order) -> None:
        if rank == self._worker.rank:
            self._worker.put(order, partial(call.deliver, rank))
            return
        try:
            answer = rpc.send(rank, "call", order)
        except RuntimeError:
            self.lose(rank, DIED)
        else:
            answer.add_done_callback(partial(self._on_answer, call, rank))

    def _on_answer(self, call: Call, rank: int, answer: Any) -> None:
        try:
            reply = answer.value()
        except RuntimeError:  # handlers do not raise: it is the connection
            self.lose(rank, DIED)
        else:
            call.deliver(rank, reply)


def _pack(request: Request, content: tuple) -> Message:
    try:
        return encode(content)
    except (AttributeError, TypeError, PicklingError) as error:
        raise TypeError(
            f"an argument of {request.label} cannot be sent: {error}; functions and classes must "
            "be defined at the top of a module"
        ) from error


def _unpack(value: Any) -> Any:
    return decode(value) if isinstance(value, Message) else value


class Direct:
    """The controller of a world of one: calls run here and now, and a debugger steps into them."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._lock = threading.RLock()  # several threads may call; calls still run one by one

    def issue(self, request: Request) -> Future:
        future: Future = Future()
        role, method = request.role.name, request.method
        args, kwargs = request.contents[0]
        with self._lock:
            try:
                value = self._worker.perform(role, method, args, kwargs)
            except Exception as error:
                failure = Failure(0, summarise(error), text="", pickled=None)
                failed = role_error(role, method, [failure])
                failed.__cause__ = error  # itself, with its frames
                future.set_exception(failed)
            else:
                future.set_result(value if request.collect == "first" else [value])
        return future
