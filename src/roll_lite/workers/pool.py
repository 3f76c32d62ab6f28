"""Worker processes for rewards, `await workers.score(prompt, reply)`, and for environments,
`await workers.play(chat, task)`.

Both are jobs. One that is an episode asks the model through here. What was asked and replied is
kept: if its worker dies through another episode, a new worker plays it again up to where it was.
"""

import asyncio
import bdb
import inspect
import pickle
import time
from collections import deque
from collections.abc import Awaitable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from roll_lite.envs.env import Conversation, Ending, OutOfTokens, Player
from roll_lite.envs.play import EnvError
from roll_lite.rewards.combine import is_async
from roll_lite.types import AsyncReward, FinishReason, Message, Prompt, Reward, Score, TurnResult
from roll_lite.workers.async_rewards import AsyncRewards
from roll_lite.workers.channel import Ask, End, Outcome, Reply, checked_ending
from roll_lite.workers.failures import (
    ErrorBudget,
    Failure,
    RewardCrash,
    RewardError,
    RewardTimeout,
    TooManyFailures,
    describe,
)
from roll_lite.workers.link import SupervisorLink
from roll_lite.workers.loading import Packed, pack
from roll_lite.workers.state import WorkerOptions

MAX_PICKLED = 4096
"""Prompts that are kept as bytes."""
MAX_DEATHS = 3
"""How often a job is begun whose worker dies for a reason that is not known, or its supervisor."""
ENV_COUNTS = ("episodes", "seconds", "errors", "timeouts", "crashes", "replayed", "replaced")


class Mailbox:
    """Messages for one reader; an asyncio.Queue takes much longer."""

    def __init__(self):
        self._messages: list[Any] = []
        self._reader: asyncio.Future | None = None

    def put(self, message: Any) -> None:
        self._messages.append(message)
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Any:
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._messages.pop(0)


