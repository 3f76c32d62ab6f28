"""The coordinator's side of environment workers: `await workers.play(chat, task)`.

An episode runs in a worker and asks the model through here. What was asked and replied is kept: if
the worker dies through another episode, a new worker plays this one again up to where it was.
"""

import asyncio
import bdb
import itertools
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from roll_lite.envs.env import Conversation, Ending, OutOfTokens, Player
from roll_lite.envs.play import EnvError
from roll_lite.types import FinishReason, Message, Prompt, TurnResult
from roll_lite.workers.episodes import (
    Ask,
    End,
    Reply,
    cause_of,
    checked_ending,
    read_message,
    run_episodes,
)
from roll_lite.workers.failures import ENVIRONMENTS, EnvsBroken, ErrorBudget, Failure, describe
from roll_lite.workers.link import SupervisorLink
from roll_lite.workers.worker import Work, WorkerLimits

EPISODES = Work(words=ENVIRONMENTS, loop=run_episodes, read=read_message, jobs_per_worker=None)
MAX_UNEXPLAINED = 2
"""How often an episode is played again after its worker died and no episode's code was running, or
the supervisor died."""
Outcome = Ending | OutOfTokens | Failure


class EnvWorkers:
    """Processes that play episodes, many in each.

    An episode that hangs, crashes or breaks a limit fails with EnvError, and its worker is
    replaced. The worker's other episodes are played again in another one, with the replies that
    they had.
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
        name; the limits are described in `WorkerLimits`.

        num_workers=0 plays inline and without limits, for a debugger. `play` raises EnvsBroken
        when more than max_error_share of the last 200 episodes failed.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} must be 0 (inline) or above")
        limits = WorkerLimits(seconds=seconds, memory_gib=memory_gib, output_kib=output_kib)
        self._players, self._budget = dict(players), ErrorBudget(max_error_share, ENVIRONMENTS)
        self._numbers, self._has_quit = itertools.count(), False
        self._supervisor: SupervisorLink | None = None
        if num_workers:
            self._supervisor = SupervisorLink(EPISODES, self._players, num_workers, limits)

    def play(self, chat: Conversation, task: Prompt) -> Awaitable[Ending]:
        """One episode, from any event loop. EnvsBroken ends the run and EnvError fails one episode;
        what `chat` raises is raised here."""
        if task.domain not in self._players:
            raise ValueError(
                f"prompt {task.id} has domain={task.domain!r}, for which there is no environment; "
                f"known domains: {', '.join(sorted(self._players))}"
            )
        return self._play(_Watched(chat), task)

    async def _play(self, watched: "_Watched", task: Prompt) -> Ending:
        start = time.monotonic()
        if self._supervisor is None:
            outcome = await self._play_inline(watched, task)
        else:
            outcome = await self._play_in_worker(watched, task)
        seconds = time.monotonic() - start - watched.seconds
        return self._ending(outcome, watched, task, seconds)

    def metrics(self) -> dict[str, float]:
        """Since the last call: episodes, the seconds they waited for their environments, failures,
        how often one was played again, and workers that were replaced."""
        if self._supervisor:
            self._budget.count("replaced", self._supervisor.take_num_replaced())
        return self._budget.metrics()

    def close(self) -> None:
        """Kill all workers; running episodes fail."""
        if self._supervisor:
            self._supervisor.close()

    def __enter__(self) -> "EnvWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _play_in_worker(self, chat: "_Watched", task: Prompt) -> Outcome:

        def warn(failure: Failure) -> None:
            self._budget.show_once(task, f"prompt {task.id}", chat.last_reply, failure)

        episode = _Episode(self._supervisor, chat, task, warn)
        try:
            return await episode.play()
        finally:
            self._budget.count("replayed", episode.num_replays)

    async def _play_inline(self, chat: "_Watched", task: Prompt) -> Ending | Exception:
        if self._has_quit:
            raise bdb.BdbQuit
        try:
            return checked_ending(await self._players[task.domain](chat, task))
        except OutOfTokens as error:
            return error
        except bdb.BdbQuit:  # the user quits the debugger, and not only for this sample
            self._has_quit = True
            raise
        except Exception as error:  # user code may raise anything
            if chat.error and chat.error in (error, error.__cause__):
                raise chat.error  # noqa: B904
            return error

    def _ending(
        self, outcome: Outcome | Exception, chat: "_Watched", task: Prompt, seconds: float
    ) -> Ending:
        """Count the episode, and raise its error."""
        error, failure = None, None
        if isinstance(outcome, OutOfTokens):
            error = outcome
        elif isinstance(outcome, Exception):
            error, failure = outcome, describe(cause_of(outcome))
        elif isinstance(outcome, Failure):
            error, failure = _error(outcome, chat, task), outcome
        place = f", seed {task.seed}, turn {chat.num_turns}"
        key = next(self._numbers)
        self._budget.record(task, chat.last_reply, seconds, failure, place=place, key=key)
        if error:
            raise error
        return outcome


def _error(failure: Failure, chat: "_Watched", task: Prompt) -> EnvError:
    place = f"{task.domain}, seed {task.seed}, turn {chat.num_turns}"
    error = EnvError(f"{place}: {failure.summary}")
    error.add_note(f"In an environment worker:\n{failure.text}")
    return error


class _Watched:
    """A conversation, with what is told of it when the environment fails."""

    def __init__(self, chat: Conversation):
        self._chat, self.result = chat, chat.result
        self.num_turns, self.last_reply = 0, ""
        self.seconds = 0.0
        """Spent in the model."""
        self.error: BaseException | None = None
        """What the conversation raised, if it is broken."""

    @property
    def finish_reason(self) -> FinishReason:
        return self._chat.finish_reason

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Message:
        start = time.monotonic()
        try:
            reply = await self._chat(messages, **options)
        except OutOfTokens:
            raise
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.seconds += time.monotonic() - start
        self.num_turns += 1
        self.last_reply = reply["content"]
        return reply


@dataclass(frozen=True, slots=True)
class _Asked:
    """What an episode asked: a replay must ask the same."""

    messages: list[Message]
    options: dict[str, Any]
    results: list[TurnResult]

    def __str__(self) -> str:
        return f"{self.messages[-1:]!r:.300} and reported {self.results!r:.300}"


class _Episode:
    """An episode, in one worker after another until it has an outcome."""

    def __init__(
        self,
        link: SupervisorLink,
        chat: _Watched,
        task: Prompt,
        warn: Callable[[Failure], None],
    ):
        """`warn` is told when its worker died for an unknown reason."""
        self._link, self._chat, self._task, self._warn = link, chat, task, warn
        self._turns: list[tuple[_Asked, Reply]] = []
        self._out_of_tokens: OutOfTokens | None = None
        self.num_replays = 0

    async def play(self) -> Outcome:
        num_unexplained = 0
        while True:
            outcome = await self._play_once()
            is_innocent = isinstance(outcome, Failure) and outcome.culprit != "this"
            if not is_innocent:
                return outcome
            if outcome.culprit != "other":
                num_unexplained += 1
                self._warn(outcome)
            if num_unexplained > MAX_UNEXPLAINED:
                if outcome.culprit == "supervisor":  # a sample must not be lost through that
                    raise EnvsBroken(f"{outcome.text}, {num_unexplained} times", outcome)
                return outcome
            self.num_replays += 1

    async def _play_once(self) -> Outcome:
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue()

        def receive(_: float, message: Ask | End | Failure) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(inbox.put_nowait, message)

        job_id = self._link.start(pickle.dumps(self._task), receive)
        try:
            return await self._converse(job_id, inbox)
        except BaseException:  # cancelled, or the conversation is broken
            self._link.send(job_id, None)
            raise

    async def _converse(self, job_id: int, inbox: "asyncio.Queue[Ask | End | Failure]") -> Outcome:
        """Answer what the worker asks, until it has an outcome or died."""
        known: list[Message] = []
        number = 0
        while isinstance(message := await inbox.get(), Ask):
            messages = known[: message.num_known] + message.messages
            asked = _Asked(messages, message.options, message.results)
            if number == len(self._turns):
                self._turns.append((asked, await self._ask(number, asked)))
            elif asked != self._turns[number][0]:
                self._link.send(job_id, None)
                before = self._turns[number][0]
                return self._not_reproducible(number, f"it said {asked}, not {before}")
            asked, reply = self._turns[number]
            self._link.send(job_id, pickle.dumps(reply))
            known = [*asked.messages, reply.message]
            number += 1
        if isinstance(message, Failure):
            return message
        if number < len(self._turns):
            return self._not_reproducible(number, f"it ended: {_shown(message.outcome)}")
        self._report(message.results)
        is_out = isinstance(message.outcome, OutOfTokens)
        return (self._out_of_tokens or message.outcome) if is_out else message.outcome

    async def _ask(self, number: int, asked: _Asked) -> Reply:
        self._report(asked.results)
        try:
            message = await self._chat(asked.messages, **asked.options)
        except OutOfTokens as error:
            self._out_of_tokens = error
            return Reply(number, None, "length", str(error))
        return Reply(number, message, self._chat.finish_reason)

    def _report(self, results: list[TurnResult]) -> None:
        for result in results:
            self._chat.result(result.reward, **result.measurements)

    def _not_reproducible(self, number: int, what: str) -> Failure:
        return Failure(
            "lost",
            "its worker died through another episode, and it cannot be played again: after the "
            f"same {number} replies {what}. Everything random in an environment must come from "
            "the seed",
        )


def _shown(outcome: Outcome) -> str:
    return outcome.text if isinstance(outcome, Failure) else repr(outcome)
