"""Episodes in a worker process: coroutines in one event loop, which ask the model through the
coordinator (environments.py)."""

import asyncio
import json
import pickle
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from roll_lite.envs.env import Ending, OutOfTokens, Player
from roll_lite.envs.play import EnvError
from roll_lite.types import FinishReason, Message, Prompt, TurnResult
from roll_lite.workers.channel import CONTINUES, ENDED, WorkerEnd
from roll_lite.workers.failures import Failure, describe
from roll_lite.workers.worker import (
    Running,
    WorkerLimits,
    checked,
    exit_without_memory,
    flush_output,
    read_result,
)

MAX_THREADS = 8
"""Of `asyncio.to_thread`, in a worker."""
_job_id: ContextVar[int] = ContextVar("job_id")
"""The episode that a task belongs to."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What an episode says to the model."""

    num_known: int
    """Messages that are equal to the first ones of the last ask and its reply."""
    messages: list[Message]
    """The further ones."""
    options: dict[str, Any]
    results: list[TurnResult]
    """What came of the last reply."""


@dataclass(frozen=True, slots=True)
class Reply:
    number: int
    """Of the ask, from 0."""
    message: Message | None
    """None if there was no room for one."""
    finish_reason: FinishReason
    problem: str = ""
    """Why there was no room."""


@dataclass(frozen=True, slots=True)
class End:
    outcome: Ending | OutOfTokens | Failure
    results: list[TurnResult] = field(default_factory=list)


def write_ask(
    num_known: int, messages: str, options: dict[str, Any], results: list[TurnResult]
) -> bytes:
    """An Ask, of which the messages are JSON already."""
    rest = json.dumps({"num_known": num_known, "options": options, "results": _plain(results)})
    return f'{{"messages": {messages}, {rest[1:]}'.encode()


def _plain(results: list[TurnResult]) -> list[dict[str, Any]]:
    return [{"reward": each.reward, "measurements": each.measurements} for each in results]


def write_end(end: End) -> bytes:
    fields: dict[str, Any] = {"results": _plain(end.results)}
    if isinstance(end.outcome, Ending):
        fields["ending"] = asdict(end.outcome)
    elif isinstance(end.outcome, OutOfTokens):
        fields["out_of_tokens"] = str(end.outcome)
    else:
        fields |= {"failure": end.outcome.text, "kind": end.outcome.kind}
    return json.dumps(fields).encode()


def read_message(fields: Any) -> Ask | End:
    """Raises an exception for what the two above do not write."""
    results = [TurnResult(**result) for result in fields["results"]]
    if "messages" not in fields:
        return End(_read_outcome(fields), results)
    stop = fields["options"]["stop"]
    options = fields["options"] | {"stop": tuple(stop) if isinstance(stop, list) else stop}
    messages = [dict(message) for message in fields["messages"]]
    return Ask(int(fields["num_known"]), messages, options, results)


def _read_outcome(fields: dict[str, Any]) -> Ending | OutOfTokens | Failure:
    if "failure" in fields:
        return read_result(fields)
    if "out_of_tokens" in fields:
        return OutOfTokens(str(fields["out_of_tokens"]))
    ending = fields["ending"]
    score = ending["score"] and read_result(ending["score"])
    return Ending(reason=str(ending["reason"]), score=score)