class Inbox:
    """Puts messages into mailboxes of an event loop, from any thread. Many messages need one
    wake-up of the loop, which is a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._messages: deque[tuple[Mailbox, Any]] = deque()
        self._is_called = False
        """Whether the loop is going to take what is there."""

    def put(self, mailbox: Mailbox, message: Any) -> None:
        """Nothing happens if the loop is closed."""
        self._messages.append((mailbox, message))
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop is closed: nothing waits for it
                self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_called = False  # first: what comes from now on calls again
        while self._messages:
            mailbox, message = self._messages.popleft()
            mailbox.put(message)


class Job(Mailbox):
    """A reply to score or, with a conversation, an episode to play. It outlives its workers, whose
    messages it gets."""

    def __init__(
        self, prompt: Prompt, *, reply: str | None = None, chat: Conversation | None = None
    ):
        super().__init__()
        self.prompt = prompt
        self.reply = reply
        self._chat = chat
        self.key: Hashable = object() if reply is None else (prompt.id, reply)
        """Equal when the coordinator scores a reply again."""
        self.last_reply = reply or ""
        self.num_turns = 0
        self.seconds = 0.0
        """Spent in the reward or the environment."""
        self.chat_seconds = 0.0
        self.chat_error: BaseException | None = None
        """What the conversation raised, if it is broken."""
        self._turns: list[tuple[_Asked, Reply]] = []
        """What a worker asked, and the replies that it would get again."""
        self._out_of_tokens: OutOfTokens | None = None

    @property
    def place(self) -> str:
        """Where in an episode it is, for messages."""
        return f", seed {self.prompt.seed}, turn {self.num_turns}" if self._chat else ""

    async def call(self, function: Reward | AsyncReward | Player) -> Ending:
        """Run it in this process."""
        if self._chat:
            return await function(self, self.prompt)
        score = function(self.prompt, self.reply)
        score = await score if inspect.isawaitable(score) else score
        return Ending(reason="returned", score=Score.of(score))

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Message:
        """Ask the model: a job is the Conversation of its player in this process."""
        start = time.monotonic()
        try:
            reply = await self._chat(messages, **options)
        except OutOfTokens:
            raise
        except BaseException as error:
            self.chat_error = error
            raise
        finally:
            self.chat_seconds += time.monotonic() - start
        self.num_turns += 1
        self.last_reply = reply["content"]
        return reply

    @property
    def finish_reason(self) -> FinishReason:
        return self._chat.finish_reason

    def result(self, reward: float = 0.0, **measurements: dict[str, float]) -> None:
        self._chat.result(reward, **measurements)

    async def run_once(self, link: SupervisorLink, payload: bytes, inbox: Inbox) -> Outcome:
        """Run it in a worker and answer what that asks, until it has an outcome or died."""
        known: list[Message] = []
        num_replies = 0
        job_id = link.start(payload, lambda *message: inbox.put(self, message))
        try:
            while isinstance(message := await self._next_message(), Ask):
                messages = known[: message.num_known] + message.messages
                asked = _Asked(messages, message.options, message.results)
                if num_replies == len(self._turns):
                    self._turns.append((asked, await self._ask(num_replies, asked)))
                before, reply = self._turns[num_replies]
                if asked != before:
                    link.send(job_id, None)
                    return _not_reproducible(num_replies, f"it said {asked}, not {before}")
                link.send(job_id, pickle.dumps(reply))
                known = [*messages, reply.message]
                num_replies += 1
        except BaseException:  # cancelled, or the conversation is broken
            link.send(job_id, None)
            raise
        return message if isinstance(message, Failure) else self._end(message, num_replies)

    async def _next_message(self) -> Ask | End | Failure:
        seconds, message = await self.get()
        self.seconds += seconds
        return message

    def _end(self, end: End, num_replies: int) -> Outcome:
        outcome = end.outcome
        if num_replies < len(self._turns):
            shown = outcome.text if isinstance(outcome, Failure) else repr(outcome)
            return _not_reproducible(num_replies, f"it ended: {shown}")
        self._report(end.results)
        is_out = isinstance(outcome, OutOfTokens)
        return (self._out_of_tokens or outcome) if is_out else outcome

    async def _ask(self, number: int, asked: "_Asked") -> Reply:
        self._report(asked.results)
        try:
            message = await self(asked.messages, **asked.options)
        except OutOfTokens as error:
            self._out_of_tokens = error
            return Reply(number, None, "length", str(error))
        return Reply(number, message, self.finish_reason)

    def _report(self, results: list[TurnResult]) -> None:
        for result in results:
            self.result(result.reward, **result.measurements)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What an episode asked: a replay must ask the same."""

    messages: list[Message]
    options: dict[str, Any]
    results: list[TurnResult]

    def __str__(self) -> str:
        return f"{self.messages[-1:]!r:.300} and reported {self.results!r:.300}"


def _not_reproducible(number: int, what: str) -> Failure:
    return Failure(
        "lost",
        "its worker died through another episode, and it cannot be played again: after the same "
        f"{number} replies {what}. Everything random in an environment must come from the seed",
    )


