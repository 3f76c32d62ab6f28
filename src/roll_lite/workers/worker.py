"""A worker process: runs the jobs that the supervisor sends, until it closes the channel.

A reward is called at once, and asks nothing. Episodes are coroutines in one event loop, which ask
the model through the coordinator (job.py).
"""

import asyncio
import inspect
import json
import os
import pickle
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any, NoReturn

from roll_lite.envs.env import Ending, OutOfTokens, Player
from roll_lite.types import FinishReason, Message, Prompt, Reward, Score, TurnResult, number
from roll_lite.workers.channel import (
    CONTINUES,
    ENDED,
    LEAVES,
    Outcome,
    Reply,
    WorkerEnd,
    checked,
    checked_ending,
    write_ask,
    write_end,
)
from roll_lite.workers.failures import Failure, cause_of, describe
from roll_lite.workers.state import (
    ProcessState,
    Running,
    WorkerOptions,
    exit_without_memory,
    flush_output,
    set_up,
)

MAX_THREADS = 8
"""Threads of `asyncio.to_thread` in a worker."""
_job_id: ContextVar[int] = ContextVar("job_id")
"""The episode that a task belongs to."""


def work_and_exit(
    channel: WorkerEnd,
    output: int,
    table: Mapping[str, Reward | Player],
    options: WorkerOptions,
    running: Running,
) -> NoReturn:
    """Run jobs until the channel closes. User code prints to the descriptor `output`."""
    running.belong_to_this_process()
    set_up(output, options.memory_gib)
    try:
        with suppress(EOFError, ConnectionError):
            Worker(channel, table, options, running).run()
    except BaseException:  # a fork of the supervisor must not go on as one
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Worker:
    def __init__(
        self,
        channel: WorkerEnd,
        table: Mapping[str, Reward | Player],
        options: WorkerOptions,
        running: Running,
    ):
        self._channel = channel
        self._table = table
        self._options = options
        self._running = running
        self._state: ProcessState | None = None
        """As the first reward found it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Runs episodes, from the first one on."""
        self._episodes: dict[int, _Episode] = {}

    def run(self) -> NoReturn:
        """Raises EOFError or ConnectionError when the channel is closed."""
        while True:
            if self._loop:
                self._loop.run_forever()  # until an order has come
            job_id, begins, message = self._receive()
            if not begins:
                if job_id in self._episodes:  # it may have ended meanwhile
                    self._episodes[job_id].receive(message)
                continue
            prompt, reply = message
            if reply is None:
                self._start_episode(job_id, prompt)
            else:
                self._score(job_id, prompt, reply)

    def _receive(self) -> tuple[int, bool, Any]:
        try:
            job_id, begins, payload = self._channel.receive()
            return job_id, begins, payload and pickle.loads(payload)
        except MemoryError:
            exit_without_memory()

    def _score(self, job_id: int, prompt: bytes, reply: str) -> None:
        """Call a reward, outside of any event loop and in the process state of the first one."""
        self._state = self._state or ProcessState()
        self._running.begin(job_id)
        outcome = _call_reward(self._table, prompt, reply)
        flush_output()
        self._running.end()
        state = ENDED if self._state.restore() else LEAVES
        self._channel.send((job_id, state, write_end(outcome)))

    def _start_episode(self, job_id: int, prompt: bytes) -> None:
        if self._loop is None:
            self._loop = self._make_loop()
        episode = _Episode(job_id, self._channel, self._options, self._running, self._loop)
        self._episodes[job_id] = episode
        task = episode.start(self._table, prompt)
        task.add_done_callback(lambda _: self._episodes.pop(job_id).finish())

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))
        loop.set_task_factory(lambda *task, **given: _marked_task(self._running, *task, **given))
        loop.add_reader(self._channel.fileno(), loop.stop)
        return loop


def _call_reward(rewards: Mapping[str, Reward], pickled: bytes, reply: str) -> Ending | Failure:
    try:
        prompt: Prompt = pickle.loads(pickled)
        score = rewards[prompt.domain](prompt, reply)
        if inspect.isawaitable(score):  # of a function that does not look like an `async def`
            score = asyncio.run(_wait_for(score))
        return Ending(reason="returned", score=checked(score))
    except MemoryError:
        exit_without_memory()
    except BaseException as error:  # user code may raise anything
        return describe(error)


async def _wait_for(score: Awaitable[Score | float]) -> Score | float:
    return await score


class _StepTimer:
    """Calls `expire` when a step waits too long. Time in which any episode's code ran is not
    counted: the supervisor watches that."""

    def __init__(
        self,
        seconds: float,
        running: Running,
        loop: asyncio.AbstractEventLoop,
        expire: Callable[[], None],
    ):
        self._seconds = seconds
        self._running = running
        self._loop = loop
        self._expire = expire
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.stop()
        self._start = self._idle_time
        self._handle = self._loop.call_later(self._seconds, self._check)

    def stop(self) -> None:
        if self._handle:
            self._handle.cancel()

    def _check(self) -> None:
        left = self._seconds - (self._idle_time - self._start)
        if left > 0:
            self._handle = self._loop.call_later(left, self._check)
        else:
            self._expire()

    @property
    def _idle_time(self) -> float:
        return self._loop.time() - self._running.busy


