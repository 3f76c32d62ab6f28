"""The controller's side of role calls: tickets, what is under way, and how a call ends."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pickle import PicklingError
from typing import Any

from roll_lite.cluster import rpc
from roll_lite.cluster.call import Call, Request
from roll_lite.cluster.codec import Message, encode
from roll_lite.cluster.device_map import DeviceMap, Role
from roll_lite.cluster.errors import (
    Failure,
    RoleError,
    describe_exception,
    role_error,
    summarise,
)
from roll_lite.cluster.letters import Letter, Outbox
from roll_lite.cluster.members import Member
from roll_lite.cluster.worker import ATTEND, Order, Worker

DIED = "died (its connection closed)"

OnReport = Callable[..., None]
"""Takes the number of a replica and what it reported; runs in any thread, and must not wait."""
OnFailure = Callable[[RoleError], None]
"""Told, in any thread, that nothing can be called any more."""


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
        self._bound: dict[int, tuple[str, tuple[int, ...]]] = {}  # by rank: role and replica
        self._outboxes = {
            rank: Outbox(rank, "post", partial(self.lose, rank, DIED))
            for rank in range(len(members))
            if rank != worker.rank
        }
        self._on_report: dict[str, OnReport | None] = {}
        self._on_failure: dict[str, OnFailure | None] = {}
        self.failure: RoleError | None = None
        """Set when a rank is lost: nothing can be called any more."""

    def issue(self, request: Request) -> Future:
        if self.failure:
            raise self.failure
        contents = self._contents_by_rank(request)
        wanted = request.wanted_ranks
        with self._lock:
            self._ticket += 1
            call = self._pending[self._ticket] = Call(request, self._ticket)
            orders = {
                rank: Order(
                    ticket=call.ticket,
                    previous=self._last.get(rank, 0),
                    role=request.role.name,
                    method=request.method if rank in request.role.ranks else ATTEND,
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
        for listener in list(self._on_failure.values()):
            if listener:
                listener(self.failure)

    def bind(self, role: Role) -> None:
        """From now on the ranks of each replica of this role run every call together.

        While such ranks work on their own they wait for each other, so a call that concerns some
        of them has to interrupt all, at the same ticket.
        """
        for replica in role.replicas:
            for rank in replica:
                bound, _ = self._bound.setdefault(rank, (role.name, replica))
                if bound != role.name:
                    raise ValueError(
                        f"roles {bound} and {role.name} both work on their own over tensor-"
                        f"parallel ranks, and share rank {rank}; give them disjoint ranks or tp=1"
                    )

    def post(self, role: Role, replica: int, args: tuple) -> None:
        """Put a letter into the inbox of a replica's first rank; others of it are to follow."""
        if self.failure:
            raise self.failure
        first, *others = role.replicas[replica]
        for rank in others if first in self._bound else ():
            self._post(rank, Letter(role.name, replica, ("follow",)))
        self._post(first, Letter(role.name, replica, args))

    def _post(self, rank: int, letter: Letter) -> None:
        if rank == self._worker.rank:
            self._worker.post([letter])
        else:
            packed = _pack(f"{letter.role}.receive", letter.content)
            self._outboxes[rank].put(letter._replace(content=packed))

    def pump(self, role: Role) -> bool:
        """Every rank's own thread works; there is nothing to do here."""
        return False

    def listen(self, role: Role, on_report: OnReport | None, on_failure: OnFailure | None) -> None:
        self._on_report[role.name] = on_report
        self._on_failure[role.name] = on_failure
        if self.failure and on_failure:
            on_failure(self.failure)

    def take_reports(self, letters: Sequence[Letter]) -> None:
        """Reports of role objects; those of roles that nobody listens to are dropped."""
        for letter in letters:
            listener = self._on_report.get(letter.role)
            try:
                if listener:
                    listener(letter.replica, *letter.args)
            except Exception as error:  # of any kind: it must not end the thread that brought it
                failure = describe_exception(self._worker.rank, error, own_frames=0)
                self.on_fault(letter.role, "report", failure)

    def on_fault(self, role: str, method: str, failure: Failure) -> None:
        """Something that no call waits for has raised."""
        self.fail(role_error(role, method, [failure]))

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
                    encoded[id(content)] = _pack(request.label, content)
                contents[rank] = encoded[id(content)]
        for rank in request.role.ranks:
            _, replica = self._bound.get(rank, ("", ()))
            contents = {attending: ((), {}) for attending in replica} | contents
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


def _pack(label: str, content: tuple) -> Message:
    try:
        return encode(content)
    except (AttributeError, TypeError, PicklingError) as error:
        raise TypeError(
            f"an argument of {label} cannot be sent: {error}; functions and classes must "
            "be defined at the top of a module"
        ) from error


class Direct:
    """The controller of a world of one: calls run here and now, and a debugger steps into them."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._lock = threading.RLock()  # several threads may call; calls still run one by one
        self._on_report: dict[str, OnReport | None] = {}

    def issue(self, request: Request) -> Future:
        future: Future = Future()
        args, kwargs = request.contents[0]
        try:
            value = self._perform(request.role, request.method, args, kwargs)
        except RoleError as error:
            future.set_exception(error)
        else:
            future.set_result(value if request.collect == "first" else [value])
        return future

    def bind(self, role: Role) -> None:
        """One rank waits for nobody."""

    def post(self, role: Role, replica: int, args: tuple) -> None:
        self._perform(role, "receive", args, {})

    def pump(self, role: Role) -> bool:
        """One piece of the role's own work; whether there may be more."""
        return self._perform(role, "work", (), {})

    def listen(self, role: Role, on_report: OnReport | None, on_failure: OnFailure | None) -> None:
        """Failures are raised where the work is done."""
        self._on_report[role.name] = on_report

    def take_reports(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            if listener := self._on_report.get(letter.role):
                listener(letter.replica, *letter.args)

    def _perform(self, role: Role, method: str, args: tuple, kwargs: dict) -> Any:
        with self._lock:
            try:
                return self._worker.perform(role.name, method, args, kwargs)
            except Exception as error:
                failure = Failure(0, summarise(error), text="", pickled=None)
                # Its cause is the error itself, with its frames.
                raise role_error(role.name, method, [failure]) from error
