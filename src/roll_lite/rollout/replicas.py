"""The engine replicas of a role: who answers which request, and what becomes of it.

Everything here runs in the coordinator's event loop. A request goes to the replica with the fewest
unfinished samples, as soon as that one has room. What a replica fails is asked of another; one that
fails time and again is left alone.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from roll_lite.cluster.errors import RoleError
from roll_lite.cluster.role import RoleHandle
from roll_lite.engine.request import Request
from roll_lite.engine.service import EngineReport, Load
from roll_lite.rollout.loops import LoopThread, PumpedLoop
from roll_lite.rollout.options import RolloutOptions

MAX_FAILURES = 3  # of a replica, one after the other
_KEYS = count(1)  # never the same twice: engines outlive those who ask them
OnSample = Callable[[int], None]
"""Told the index of a sample in its request."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request under way. Each sample has a future; a cancelled one is waited for no more."""

    request: Request
    futures: list[asyncio.Future]
    on_given: OnSample
    """Told of every sample that an engine has now: it no longer waits for room."""
    on_retry: OnSample
    """Told of a sample that has to be generated again."""
    replica: int | None = None
    """Who has it; None while it waits for room."""
    key: int = 0
    num_failures: int = 0
    num_counted: int = 0
    """Samples that count as its replica's load."""
    aborted: set[int] = field(default_factory=set)
    """Samples that the engine aborted, unasked."""
    begun: dict[int, int] = field(default_factory=dict)
    """By sample: the policy version of its first token, as far as the engine has said."""

    @property
    def unfinished(self) -> list[int]:
        return [i for i, future in enumerate(self.futures) if not future.done()]