class _WorkerConversation:
    """The `Conversation` of an episode in a worker; it goes to the coordinator."""

    finish_reason: FinishReason = "stop"

    def __init__(self, send: Callable[[bytes], None], timer: _StepTimer):
        self._send = send
        self._timer = timer
        self._one_at_a_time = asyncio.Lock()
        self._num_asked = 0
        self._answer: asyncio.Future[Reply]
        self._known: list[Message] = []
        """Copies of the messages that the coordinator has."""
        self._results: list[TurnResult] = []

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        state: str | None = None,
    ) -> Message:
        options = {"tools": tools, "stop": stop, "max_tokens": max_tokens, "state": state}
        async with self._one_at_a_time:
            num_known = _num_equal(messages, self._known)
            new = json.dumps(list(messages[num_known:]))
            self._send(write_ask(num_known, new, options, self._results))
            self._known = self._known[:num_known] + json.loads(new)
            self._results = []
            self._num_asked += 1
            reply = await self._receive_reply()
        if reply.message is None:
            raise OutOfTokens(reply.problem)
        self._known.append(json.loads(json.dumps(reply.message)))
        self.finish_reason = reply.finish_reason
        return reply.message

    def result(self, reward: float = 0.0, **measurements: dict[str, float]) -> None:
        numbers = {
            kind: {name: number(name, value) for name, value in named.items()}
            for kind, named in measurements.items()
        }
        self._results.append(TurnResult(reward=number("reward", reward), measurements=numbers))

    def take_results(self) -> list[TurnResult]:
        results = self._results
        self._results = []
        return results

    def receive(self, reply: Reply) -> None:
        is_awaited = reply.number == self._num_asked - 1 and not self._answer.done()
        if is_awaited:  # unless the episode gave up waiting for it
            self._answer.set_result(reply)

    async def _receive_reply(self) -> Reply:
        self._answer = asyncio.get_running_loop().create_future()
        self._timer.stop()
        try:
            return await self._answer
        finally:
            self._timer.start()


def _num_equal(some: Sequence[Message], others: Sequence[Message]) -> int:
    """How many leading elements are equal."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(some), len(others)))


class _Episode:
    """One episode, until its outcome is sent."""

    def __init__(
        self,
        job_id: int,
        channel: WorkerEnd,
        options: WorkerOptions,
        running: Running,
        loop: asyncio.AbstractEventLoop,
    ):
        self._id = job_id
        self._channel = channel
        self._options = options
        self._loop = loop
        self._timer = _StepTimer(options.seconds, running, loop, self._expire)
        self._chat = _WorkerConversation(self._ask, self._timer)
        self._has_ended = self._is_late = False

    def start(self, players: Mapping[str, Player], pickled: bytes) -> asyncio.Task:
        context = copy_context()
        context.run(_job_id.set, self._id)
        self._task = context.run(self._loop.create_task, self._run(players, pickled))
        return self._task

    def receive(self, reply: Reply | None) -> None:
        """None cancels the episode."""
        if reply is None:
            self._cancel()
        else:
            self._chat.receive(reply)

    def finish(self) -> None:
        """When the task is done, which may have been cancelled before it began."""
        self._end(Failure("crash", "the episode was cancelled"))

    async def _run(self, players: Mapping[str, Player], pickled: bytes) -> None:
        self._timer.start()
        try:
            task: Prompt = pickle.loads(pickled)
            outcome = checked_ending(await players[task.domain](self._chat, task))
        except OutOfTokens as error:
            outcome = OutOfTokens(str(error))
        except BaseException as error:  # user code may raise anything
            outcome = self._failure(error)
        self._timer.stop()
        self._end(outcome)

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(cause_of(error), MemoryError):
            exit_without_memory()
        failure = describe(error)
        if not self._is_late:
            return failure
        text = f"{self._options.took_longer}\nIt waited here:\n{failure.text}"
        return Failure("timeout", text)

    def _expire(self) -> None:
        self._is_late = True
        self._cancel()

    def _cancel(self) -> None:
        """Its environment is closed then, for which it has the same time again."""
        self._timer.stop()
        self._task.cancel()
        text = f"{self._options.took_longer}, and did not end when it was cancelled"
        self._loop.call_later(self._options.seconds, self._end, Failure("timeout", text))

    def _ask(self, payload: bytes) -> None:
        if self._has_ended:
            raise RuntimeError("the episode is over, so the model cannot be asked any more")
        self._send(payload, has_ended=False)

    def _end(self, outcome: Outcome) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._send(write_end(outcome, self._chat.take_results()), has_ended=True)

    def _send(self, payload: bytes, *, has_ended: bool) -> None:
        flush_output()
        self._channel.send((self._id, ENDED if has_ended else CONTINUES, payload))


def _marked_task(
    running: Running, loop: asyncio.AbstractEventLoop, coroutine: Coroutine, **options: Any
) -> asyncio.Task:
    """A task of which `running` says when its code runs; also of tasks that an episode starts."""
    job_id = _job_id.get(None)
    if job_id is not None:
        coroutine = _Marked(coroutine, job_id, running)
    return asyncio.Task(coroutine, loop=loop, **options)


class _Marked(Coroutine):
    """A coroutine whose own code runs between `begin` and `end`; outside, it waits."""

    def __init__(self, coroutine: Coroutine, job_id: int, running: Running):
        self._coroutine = coroutine
        self._job_id = job_id
        self._running = running

    def send(self, value: Any) -> Any:
        return self._resume(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._resume(self._coroutine.throw, *error)

    def close(self) -> None:
        self._resume(self._coroutine.close)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._coroutine.__await__()

    def _resume(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self._running.begin(self._job_id)
        try:
            return method(*arguments)
        finally:
            self._running.end()