class Workers:
    """Processes that run the function of a prompt's domain: a reward, or what plays an environment.

    Enter it to start them. A job that hangs, crashes or breaks a limit fails, and its worker is
    replaced; other jobs of that worker are repeated in another one. Only text and numbers come from
    a worker, so nothing of it runs in this process.
    """

    def __init__(
        self,
        table: Mapping[str, Reward | AsyncReward | Player],
        packed: Packed | None,
        num_workers: int,
        options: WorkerOptions,
        budget: ErrorBudget,
    ):
        """`packed` is what workers run of the table."""
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} must be 0 (inline) or above")
        self._table = dict(table)
        self._packed = packed
        self._num_workers = num_workers
        self._options = options
        self._budget = budget
        self._supervisor: SupervisorLink | None = None
        self._has_quit = False
        self._inbox: Inbox | None = None
        """For the event loop that asked last."""
        self._pickled: dict[int, tuple[Prompt, bytes]] = {}
        """Prompts by id(prompt): the samples of a group share one. Each is kept beside its bytes,
        so that no other prompt gets its id."""

    def __enter__(self) -> Self:
        if self._packed:
            self._supervisor = SupervisorLink(self._packed, self._num_workers, self._options)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers; running jobs fail."""
        if self._supervisor:
            self._supervisor.close()

    def metrics(self) -> dict[str, float]:
        """Jobs, their seconds, failures, and workers that were replaced, since the last call."""
        if self._supervisor:
            self._budget.count("replaced", self._supervisor.take_num_replaced())
        return self._budget.metrics()

    async def _run(self, job: Job) -> Outcome | Exception:
        if not self._num_workers:
            return await self._run_inline(job)
        if self._supervisor is None:
            raise RuntimeError(f"the {self._options.noun} workers do not run; enter them (`with`)")
        return await self._run_in_worker(job)

    def _result(self, job: Job, outcome: Outcome | Exception) -> Ending:
        """Count a job. TooManyFailures ends the run; any other exception fails the job."""
        failure = None
        if isinstance(outcome, Failure):
            failure = outcome
            outcome = self._error(job, failure)
        elif isinstance(outcome, Exception) and not isinstance(outcome, OutOfTokens):
            failure = describe(outcome)
        self._budget.record(
            job.prompt, job.last_reply, job.seconds, failure, place=job.place, key=job.key
        )
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _error(self, job: Job, failure: Failure) -> Exception:
        """What a caller gets of the failure of a job in a worker."""
        raise NotImplementedError

    def _check_domain(self, prompt: Prompt) -> None:
        if prompt.domain not in self._table:
            raise ValueError(
                f"prompt {prompt.id} has domain={prompt.domain!r}, for which there is no "
                f"{self._options.noun}; known domains: {', '.join(sorted(self._table))}"
            )

    async def _run_inline(self, job: Job) -> Ending | Exception:
        if self._has_quit:
            raise bdb.BdbQuit
        start = time.monotonic()
        try:
            return checked_ending(await job.call(self._table[job.prompt.domain]))
        except bdb.BdbQuit:  # the user quits the debugger, and not only for this sample
            self._has_quit = True
            raise
        except Exception as error:  # user code may raise anything
            if job.chat_error and job.chat_error in (error, error.__cause__):
                raise job.chat_error  # noqa: B904
            return error
        finally:
            job.seconds = time.monotonic() - start - job.chat_seconds

    async def _run_in_worker(self, job: Job) -> Outcome:
        """Again, if the worker died and the job is not known to be why. TooManyFailures if the
        supervisor dies again and again: a sample must not be lost through that."""
        payload = pickle.dumps((self._as_bytes(job.prompt), job.reply))
        inbox = self._inbox_of(asyncio.get_running_loop())
        num_deaths = 0
        while True:
            outcome = await job.run_once(self._supervisor, payload, inbox)
            if not isinstance(outcome, Failure) or outcome.culprit == "this":
                return outcome
            if outcome.culprit != "other":
                num_deaths += 1
                self._budget.show_once(
                    job.prompt, f"prompt {job.prompt.id}", job.last_reply, outcome
                )
            if num_deaths == MAX_DEATHS:
                if outcome.culprit == "supervisor":
                    raise TooManyFailures(f"{outcome.text}, {MAX_DEATHS} times", outcome)
                return outcome
            self._budget.count("replayed")

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


class RewardWorkers(Workers):
    """Processes that call rewards, one by one.

    A call fails with RewardTimeout or RewardCrash. An exception of the reward is a RewardError
    here, with its traceback as a note. Rewards that are `async def` are awaited in a thread of this
    process, many at once.
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
        """Rewards must be importable by name; the limits are described in `WorkerOptions`.

        num_workers=0 calls rewards inline and without limits, for a debugger. Of async rewards
        at most `max_waiting` calls run at once. `score` raises TooManyFailures when more than
        max_error_share of the last 200 replies failed.
        """
        options = WorkerOptions(
            noun="reward", prefix="reward", jobs_per_worker=1,
            seconds=seconds, memory_gib=memory_gib, output_kib=output_kib,
        )  # fmt: skip
        in_workers = {}
        self._async = {}
        for domain, reward in rewards.items():
            (self._async if is_async(reward) else in_workers)[domain] = reward
        remedy = (
            "define it with def at the top level of a file, name it in INLINE, or run with "
            "reward_workers=0"
        )
        packed = pack(in_workers, "rewards", remedy) if num_workers and in_workers else None
        super().__init__(rewards, packed, num_workers, options, ErrorBudget(max_error_share))
        self._awaited = AsyncRewards(options, max_waiting) if num_workers and self._async else None

    async def score(self, prompt: Prompt, reply: str) -> Score:
        """From any event loop."""
        self._check_domain(prompt)
        job = Job(prompt, reply=reply)
        if self._awaited and prompt.domain in self._async:
            reward = self._async[prompt.domain]
            job.seconds, outcome = await self._awaited.answer(reward, prompt, reply)
        else:
            outcome = await self._run(job)
        return self._result(job, outcome).score

    def __enter__(self) -> Self:
        super().__enter__()
        if self._awaited:
            self._awaited.start()
        return self

    def close(self) -> None:
        super().close()
        if self._awaited:
            self._awaited.close()

    def _error(self, job: Job, failure: Failure) -> Exception:
        if failure.kind == "timeout":
            return RewardTimeout(failure.text)
        if failure.kind == "crash":
            return RewardCrash(failure.text)
        error = RewardError(failure.summary)
        error.add_note(f"In a reward worker:\n{failure.text}")
        return error


