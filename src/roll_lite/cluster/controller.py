"""The controller's side of role calls: it numbers them, sends them to ranks and collects replies.

Every call gets a ticket from one counter, and each rank runs its calls strictly by ticket, so
collectives are issued in the same order on all ranks.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pickle import PicklingError
from typing import Any, NamedTuple

from roll_lite.checks import UserError
from roll_lite.cluster import wire
from roll_lite.cluster.errors import (
    RankFailure,
    RoleError,
    describe_exception,
    role_error,
    summarise,
)
from roll_lite.cluster.rank_worker import BARRIER, RankCall, RankReply, Worker
from roll_lite.cluster.wire import Mailbox, Message, Post
from roll_lite.device_map import DeviceMap, Role
from roll_lite.own_code import find_own_code
from roll_lite.processes import Process

COLLECTS = ("first", "replicas", "all")
STRAGGLER_SECONDS = 1.0  # after the first failure: for the other ranks to fail or finish
DIED = "died (its connection closed)"

OnReport = Callable[..., None]
"""Gets the replica's index and what it reported; runs in any thread and must not wait."""
OnFailure = Callable[[RoleError], None]
"""Runs in any thread, when no call is possible any more."""


class Exit(NamedTuple):
    """What the controller tells a rank to do."""

    code: int
    reason: str = ""
    are_all_there: bool = True
    """False if ranks were lost: groups that they were in may not end."""
    is_lost: bool = False
    """The run goes on without this rank."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A role call. Its future is done when every rank has replied, or soon after one failed."""

    role: Role
    method: str
    contents: Sequence[tuple]
    """Positional and keyword arguments for each replica."""
    collect: str
    """Whose results to return, one of COLLECTS."""
    deadline: float
    """Seconds that a rank may spend in it."""
    ticket: int = 0
    """Its place in the order of all calls, from 1; set by the controller."""
    lost: frozenset[int] = frozenset()
    """Ranks that were lost before it was issued; set by the controller."""
    future: Future = field(default_factory=Future)
    issued: float = field(default_factory=time.monotonic)
    last_reply: float = field(default_factory=time.monotonic)
    is_slow: bool = False
    """Whether a rank was reported as slower than all others."""
    _replies: dict[int, RankReply] = field(default_factory=dict)
    """By rank, in the order of arrival."""

    @property
    def label(self) -> str:
        return f"{self.role.name}.{self.method}"

    @property
    def wanted_ranks(self) -> list[int]:
        firsts = [replica[0] for replica in self.role.replicas if replica[0] not in self.lost]
        return {"first": firsts[:1], "replicas": firsts, "all": self.ranks}[self.collect]

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in self.role.ranks if rank not in self.lost]

    @property
    def unanswered(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self._replies]

    def deliver(self, rank: int, reply: RankReply) -> None:
        is_first_failure = reply.failure and not self._failures()
        self._replies[rank] = reply
        self.last_reply = time.monotonic()
        if not self.unanswered:
            self._finish()
        elif is_first_failure:
            # The other ranks may wait in a collective for the rank that failed, and never reply.
            timer = threading.Timer(STRAGGLER_SECONDS, self._finish)
            timer.daemon = True
            timer.start()

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # it is done already
            self.future.set_exception(error)

    def _failures(self) -> list[RankFailure]:
        return [reply.failure for reply in list(self._replies.values()) if reply.failure]

    def _finish(self) -> None:
        if failures := self._failures():
            self.fail(role_error(self.role.name, self.method, failures, self.unanswered))
            return
        try:
            values = [wire.decode(self._replies[rank].value) for rank in self.wanted_ranks]
        except Exception as error:  # of any kind: unpickling runs code of the result's classes
            self.fail(error)
            return
        with suppress(InvalidStateError):
            self.future.set_result(values[0] if self.collect == "first" else values)