class Replicas:
    def __init__(
        self,
        engines: RoleHandle,
        options: RolloutOptions,
        on_fault: Callable[[BaseException], None],
        on_begun: Callable[[], None] = lambda: None,
    ):
        """`on_fault` is told when no replica works any more, or a rank is lost.

        `on_begun` is called when a replica has said what goes on under a new policy version.
        """
        self._engines = engines
        self._options = options
        self._on_fault, self._on_begun = on_fault, on_begun
        num_replicas = engines.role.num_replicas
        self.policy_version = 0
        """The newest of which an engine has reported."""
        self.loads: list[Load | None] = [None] * num_replicas
        self.is_lost = False
        """Nothing can be posted any more."""
        self._queue: deque[Asked] = deque()
        self._asked: dict[int, Asked] = {}
        self._num_unfinished = [0] * num_replicas
        self._num_failures = [0] * num_replicas

    def ask(
        self,
        request: Request,
        futures: list[asyncio.Future],
        on_given: OnSample = lambda index: None,
        on_retry: OnSample = lambda index: None,
        near: Asked | None = None,
    ) -> Asked:
        """Have a request answered into the futures.

        What goes on from an earlier request stays `near` it, where its prefix is in the cache.
        """
        asked = Asked(request, futures, on_given, on_retry, num_counted=len(futures))
        for future in futures:
            future.add_done_callback(lambda _: self._on_done(asked))
        if near is not None and not self._is_broken(near.replica):
            self._give(asked, near.replica)
        else:
            self._queue.append(asked)
            self._dispatch()
        return asked

    def listen(self, loop: LoopThread | PumpedLoop) -> None:
        """Have what the engines report brought into the event loop."""
        self._engines.listen(
            lambda *report: loop.call(self._on_report, *report),
            lambda error: loop.call(self._lose, error),
        )

    def _on_report(self, replica: int, kind: str, *args: Any) -> None:
        try:
            if kind == "failed":
                self._on_failed(replica, *args)
            else:
                self._on_answers(replica, *args)
        except Exception as error:  # of any kind: the recipe has to hear of it
            self._on_fault(error)

    def _lose(self, error: BaseException) -> None:
        """A rank is gone, and with it the cluster."""
        self.is_lost = True
        self._on_fault(error)

    def _dispatch(self) -> None:
        """Give waiting requests to replicas with room, first come first served."""
        while self._queue and not self.is_lost:
            replica, asked = self._choose(), self._queue[0]
            load = self._num_unfinished[replica]
            if load and load + asked.num_counted > self._options.samples_per_replica:
                return
            self._queue.popleft()
            if asked.unfinished:
                self._give(asked, replica)

    def _give(self, asked: Asked, replica: int) -> None:
        asked.replica = replica
        self._num_unfinished[replica] += asked.num_counted
        self._submit(asked)
        for index in asked.unfinished:
            asked.on_given(index)

    def _choose(self, but: int | None = None) -> int:
        well = [r for r in range(len(self._num_unfinished)) if not self._is_broken(r)]
        others = [r for r in well if r != but]
        return min(others or well, key=lambda r: self._num_unfinished[r])

    def _is_broken(self, replica: int) -> bool:
        return self._num_failures[replica] >= MAX_FAILURES

    def _submit(self, asked: Asked) -> None:
        asked.key = next(_KEYS)
        self._asked[asked.key] = asked
        self._post(asked.replica, "submit", asked.key, asked.request)

    def _post(self, replica: int, *letter: Any) -> None:
        if self.is_lost:
            return
        try:
            self._engines.post(replica, *letter)
        except RoleError as error:  # a rank is lost, and with it the whole run
            self.is_lost = True
            self._on_fault(error)

    def _on_done(self, asked: Asked) -> None:
        """One of its futures has a turn, an error, or is waited for no more."""
        asked.num_counted -= 1
        if asked.replica is None:
            return
        self._num_unfinished[asked.replica] -= 1
        if asked.key in self._asked and not asked.unfinished:
            del self._asked[asked.key]
            if any(future.cancelled() for future in asked.futures):
                self._post(asked.replica, "abort", asked.key)
        elif asked.key in self._asked:
            self._repeat_aborted(asked)  # others of it may be all that the engine still had
        self._dispatch()

    def _on_answers(self, replica: int, answers: EngineReport) -> None:
        self.policy_version = max(self.policy_version, answers.policy_version)
        self.loads[replica] = answers.load
        if answers.turns:
            self._num_failures[replica] = 0
        for key, index, turn in answers.turns:
            asked = self._asked.get(key)
            if asked is None or asked.futures[index].done():
                continue
            if turn.finish_reason == "abort":
                self._on_abort(asked, index)
            else:
                asked.futures[index].set_result(turn)
        for key, why in answers.refused:
            if asked := self._asked.get(key):
                self._fail(asked, ValueError, why)
        for key, index, version in answers.first_versions:
            if asked := self._asked.get(key):
                asked.begun[index] = version
        if answers.first_versions:
            self._on_begun()

    def _on_abort(self, asked: Asked, index: int) -> None:
        """Nobody here wanted it: new weights came, and running samples begin again."""
        asked.aborted.add(index)
        asked.begun.pop(index, None)
        self._repeat_aborted(asked)

    def _repeat_aborted(self, asked: Asked) -> None:
        """Ask again once the engine has nothing of the request left."""
        if asked.unfinished and asked.aborted.issuperset(asked.unfinished):
            self._ask_again(asked, asked.replica)

    def _on_failed(self, replica: int, keys: list[int], text: str) -> None:
        self._num_failures[replica] += 1
        if all(map(self._is_broken, range(len(self._num_failures)))):
            self.is_lost = True
            error = f"no engine replica works any more; the last said:\n{text}"
            self._on_fault(RuntimeError(error))
            return
        for key in keys:
            asked = self._asked.get(key)
            if asked is None or not asked.unfinished:
                continue
            asked.num_failures += 1
            if asked.num_failures > self._options.max_retries:
                error = f"engines failed {asked.num_failures} times; the last said:\n{text}"
                self._fail(asked, RuntimeError, error)
            else:
                self._ask_again(asked, self._choose(but=replica))

    def _fail(self, asked: Asked, kind: type[Exception], text: str) -> None:
        for index in asked.unfinished:
            asked.futures[index].set_exception(kind(text))

    def _ask_again(self, asked: Asked, replica: int) -> None:
        """For the samples that nobody has; they get the same random numbers as before."""
        del self._asked[asked.key]
        asked.request = replace(asked.request, wanted=tuple(asked.unfinished))
        asked.aborted.clear()
        asked.begun.clear()
        self._num_unfinished[asked.replica] -= asked.num_counted
        for index in asked.unfinished:
            asked.on_retry(index)
        self._give(asked, replica)