class EnvWorkers(Workers):
    """Processes that play episodes, many in each.

    An episode fails with EnvError. The other ones of its worker are played again in another one,
    with the replies that they had.
    """

    def __init__(
        self,
        players: Mapping[str, Player],
        *,
        num_workers: int = 4,
        seconds: float = 10.0,
        memory_gib: float = 2.0,
        output_kib: int = 1024,
        max_error_share: float = 0.2,
    ):
        """Players by domain, made with `envs.play.player` of environments that are importable by
        name; the limits are described in `WorkerOptions`.

        num_workers=0 plays inline and without limits, for a debugger. `play` raises TooManyFailures
        when more than max_error_share of the last 200 episodes failed.
        """
        options = WorkerOptions(
            noun="environment", prefix="env", jobs_per_worker=None,
            seconds=seconds, memory_gib=memory_gib, output_kib=output_kib,
        )  # fmt: skip
        remedy = "define it with class or def at the top level of a file, or run with env_workers=0"
        packed = pack(players, "players", remedy) if num_workers else None
        budget = ErrorBudget(
            max_error_share, noun="environment", jobs="episodes", share_option="env_error_share",
            prefix="env", metrics=ENV_COUNTS,
        )  # fmt: skip
        super().__init__(players, packed, num_workers, options, budget)

    def play(self, chat: Conversation, task: Prompt) -> Awaitable[Ending]:
        """One episode, from any event loop. What `chat` raises is raised here."""
        self._check_domain(task)
        return self._play(Job(task, chat=chat))

    async def _play(self, job: Job) -> Ending:
        return self._result(job, await self._run(job))

    def _error(self, job: Job, failure: Failure) -> Exception:
        place = f"{job.prompt.domain}, seed {job.prompt.seed}, turn {job.num_turns}"
        error = EnvError(f"{place}: {failure.summary}")
        error.add_note(f"In an environment worker:\n{failure.text}")
        return error