class Controller:
    """Issues calls and posts to all ranks, and receives their replies and reports."""

    def __init__(self, worker: Worker, device_map: DeviceMap, processes: Sequence[Process]):
        self._worker = worker
        self._device_map = device_map
        self._processes = processes
        self._lock = threading.Lock()
        self._ticket = 0
        self._last_ticket: dict[int, int] = {}  # by rank
        self._pending: dict[int, Call] = {}
        self._lockstep: dict[int, tuple[str, tuple[int, ...]]] = {}  # by rank: role and replica
        self._mailboxes = {
            rank: Mailbox(rank, "post", partial(self.lose, rank, DIED))
            for rank in range(len(processes))
            if rank != worker.rank
        }
        self._on_report: dict[str, OnReport | None] = {}
        self._on_failure: dict[str, OnFailure | None] = {}
        self.failure: RoleError | None = None
        """Set when a rank that is needed is lost; no call is possible afterwards."""
        self.spare: frozenset[int] = frozenset()
        """Ranks of engines that the run can go on without."""
        self.lost: frozenset[int] = frozenset()
        """Those of them that have ended."""

    def issue(self, call: Call) -> Future:
        if self.failure:
            raise self.failure
        contents = self._contents_by_rank(call)
        with self._lock:
            call.lost = self.lost
            wanted = call.wanted_ranks
            self._ticket = call.ticket = self._ticket + 1
            self._pending[call.ticket] = call
            rank_calls = {
                rank: RankCall(
                    ticket=call.ticket,
                    previous=self._last_ticket.get(rank, 0),
                    role=call.role.name,
                    method=call.method if rank in call.role.ranks else BARRIER,
                    content=content,
                    is_wanted=rank in wanted,
                    lost=call.lost,
                )
                for rank, content in contents.items()
                if rank not in call.lost
            }
            self._last_ticket.update(dict.fromkeys(rank_calls, call.ticket))
        call.future.add_done_callback(lambda _: self._pending.pop(call.ticket))
        for rank in sorted(rank_calls, reverse=True):  # this process last: it takes the GIL
            self._send(call, rank, rank_calls[rank])
        return call.future

    def pending(self) -> list[Call]:
        """Calls that are not done, oldest first."""
        with self._lock:
            return list(self._pending.values())

    def wait_for_all(self) -> None:
        """Wait for all pending calls; raises the first error."""
        for call in self.pending():
            call.future.result()

    def fail(self, error: RoleError) -> None:
        """Fail all pending calls and every later one."""
        with self._lock:
            self.failure = self.failure or error
        for call in self.pending():
            call.fail(self.failure)
        for listener in list(self._on_failure.values()):
            if listener:
                listener(self.failure)

    def run_in_lockstep(self, role: Role) -> None:
        """From now on, a call to any rank of a replica of this role pauses all its ranks.

        Between calls these ranks work together, so they must all stop at the same ticket.
        """
        for replica in role.replicas:
            for rank in replica:
                other, _ = self._lockstep.setdefault(rank, (role.name, replica))
                if other != role.name:
                    raise UserError(
                        f"roles {other} and {role.name} both run tensor-parallel engines and share "
                        f"rank {rank}; give them disjoint ranks or tp=1"
                    )

    def post(self, role: Role, replica: int, args: tuple) -> None:
        """Post to a replica's first rank; the other ranks of a tensor-parallel engine follow it."""
        if self.failure:
            raise self.failure
        first, *followers = role.replicas[replica]
        if first in self.lost:
            return
        for rank in followers if first in self._lockstep else ():
            self._post(rank, Post(role.name, replica, ("follow",)))
        self._post(first, Post(role.name, replica, args))

    def _post(self, rank: int, post: Post) -> None:
        if rank == self._worker.rank:
            self._worker.post([post])
        else:
            packed = _pack(f"{post.role}.receive", post.content)
            self._mailboxes[rank].put(post._replace(content=packed))

    def wait_for_posts(self, seconds: float) -> None:
        """Returns when all living ranks have what was posted to them, or after some time."""
        end = time.monotonic() + seconds
        for rank in self._mailboxes.keys() - self.lost:
            self._mailboxes[rank].wait_until_sent(max(0.0, end - time.monotonic()))

    def listen(self, role: Role, on_report: OnReport | None, on_failure: OnFailure | None) -> None:
        self._on_report[role.name] = on_report
        self._on_failure[role.name] = on_failure
        if self.failure and on_failure:
            on_failure(self.failure)
        if on_report:
            for index, replica in enumerate(role.replicas):
                if replica[0] in self.lost:
                    on_report(index, "lost")

    def on_reports(self, posts: Sequence[Post]) -> None:
        """Pass reports to the listeners of their roles; without a listener they are dropped."""
        for post in posts:
            listener = self._on_report.get(post.role)
            try:
                if listener:
                    listener(post.replica, *wire.decode(post.content))
            except Exception as error:  # of any kind: it must not end the thread that brought it
                failure = describe_exception(self._worker.rank, error)
                self.on_fault(post.role, "report", failure)

    def on_fault(self, role: str, method: str, failure: RankFailure) -> None:
        """`work`, `receive` or a listener raised: no call waits for it, so everything ends, unless
        the rank is spare."""
        rank = failure.rank
        if rank in self.lost:
            return
        why = f"failed in {role}.{method} ({failure.summary})"
        if self._go_on_without(rank, f"{failure.text}{self._name(rank)} {why}"):
            return
        self.fail(role_error(role, method, [failure]))

    def lose(self, rank: int, why: str) -> None:
        """A rank is gone. That ends everything, unless it is spare; only the first loss counts."""
        who = f"{self._name(rank)} {why}"
        if rank in self.lost or self._go_on_without(rank, who):
            return
        call = next((c for c in self.pending() if rank in c.unanswered), None)
        doing = "it had no call"
        if call:
            doing = f"{call.label} was called {time.monotonic() - call.issued:.1f} s before"
        self.fail(
            RoleError(
                f"{who}; {doing}",
                role=call.role.name if call else "",
                method=call.method if call else "",
                rank=rank,
            )
        )

    def _name(self, rank: int) -> str:
        roles = [role.name for role in self._device_map.roles_of(rank)]
        return f"rank {rank} ({', '.join(roles) or 'no role'}; {self._processes[rank]})"

    def _go_on_without(self, rank: int, who: str) -> bool:
        """Whether the engines of other replicas do the work of a rank from now on.

        Not if a call waits for the rank: others may be in a collective with it.
        """
        if self.failure or rank not in self.spare:
            return False
        role = self._device_map["generate"]
        index, replica = next((i, r) for i, r in enumerate(role.replicas) if rank in r)
        with self._lock:
            lost = self.lost | set(replica)
            num_left = sum(lost.isdisjoint(ranks) for ranks in role.replicas)
            is_called = any(not lost.isdisjoint(c.unanswered) for c in [*self._pending.values()])
            if is_called or not num_left:
                return False
            self.lost = lost
        print(
            f"{who}; its samples are generated again by the other engines, {num_left} of "
            f"{role.num_replicas}. Stop and resume the run to get all engines back",
            file=sys.stderr,
            flush=True,
        )
        for each in replica:  # ranks that live wait in collectives for those that ended
            with suppress(RuntimeError):
                wire.send(each, "exit", Exit(1, is_lost=True))
            self._processes[each].kill()
        if listener := self._on_report.get(role.name):
            listener(index, "lost")
        return True

    def _contents_by_rank(self, call: Call) -> dict[int, Message | tuple]:
        """What each rank gets. Equal contents are encoded once, and not at all for this rank."""
        encoded: dict[int, Message] = {}
        contents = {}
        for replica, content in zip(call.role.replicas, call.contents, strict=True):
            for rank in replica:
                if rank == self._worker.rank:
                    contents[rank] = content
                    continue
                if id(content) not in encoded:
                    encoded[id(content)] = _pack(call.label, content)
                contents[rank] = encoded[id(content)]
        for rank in call.role.ranks:
            _, replica = self._lockstep.get(rank, ("", ()))
            contents = {paused: ((), {}) for paused in replica} | contents
        return contents

    def _send(self, call: Call, rank: int, rank_call: RankCall) -> None:
        if rank == self._worker.rank:
            self._worker.put(rank_call, partial(call.deliver, rank))
            return
        try:
            answer = wire.send(rank, "call", rank_call)
        except RuntimeError:
            self.lose(rank, DIED)
        else:
            answer.add_done_callback(partial(self._on_answer, call, rank))

    def _on_answer(self, call: Call, rank: int, answer: Any) -> None:
        try:
            reply = answer.value()
        except RuntimeError:  # handlers do not raise, so the connection is gone
            self.lose(rank, DIED)
        else:
            call.deliver(rank, reply)


