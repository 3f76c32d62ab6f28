"""Worker processes for rewards, `await workers.score(prompt, reply)`, and for environments,
`await workers.play(chat, task)`.

Both are jobs (job.py): a job runs in one worker after another until it has an outcome.
"""

import asyncio
import bdb
import pickle
import time
from collections.abc import Awaitable, Mapping
from typing import Self

from roll_lite.checks import UserError
from roll_lite.envs.env import Conversation, Ending, OutOfTokens, Player
from roll_lite.envs.play import EnvError
from roll_lite.rewards.combine import is_async
from roll_lite.types import AsyncReward, Prompt, Reward, Score
from roll_lite.workers.async_rewards import AsyncRewards
from roll_lite.workers.channel import Outcome, checked_ending
from roll_lite.workers.failures import (
    ErrorBudget,
    Failure,
    RewardCrash,
    RewardError,
    RewardTimeout,
    TooManyFailures,
    describe,
)
from roll_lite.workers.job import Inbox, Job
from roll_lite.workers.link import SupervisorLink
from roll_lite.workers.loading import Packed, pack
from roll_lite.workers.state import WorkerOptions

MAX_PICKLED = 4096
"""Prompts that are kept as bytes."""
MAX_DEATHS = 3
"""How often a job is begun whose worker dies for a reason that is not known, or its supervisor."""
ENV_COUNTS = ("episodes", "seconds", "errors", "timeouts", "crashes", "replayed", "replaced")


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
        fatal: tuple[type[Exception], ...] = (),
    ):
        """`packed` is what workers run of the table; `fatal` errors end the run, not a job."""
        if num_workers < 0:
            raise UserError(f"num_workers={num_workers} must be 0 (inline) or above")
        self._table = dict(table)
        self._packed = packed
        self._num_workers = num_workers
        self._options = options
        self._budget = budget
        self._fatal = fatal
        self._supervisor: SupervisorLink | None = None
        self._is_entered = False
        self._has_quit = False
        self._inbox: Inbox | None = None
        """For the event loop that asked last."""
        self._pickled: dict[int, tuple[Prompt, bytes]] = {}
        """Prompts by id(prompt): the samples of a group share one. Each is kept beside its bytes,
        so that no other prompt gets its id."""

    def __enter__(self) -> Self:
        if self._packed:
            self._supervisor = SupervisorLink(self._packed, self._num_workers, self._options)
        self._is_entered = True
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
        if self._num_workers and not self._is_entered:
            raise RuntimeError(f"the {self._options.noun} workers do not run; enter them (`with`)")
        if prompt.domain not in self._table:
            raise UserError(
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
        except self._fatal:
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
                where = f"prompt {job.prompt.id}"
                self._budget.show_once(job.prompt, where, job.last_reply, outcome, "replaced")
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
        fatal: tuple[type[Exception], ...] = (),
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
        budget = ErrorBudget(max_error_share)
        super().__init__(rewards, packed, num_workers, options, budget, fatal)
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

    @property
    def has_idle(self) -> bool:
        """Whether a worker has no job, and none waits for it."""
        return self._supervisor is not None and self._supervisor.num_jobs < self._num_workers

    async def probe(self, prompt: Prompt, reply: str) -> Score | None:
        """A score that nobody waits for: counted nowhere, not tried again, None if it failed."""
        job = Job(prompt, reply=reply)
        payload = pickle.dumps((pickle.dumps(prompt), reply))
        inbox = Inbox(asyncio.get_running_loop())
        outcome = await job.run_once(self._supervisor, payload, inbox)
        return outcome.score if isinstance(outcome, Ending) else None

    def __enter__(self) -> Self:
        super().__enter__()
        if self._awaited:
            try:
                self._awaited.start()
            except BaseException:
                super().close()
                raise
        return self

    def close(self) -> None:
        super().close()
        if self._awaited:
            self._awaited.close()

    def _error(self, job: Job, failure: Failure) -> Exception:
        if failure.kind == "timeout":
            return RewardTimeout(failure.text, is_final=failure.is_final)
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