def run_episodes(
    channel: WorkerEnd, players: Mapping[str, Player], limits: WorkerLimits, running: Running
) -> None:
    """Play all episodes that come, at the same time."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))
    loop.set_task_factory(lambda *task, **options: _marked_task(running, *task, **options))
    episodes: dict[int, _Episode] = {}

    def receive() -> None:
        try:
            job_id, begins, payload = channel.receive()
        except (EOFError, ConnectionError):
            loop.stop()
            return
        except MemoryError:
            exit_without_memory()
        if begins:
            episodes[job_id] = _Episode(job_id, channel, limits.seconds, running, loop)
            task = episodes[job_id].start(players, payload)
            task.add_done_callback(lambda _: episodes.pop(job_id).finish())
        elif job_id in episodes:  # it may have ended meanwhile
            episodes[job_id].receive(payload)

    loop.add_reader(channel.fileno(), receive)
    loop.run_forever()


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
        self._seconds, self._running, self._loop, self._expire = seconds, running, loop, expire
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
    """The `Conversation` of an episode in a worker."""

    finish_reason: FinishReason = "stop"

    def __init__(self, send: Callable[[bytes], None], timer: _StepTimer):
        self._send, self._timer = send, timer
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
            self._known, self._results = self._known[:num_known] + json.loads(new), []
            self._num_asked += 1
            reply = await self._receive_reply()
        if reply.message is None:
            raise OutOfTokens(reply.problem)
        self._known.append(json.loads(json.dumps(reply.message)))
        self.finish_reason = reply.finish_reason
        return reply.message

    def result(self, reward: float = 0.0, **measurements: dict[str, float]) -> None:
        numbers = {
            kind: {name: float(value) for name, value in named.items()}
            for kind, named in measurements.items()
        }
        self._results.append(TurnResult(reward=float(reward), measurements=numbers))

    def take_results(self) -> list[TurnResult]:
        results, self._results = self._results, []
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
        seconds: float,
        running: Running,
        loop: asyncio.AbstractEventLoop,
    ):
        self._id, self._channel, self._seconds, self._loop = job_id, channel, seconds, loop
        self._timer = _StepTimer(seconds, running, loop, self._expire)
        self._chat = _WorkerConversation(self._ask, self._timer)
        self._has_ended = self._is_late = False

    def start(self, players: Mapping[str, Player], payload: bytes) -> asyncio.Task:
        context = copy_context()
        context.run(_job_id.set, self._id)
        self._task = context.run(self._loop.create_task, self._run(players, payload))
        return self._task

    def receive(self, payload: bytes | None) -> None:
        if payload is None:
            self._cancel()
        else:
            self._chat.receive(pickle.loads(payload))

    def finish(self) -> None:
        """When the task is done, which may have been cancelled before it began."""
        self._end(Failure("crash", "the episode was cancelled"))

    async def _run(self, players: Mapping[str, Player], payload: bytes) -> None:
        self._timer.start()
        try:
            task: Prompt = pickle.loads(payload)
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
        failure = describe(cause_of(error))
        if not self._is_late:
            return failure
        return Failure("timeout", f"{self._late_text}\nIt waited here:\n{failure.text}")

    @property
    def _late_text(self) -> str:
        return f"the environment took longer than env_seconds={self._seconds}"

    def _expire(self) -> None:
        self._is_late = True
        self._cancel()

    def _cancel(self) -> None:
        """Its environment is closed then, for which it has the same time again."""
        self._timer.stop()
        self._task.cancel()
        failure = Failure("timeout", f"{self._late_text}, and did not end when it was cancelled")
        self._loop.call_later(self._seconds, self._end, failure)

    def _ask(self, payload: bytes) -> None:
        if self._has_ended:
            raise RuntimeError("the episode is over, so the model cannot be asked any more")
        self._send(payload, has_ended=False)

    def _end(self, outcome: Ending | OutOfTokens | Failure) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._send(write_end(End(outcome, self._chat.take_results())), has_ended=True)

    def _send(self, payload: bytes, *, has_ended: bool) -> None:
        flush_output()
        self._channel.send((self._id, ENDED if has_ended else CONTINUES, payload))


def checked_ending(ending: Ending) -> Ending:
    return replace(ending, score=checked(ending.score)) if ending.score is not None else ending


def cause_of(error: BaseException) -> BaseException:
    """The environment's own error."""
    return error.__cause__ or error if isinstance(error, EnvError) else error


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
        self._coroutine, self._job_id, self._running = coroutine, job_id, running

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