def _pack(label: str, content: tuple) -> Message:
    try:
        return wire.encode(content)
    except (AttributeError, TypeError, PicklingError) as error:
        raise TypeError(
            f"an argument of {label} cannot be sent: {error}; functions and classes must "
            "be defined at the top of a module"
        ) from error


class LocalController:
    """The controller for world size 1: calls run in the calling thread, and debuggers step in."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._lock = threading.RLock()  # several threads may call; calls still run one by one
        self._on_report: dict[str, OnReport | None] = {}
        self.lost: frozenset[int] = frozenset()

    def issue(self, call: Call) -> Future:
        args, kwargs = call.contents[0]
        try:
            value = self._perform(call.role, call.method, args, kwargs)
        except RoleError as error:
            call.future.set_exception(error)
        else:
            call.future.set_result(value if call.collect == "first" else [value])
        return call.future

    def post(self, role: Role, replica: int, args: tuple) -> None:
        self._perform(role, "receive", args, {})

    def pump(self, role: Role) -> bool:
        """Run one piece of the role's work; whether more may be left."""
        return self._perform(role, "work", (), {})

    def listen(self, role: Role, on_report: OnReport | None, on_failure: OnFailure | None) -> None:
        """Failures are raised by `post` and `pump`, so `on_failure` is not used."""
        self._on_report[role.name] = on_report

    def on_reports(self, posts: Sequence[Post]) -> None:
        for post in posts:
            if listener := self._on_report.get(post.role):
                listener(post.replica, *post.content)

    def _perform(self, role: Role, method: str, args: tuple, kwargs: dict) -> Any:
        with self._lock:
            try:
                return self._worker.perform(role.name, method, args, kwargs)
            except Exception as error:
                own = find_own_code(error)
                failure = RankFailure(0, summarise(error), text="", pickled=None, own=own)
                # The cause is the exception itself, with its traceback.
                raise role_error(role.name, method, [failure]) from error
