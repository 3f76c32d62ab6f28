"""The coordinator's side of reward workers: `await workers.score(prompt, reply)`."""

import asyncio
import bdb
import inspect
import pickle
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from roll_lite.rewards.combine import is_async
from roll_lite.rewards.registry import import_ahead
from roll_lite.types import AsyncReward, Prompt, Reward, Score
from roll_lite.workers.failures import REWARDS, ErrorBudget, Failure, RewardsBroken, describe
from roll_lite.workers.link import SupervisorLink
from roll_lite.workers.waiting import WaitingCalls
from roll_lite.workers.worker import Work, WorkerLimits, checked, read_result, run_calls

CALLS = Work(
    words=REWARDS,
    loop=run_calls,
    read=read_result,
    jobs_per_worker=1,
    import_ahead=import_ahead,
)
MAX_PICKLED = 4096
"""Prompts that are kept as bytes."""
MAX_ASKED = 3
"""How often a call is made whose worker died for a reason that is not known."""
Answer = tuple[float, Score | Failure]
"""Seconds that the call took, and its result."""


class Inbox:
    """Sets futures of an event loop from any thread. Many results need one wake-up of the loop,
    which is a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._results: deque[tuple[asyncio.Future, Any]] = deque()
        self._is_called = False
        """Whether the loop is going to take what is there."""

    def put(self, future: asyncio.Future, result: Any) -> None:
        """Nothing happens if the future was cancelled, or the loop is closed."""
        self._results.append((future, result))
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop is closed: nothing waits for it
                self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_called = False  # first: what comes from now on calls again
        while self._results:
            future, result = self._results.popleft()
            if not future.done():
                future.set_result(result)


class RewardWorkers:
    """Processes that call the reward of a prompt's domain.

    A call that hangs, crashes or breaks a limit fails with RewardTimeout or RewardCrash, and its
    worker is replaced. An exception of the reward is a RewardError here, with its traceback as a
    note: only text and numbers come from a worker, so nothing of it runs in this process.
    Rewards that are `async def` are awaited in a thread of this process, many at once.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward | AsyncReward],
        *,
        num_workers: int = 4,
        max_waiting: int = 256,
        seconds: float = 10.0,
        memory_gib: float = 2.0,
        output_kib: int = 1024,
        max_error_share: float = 0.2,
    ):
        """Rewards must be importable by name; the limits are described in `WorkerLimits`.

        num_workers=0 calls rewards inline and without limits, for a debugger. Of async rewards
        at most `max_waiting` calls run at once. `score` raises RewardsBroken when more than
        max_error_share of the last 200 replies failed.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} must be 0 (inline) or above")
        limits = WorkerLimits(seconds=seconds, memory_gib=memory_gib, output_kib=output_kib)
        self._has_quit = False
        self._inbox: Inbox | None = None
        """Of the event loop that asked last."""
        self._pickled: dict[int, tuple[Prompt, bytes]] = {}
        """Prompts by id(prompt): the samples of a group share one. Each is kept beside its bytes,
        so that no other prompt gets its id."""
        self._rewards, self._budget = dict(rewards), ErrorBudget(max_error_share)
        self._supervisor = self._waiting = None
        self._async = {domain for domain in self._rewards if is_async(self._rewards[domain])}
        in_workers = {d: reward for d, reward in self._rewards.items() if d not in self._async}
        if num_workers and in_workers:
            self._supervisor = SupervisorLink(CALLS, in_workers, num_workers, limits)
        if num_workers and self._async:
            self._waiting = WaitingCalls(seconds, max_waiting)

    async def score(self, prompt: Prompt, reply: str) -> Score:
        """From any event loop. RewardsBroken ends the run; any other exception fails one call."""
        if prompt.domain not in self._rewards:
            raise ValueError(
                f"prompt {prompt.id} has domain={prompt.domain!r}, for which there is no reward; "
                f"known domains: {', '.join(sorted(self._rewards))}"
            )
        reward = self._rewards[prompt.domain]
        if self._supervisor is None and self._waiting is None:
            return await self._score_inline(reward, prompt, reply)
        if prompt.domain in self._async:
            seconds, result = await self._waiting.answer(reward, prompt, reply)
        else:
            seconds, result = await self._ask(prompt, reply)
        failure = result if isinstance(result, Failure) else None
        self._budget.record(prompt, reply, seconds, failure)
        if failure:
            raise failure.exception()
        return result

    def metrics(self) -> dict[str, float]:
        """Since the last call: calls, their seconds, failures, and workers that were replaced."""
        if self._supervisor:
            self._budget.count("replaced", self._supervisor.take_num_replaced())
        return self._budget.metrics()

    def close(self) -> None:
        """Kill all workers; running calls fail with RewardCrash."""
        for part in (self._supervisor, self._waiting):
            if part:
                part.close()

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _ask(self, prompt: Prompt, reply: str) -> Answer:
        """Again, if the worker died and the call is not known to be why. RewardsBroken if the
        supervisor dies again and again: a sample must not be lost through that."""
        for _ in range(MAX_ASKED):
            seconds, result = await self._submit(prompt, reply)
            if not isinstance(result, Failure) or result.culprit == "this":
                break
        else:
            if result.culprit == "supervisor":
                raise RewardsBroken(f"{result.text}, {MAX_ASKED} times during a call", result)
        return seconds, result

    def _submit(self, prompt: Prompt, reply: str) -> "asyncio.Future[Answer]":
        inbox = self._inbox_of(asyncio.get_running_loop())
        future: asyncio.Future[Answer] = inbox.loop.create_future()

        def resolve(seconds: float, result: Score | Failure) -> None:
            inbox.put(future, (seconds, result))

        self._supervisor.start(pickle.dumps((self._as_bytes(prompt), reply)), resolve)
        return future

    def _as_bytes(self, prompt: Prompt) -> bytes:
        """Pickled once for all samples of its group."""
        if (known := self._pickled.get(id(prompt))) is None:
            if len(self._pickled) == MAX_PICKLED:
                self._pickled.clear()
            known = self._pickled[id(prompt)] = prompt, pickle.dumps(prompt)
        return known[1]

    def _inbox_of(self, loop: asyncio.AbstractEventLoop) -> Inbox:
        inbox = self._inbox
        if inbox is None or inbox.loop is not loop:
            inbox = self._inbox = Inbox(loop)
        return inbox

    async def _score_inline(self, reward: Reward, prompt: Prompt, reply: str) -> Score:
        if self._has_quit:
            raise bdb.BdbQuit
        start = time.monotonic()
        try:
            score = reward(prompt, reply)
            score = checked(await score if inspect.isawaitable(score) else score)
        except bdb.BdbQuit:  # the user quits the debugger, and not only for this sample
            self._has_quit = True
            raise
        except Exception as error:  # user code may raise anything
            self._budget.record(prompt, reply, time.monotonic() - start, describe(error))
            raise
        self._budget.record(prompt, reply, time.monotonic() - start, None)
        return score
