"""Engine replicas of a role: which replica answers which request, and what happens if it fails.

Everything here runs in the coordinator's event loop. A request goes to the replica with the fewest
unfinished samples, once that replica has room. The next turn of a conversation goes where the last
one was, unless that replica is overloaded. The requests of a replica that fails or is lost go to
another; a replica that fails MAX_FAILURES times in a row gets no more.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from roll_lite.cluster.errors import RoleError
from roll_lite.engine.request import EngineReport, Load, Request
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import Turn

if TYPE_CHECKING:  # it imports torch, which --help does without
    from roll_lite.cluster.role import RoleHandle

MAX_FAILURES = 3  # failures of a replica in a row
TOKENS_PER_SAMPLE = 512
"""Tokens that a replica prefills in the time by which one more sample delays all others: a turn of
about 200 tokens, each of which costs about as much as prefilling two or three."""
_KEYS = count(1)  # never reused: an engine may outlive the client that sent a request


class PolicyVersion:
    """The newest policy version that an engine has reported or the recipe has announced."""

    def __init__(self, current: int = 0):
        self.current = current

    def advance(self, version: int) -> None:
        self.current = max(self.current, version)


class WaitingSample(Protocol):
    """A sample that waits for a turn, as its request sees it."""

    def on_admitted(self) -> None:
        """An engine has the request: it no longer waits for room."""

    def on_retry(self) -> None:
        """The turn has to be generated again."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request, with a future for each of its samples. Cancelling a future drops the sample."""

    request: Request
    futures: list[asyncio.Future]
    samples: dict[int, WaitingSample] = field(default_factory=dict)
    """Samples that have joined and wait, by index. One that has its turn is not kept: it knows its
    group, which knows this request, and only a garbage collection would end such a cycle."""
    replica: int | None = None
    """The replica that has the request; None while it waits for room."""
    key: int = 0
    num_failures: int = 0
    num_counted: int = 0
    """Samples that count towards the load of the replica."""
    aborted: set[int] = field(default_factory=set)
    """Samples that the engine aborted because new weights arrived."""
    first_versions: dict[int, int] = field(default_factory=dict)
    """Policy version of the first token by sample, as far as the engine has reported it."""
    group_number: int | None = None
    """The number of the group whose samples these are, if they are trained on."""

    @property
    def unfinished(self) -> list[int]:
        return [i for i, future in enumerate(self.futures) if not future.done()]

    def join(self, index: int, sample: WaitingSample) -> asyncio.Future:
        """The future of a sample. From now on the sample hears what becomes of the request."""
        if not self.futures[index].done():
            self.samples[index] = sample
        if self.replica is not None:
            sample.on_admitted()
        return self.futures[index]

    @property
    def waiting(self) -> list[WaitingSample]:
        """Unfinished samples that have joined; others may join later, or never."""
        return [self.samples[index] for index in self.unfinished if index in self.samples]

    def fail(self, error: type[Exception], text: str) -> None:
        for index in self.unfinished:
            self.futures[index].set_exception(error(text))


