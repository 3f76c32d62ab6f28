"""One sample and its environment: the conversation that they have, until the sample has ended."""

import asyncio
import bdb
import hashlib
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roll_lite.chat import as_message
from roll_lite.cluster.errors import RoleError
from roll_lite.envs.env import Ending, OutOfTokens
from roll_lite.types import (
    LOST,
    FinishReason,
    Message,
    Sample,
    SamplingParams,
    Score,
    State,
    TurnResult,
    combine_measurements,
)
from roll_lite.workers.failures import TooManyFailures

if TYPE_CHECKING:
    from roll_lite.rollout.sample import RunningGroup, SampleRunner

FATAL = (bdb.BdbQuit, TooManyFailures, RoleError)
"""Errors that end the run rather than one sample: a debugger that was left, rewards or environments
that fail too often, a broken role."""


@dataclass(slots=True)
class Thread:
    """A conversation as messages, and as the tokens that the model read and sampled."""

    messages: list[Message]
    token_ids: list[int]


class Episode:
    """A sample in its environment, which calls it like a function to talk to the model.

    It is the `Conversation` of envs/env.py. Tokens that were sampled are never encoded again: a
    conversation that goes on keeps its ids, and only what is new is encoded.
    """

    def __init__(self, runner: "SampleRunner", sample: Sample, group: "RunningGroup"):
        self.sample, self._runner, self._group = sample, runner, group
        self._timeout = asyncio.timeout(None)
        self._threads: list[Thread] = []
        self._limit_reached = ""
        """Why there was no room for a further reply: `context`, `tokens` or `turns`."""
        self._one_at_a_time = asyncio.Lock()
        self.finish_reason: FinishReason = "stop"
        self.step_state: State = "stepping"
        """The sample's state while its environment works."""

    async def run(self) -> None:
        """Play to the end. A sample that passes its deadline is aborted."""
        try:
            async with self._timeout:
                # Not in the try: a task that nothing can play ends the run.
                await self._play_or_fail(self._runner.play(self, self._group.prompt))
        except TimeoutError:
            self._runner.abort([self.sample])
        except asyncio.CancelledError:
            if self.sample.state not in LOST:  # otherwise its group is complete without it
                raise

    def on_admitted(self) -> None:
        """The deadline counts from the first admission, not from the queue."""
        self._runner.enter(self.sample, "generating")
        if self._runner.deadline is not None and self._timeout.when() is None:
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(now + self._runner.deadline)

    def on_retry(self) -> None:
        self._runner.retry(self.sample)

    # What environments call

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        stop: Sequence[str] | None = None,
        max_tokens: int | None = None,
        state: str | None = None,
    ) -> Message:
        async with self._one_at_a_time:
            return await self._reply(list(messages), tools, stop, max_tokens, state)

    async def _reply(
        self,
        messages: list[Message],
        tools: Sequence[dict[str, Any]] | None,
        stop: Sequence[str] | None,
        max_tokens: int | None,
        state: str | None,
    ) -> Message:
        sample, chat = self.sample, self._runner.chat
        token_ids = self._encode(messages, tools)
        params = self._fit(len(token_ids), stop, max_tokens)
        sample.transcript += _since_reply(messages)
        turn = await self._group.generate(self, token_ids, params)
        turn.state = _key(messages[-1]["content"] if state is None else state)
        sample.add_turn(turn)
        if turn.finish_reason == "error":
            raise ArithmeticError("the model gave logits that are not finite")
        self.finish_reason = turn.finish_reason
        sample.reply = chat.decode(turn.token_ids)
        reply = as_message(sample.reply, has_tools=bool(tools))
        sample.transcript.append(reply)
        self._threads.append(Thread([*messages, reply], token_ids + turn.token_ids))
        self._runner.enter(sample, self.step_state)
        return dict(reply)

    def result(self, reward: float = 0.0, **measurements: dict[str, float]) -> None:
        if not self.sample.turns:
            raise ValueError("result() belongs to a reply, but the model has given none yet")
        self.sample.turns[-1].result = TurnResult(reward=reward, measurements=measurements)

    async def retried(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a call that may fail now and then; only the last attempt raises."""
        for _ in range(self._runner.max_retries):
            try:
                return await call()
            except FATAL:
                raise
            except Exception:  # any kind: rewards are user code
                self.sample.error = traceback.format_exc()  # in case the run stops before the last
                self.on_retry()
        return await call()

    # Its own steps

    async def _play_or_fail(self, episode: Awaitable[Ending]) -> None:
        try:
            score = await self._play(episode)
        except FATAL as error:
            if isinstance(error, TooManyFailures) and error.failure:
                self.sample.error = error.failure.text
            raise
        except Exception as error:  # any kind: environments and rewards are user code
            if isinstance(error.__cause__, FATAL):  # it went through the environment
                raise error.__cause__ from None
            self._runner.fail(self.sample, traceback.format_exc())
        else:
            self.sample.score, self.sample.error = score, None
            self._runner.end(self.sample, self._group.visit)
            self._group.on_done()

    async def _play(self, episode: Awaitable[Ending]) -> Score:
        try:
            ending = await episode
        except OutOfTokens:
            ending = Ending(reason=self._limit_reached)
        if not self.sample.turns:
            raise ValueError("the episode ended before the model replied")
        self.sample.end = ending.reason
        return self._score(ending.score)

    def _score(self, returned: Score | None) -> Score:
        """The rewards of the turns are made to sum to the score."""
        turns = self.sample.turns
        total, parts = sum(turn.result.reward for turn in turns), combine_measurements(turns)
        if returned is None:
            return Score(value=total, parts=parts)
        last = turns[-1].result
        reward = last.reward + returned.value - total
        turns[-1].result = TurnResult(reward=reward, measurements=last.measurements)
        return replace(returned, parts=parts | returned.parts) if parts else returned

    def _encode(self, messages: list[Message], tools: Sequence[dict] | None) -> list[int]:
        """The ids of a conversation; those of an earlier one that it continues are kept."""
        for thread in reversed(self._threads):
            known = len(thread.messages)
            if messages[:known] == thread.messages and len(messages) > known:
                return self._runner.chat.continue_with(thread.token_ids, messages[known:])
        return self._runner.chat.encode(messages, tools)

    def _fit(
        self, num_read: int, stop: Sequence[str] | None, max_tokens: int | None
    ) -> SamplingParams:
        """Sampling parameters for a reply that stays within the limits."""
        runner, params = self._runner, self._group.params
        if isinstance(stop, str):
            raise TypeError(f"stop={stop!r} must be a tuple of texts: ({stop!r},)")
        if len(self.sample.turns) >= runner.episodes.max_turns:
            self._limit_reached = "turns"
            raise OutOfTokens(f"the episode has had its {runner.episodes.max_turns} turns")
        wanted = params.max_tokens if max_tokens is None else min(max_tokens, params.max_tokens)
        room = {}
        if runner.max_length is not None:
            room["context"] = runner.max_length - num_read
        if runner.episodes.episode_tokens is not None:
            room["tokens"] = runner.episodes.episode_tokens - self.sample.num_sampled
        limit, left = min(room.items(), key=lambda item: item[1], default=("", wanted))
        if runner.episodes.at_limit == "fail" and left < wanted:
            raise ValueError(_TOO_LONG[limit].format(num_read, wanted, runner.max_length))
        if left < 1:
            self._limit_reached = limit
            raise OutOfTokens(f"{num_read} tokens leave no room for a reply: {limit}")
        if not stop and wanted == params.max_tokens <= left:
            return params
        return replace(params, max_tokens=min(wanted, left), stop=(*params.stop, *(stop or ())))


_TOO_LONG = {
    "context": "{} tokens and max_tokens={} more exceed the {} that a sample may have; shorten the "
    "prompt, lower max_tokens, or raise tokens_per_microbatch",
    "tokens": "{} tokens were read, and max_tokens={} is more than the tokens that are left of "
    "episode_tokens; raise it, or use at_limit=end",
}


def _since_reply(messages: list[Message]) -> list[Message]:
    """The messages after the last reply."""
    roles = [message["role"] for message in messages]
    last = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else -1
    return messages[last + 1 :]


def _key(state: str) -> str:
    return hashlib.blake2b(state.encode(errors="surrogatepass"), digest_size=8).hexdigest()