class EngineClient:
    """Sends requests to the replicas of an engine role and receives their reports."""

    def __init__(self, engines: "RoleHandle", options: RolloutOptions | None = None):
        self.engines = engines
        self.version = PolicyVersion()
        self._options = options or RolloutOptions()
        self._is_listening = False
        self._is_lost = False
        """No replica can be reached any more."""
        num_replicas = engines.role.num_replicas
        self.loads: list[Load | None] = [None] * num_replicas
        self._queue: deque[PendingRequest] = deque()
        self._pending: dict[int, PendingRequest] = {}
        self._num_unfinished = [0] * num_replicas
        self._num_failures = [0] * num_replicas
        self._lost: set[int] = set()
        """Replicas whose ranks have ended."""

    def listen(
        self,
        call: Callable[..., None],
        on_error: Callable[[BaseException], None],
        on_first_versions: Callable[[set[int | None]], None] = lambda group_numbers: None,
    ) -> None:
        """Receive the reports of the engines from now on, in an event loop.

        `call(function, *args)` has the loop call a function, from any thread. `on_error` gets the
        error that ends the run: no replica works any more, or a rank is lost. `on_first_versions`
        gets the numbers of groups whose samples have their first tokens, by a report.
        """
        self._is_listening = True
        self._on_error = on_error
        self._on_first_versions = on_first_versions
        self.engines.listen(partial(call, self._receive), partial(call, self._on_all_lost))

    def stop_listening(self) -> None:
        self.engines.stop_listening()

    async def ask(self, request: Request) -> Turn:
        """The answer to a request for one sample."""
        if not self._is_listening:
            raise RuntimeError(
                f"no coordinator brings the answers of role {self.engines.role.name}; pass this "
                "object to the Coordinator in reward_engines"
            )
        return await self.submit(request).futures[0]

    def submit(
        self,
        request: Request,
        same_replica_as: PendingRequest | None = None,
        group_number: int | None = None,
    ) -> PendingRequest:
        """Have a request answered.

        `same_replica_as` is an earlier request whose tokens this one continues: they are in the
        cache of its replica, and the request does not wait for room.
        """
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(request.num_samples)]
        pending = PendingRequest(
            request, futures, num_counted=len(request.indices), group_number=group_number
        )
        if request.wanted is not None:  # the other samples are known already
            for index in set(range(request.num_samples)) - set(request.wanted):
                futures[index].set_result(None)
        for index in request.indices:
            futures[index].add_done_callback(partial(self._on_done, pending, index))
        if same_replica_as is not None and not self._is_broken(same_replica_as.replica):
            self._send(pending, self._next_replica(same_replica_as.replica, request))
        else:
            self._queue.append(pending)
            self._dispatch()
        return pending

    def metrics(self) -> dict[str, float]:
        """How busy the engines were, by the last report of each."""
        metrics: dict[str, float] = {}
        if self._lost:
            metrics["rollout/lost_engines"] = len(self._lost)
        if loads := [load for load in self.loads if load]:
            metrics["rollout/engine_running"] = sum(load.num_running for load in loads)
            metrics["rollout/engine_waiting"] = sum(load.num_waiting for load in loads)
            metrics["rollout/engine_free_pages"] = min(load.num_free_pages for load in loads)
        return metrics

    def _dispatch(self) -> None:
        """Send waiting requests to replicas with room, in the order they came."""
        while self._queue and not self._is_lost:
            replica = self._least_loaded()
            pending = self._queue[0]
            load = self._num_unfinished[replica]
            if load and load + pending.num_counted > self._options.samples_per_replica:
                return
            self._queue.popleft()
            if pending.unfinished:
                self._send(pending, replica)

    def _send(self, pending: PendingRequest, replica: int) -> None:
        pending.replica = replica
        pending.key = next(_KEYS)
        self._num_unfinished[replica] += pending.num_counted
        self._pending[pending.key] = pending
        self._post(replica, "submit", pending.key, pending.request)
        for sample in pending.waiting:
            sample.on_admitted()

    def _next_replica(self, home: int, request: Request) -> int:
        """Where a conversation continues: at `home`, which has it in its cache, or elsewhere.

        Elsewhere all its tokens are prefilled again. So it moves only if samples wait at home, none
        waits there, and home has more unfinished samples, by more than the prefill is worth.
        """
        other = self._least_loaded()
        num_more = self._num_unfinished[home] - self._num_unfinished[other]
        is_worth_it = num_more > 1 + len(request.prompt_ids) / TOKENS_PER_SAMPLE
        return other if is_worth_it and self._is_full(home) and not self._is_full(other) else home

    def _is_full(self, replica: int) -> bool:
        """Whether a further sample would wait, by the last report of the replica."""
        load = self.loads[replica]
        has_queue = load is not None and load.num_waiting > 0
        return has_queue or self._num_unfinished[replica] >= self._options.samples_per_replica

    def _least_loaded(self, exclude: int | None = None) -> int:
        working = [r for r in range(len(self._num_unfinished)) if not self._is_broken(r)]
        preferred = [r for r in working if r != exclude]
        return min(preferred or working, key=lambda r: self._num_unfinished[r])

    def _is_broken(self, replica: int) -> bool:
        return replica in self._lost or self._num_failures[replica] >= MAX_FAILURES

    def _post(self, replica: int, *message: Any) -> None:
        if self._is_lost:
            return
        try:
            self.engines.post(replica, *message)
        except RoleError:  # a rank is lost, and with it the whole run
            self._is_lost = True
            raise

    def _on_done(self, pending: PendingRequest, index: int, _: asyncio.Future) -> None:
        """One of the futures has a turn or an error, or was cancelled."""
        pending.samples.pop(index, None)
        pending.num_counted -= 1
        if pending.replica is None:
            return
        self._num_unfinished[pending.replica] -= 1
        if pending.key in self._pending and not pending.num_counted:
            del self._pending[pending.key]
            if any(future.cancelled() for future in pending.futures):
                self._post(pending.replica, "abort", pending.key)
        elif pending.key in self._pending:
            self._repeat_aborted(pending)  # the engine may have no other sample of it
        self._dispatch()

    def _receive(self, replica: int, kind: str, *args: Any) -> None:
        """Take the report of a replica: "answers", "failed" or "lost"."""
        if replica in self._lost:  # a report that was under way
            return
        handlers = {"answers": self._on_answers, "failed": self._on_failed, "lost": self._on_lost}
        try:
            handlers[kind](replica, *args)
        except Exception as error:  # any kind: the recipe has to see it
            self._on_error(error)

    def _on_answers(self, replica: int, report: EngineReport) -> None:
        self.version.advance(report.policy_version)
        self.loads[replica] = report.load
        if report.turns:
            self._num_failures[replica] = 0
        for key, index, turn in report.turns:
            if pending := self._pending.get(key):
                self._on_turn(pending, index, turn)
        for key, reason in report.refused:
            if pending := self._pending.get(key):
                pending.fail(ValueError, reason)
        group_numbers = set()
        for key, index, version in report.first_versions:
            if pending := self._pending.get(key):
                pending.first_versions[index] = version
                group_numbers.add(pending.group_number)
        if group_numbers:
            self._on_first_versions(group_numbers)

    def _on_turn(self, pending: PendingRequest, index: int, turn: Turn) -> None:
        if pending.futures[index].done():
            return
        if turn.finish_reason != "abort":
            pending.futures[index].set_result(turn)
            return
        # Not cancelled here: new weights arrived, and running samples restart.
        pending.aborted.add(index)
        pending.first_versions.pop(index, None)
        self._repeat_aborted(pending)

    def _repeat_aborted(self, pending: PendingRequest) -> None:
        """Send the request again once the engine has no sample of it left."""
        if not pending.aborted:  # nearly always; a list of the unfinished samples takes time
            return
        if (unfinished := pending.unfinished) and pending.aborted.issuperset(unfinished):
            self._resend(pending, pending.replica)

    def _on_failed(self, replica: int, keys: list[int], text: str) -> None:
        self._num_failures[replica] += 1
        self._check_any_works(text)
        for key in keys:
            pending = self._pending.get(key)
            if pending is None or not pending.unfinished:
                continue
            pending.num_failures += 1
            if pending.num_failures > self._options.max_retries:
                error = f"engines failed {pending.num_failures} times; the last error:\n{text}"
                pending.fail(RuntimeError, error)
            else:
                self._resend(pending, self._least_loaded(exclude=replica))

    def _on_lost(self, replica: int) -> None:
        self._lost.add(replica)
        self.loads[replica] = None
        self._check_any_works(f"the ranks of replica {replica} have ended")
        for pending in [p for p in self._pending.values() if p.replica == replica]:
            if pending.unfinished:
                self._resend(pending, self._least_loaded())

    def _on_all_lost(self, error: BaseException) -> None:
        """A rank is gone, and the cluster with it."""
        self._is_lost = True
        self._on_error(error)

    def _check_any_works(self, text: str) -> None:
        if all(map(self._is_broken, range(len(self._num_failures)))):
            self._is_lost = True
            raise RuntimeError(f"no engine works any more; the last error:\n{text}")

    def _resend(self, pending: PendingRequest, replica: int) -> None:
        """Send a request again for its unfinished samples, with the same random numbers."""
        del self._pending[pending.key]
        pending.request = replace(pending.request, wanted=tuple(pending.unfinished))
        pending.aborted.clear()
        pending.first_versions.clear()
        self._num_unfinished[pending.replica] -= pending.num_counted
        for sample in pending.waiting:
            sample.on_retry()
        self._send(pending, replica)
