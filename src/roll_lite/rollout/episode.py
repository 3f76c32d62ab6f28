"""One sample and its environment: the conversation that they have, until the sample has ended.

A `RunningGroup` starts the samples of one prompt and makes engine requests of their model calls. An
`Episode` plays one of these samples. Both run in the coordinator's event loop.
"""

import asyncio
import bdb
import hashlib
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll_lite.chat import Chat, as_message
from roll_lite.checks import UserError
from roll_lite.cluster.errors import RoleError
from roll_lite.engine.request import Request
from roll_lite.envs.env import Ending, OutOfTokens, Player
from roll_lite.envs.play import ONE_TURN, EpisodeOptions
from roll_lite.rollout.engines import EngineClient, PendingRequest
from roll_lite.rollout.ledger import Ledger
from roll_lite.rollout.prompts import Visit, derive_seed
from roll_lite.types import (
    LOST,
    FinishReason,
    Group,
    Message,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    State,
    Turn,
    TurnResult,
    combine_measurements,
)
from roll_lite.workers.failures import RewardTimeout, TooManyFailures

FATAL = (bdb.BdbQuit, TooManyFailures, RoleError)
"""Errors that end the run rather than one sample: a debugger that was left, rewards or environments
that fail too often, a broken role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """What all episodes of training, or all of evaluation, are played with."""

    engines: EngineClient
    chat: Chat
    play: Player
    ledger: Ledger
    seed: int
    max_retries: int
    deadline: float | None
    """Seconds from a sample's admission to an engine to the end of scoring."""
    max_length: int | None
    """Most tokens of a sample, read and sampled; None leaves it to the engines."""
    task_options: EpisodeOptions

    def encode_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Encode questions together, which is faster; tasks write their own messages."""
        if len(prompts) > 1:
            self.chat.encode_ahead(prompt.messages for prompt in prompts if prompt.is_question)


class RunningGroup:
    """The samples of one visit to a prompt, and their model calls as engine requests.

    All samples open alike, so one request reads the opening and forks it. A later turn prefers the
    replica of the one before, which has the conversation in its cache. With `num_extra` more
    samples than are wanted, those that are still running when enough are done are aborted.
    """

    task: asyncio.Task
    """Set by the caller that runs the group as a task."""

    def __init__(
        self,
        context: EpisodeContext,
        visit: Visit,
        num_samples: int,
        params: SamplingParams,
        *,
        num_extra: int = 0,
        only: int | None = None,
        number: int | None = None,
    ):
        """`only` is the index of a single sample of the group to run; `number` is for a caller that
        knows groups by number."""
        self.visit = visit
        self.params = params
        self.number = number
        self._context = context
        self._num_wanted = num_samples if only is None else 1
        self._num_samples = num_samples + num_extra
        self.seed = derive_seed(context.seed, visit.prompt.id, visit.number)
        indices = range(self._num_samples) if only is None else (only,)
        self.samples = context.ledger.open_samples(visit, self.seed, indices)
        self._episodes: dict[int, asyncio.Task] = {}
        """By the index of the sample."""
        known = visit.prompt.seed
        self.prompt = replace(visit.prompt, seed=self.seed if known is None else known)
        """The prompt as its environment gets it, with the seed that all samples share."""
        self._wanted: tuple[int, ...] | None = None
        """The samples to generate; None is all of them."""
        self._first: PendingRequest | None = None
        self._last: dict[int, PendingRequest] = {}
        """The request of each sample's last turn, if it was not the first."""

    @property
    def domain(self) -> str:
        return self.visit.prompt.domain

    async def run(self) -> Group:
        """Run all samples to their end."""
        self.on_done()  # a journal may have had enough of them
        queued = [sample for sample in self.samples if sample.state == "queued"]
        self._wanted = tuple(s.index for s in queued) if len(queued) < self._num_samples else None
        for sample in queued:
            episode = Episode(self._context, sample, self)
            self._episodes[sample.index] = asyncio.create_task(episode.run())
        await asyncio.gather(*self._episodes.values())
        return Group(prompt=self.visit.prompt, samples=self.samples)

    def on_done(self) -> None:
        """A sample is done. If it is the last that is wanted, abort those that are running."""
        if self._num_wanted == len(self.samples):
            return
        if sum(sample.state == "done" for sample in self.samples) < self._num_wanted:
            return
        for sample in self.samples:
            if sample.state not in ("done", *LOST):
                self._context.ledger.discard([sample], "aborted", "one too many")
                if episode := self._episodes.get(sample.index):
                    episode.cancel()

    def first_version(self, sample: Sample) -> int | None:
        """Policy version of a sample's first token; None if no engine has reported one."""
        if sample.first_version is None and self._first is not None:
            return self._first.first_versions.get(sample.index)
        return sample.first_version

    async def generate(
        self, episode: "Episode", token_ids: list[int], params: SamplingParams
    ) -> Turn:
        """The next turn of a sample."""
        sample = episode.sample
        if sample.turns:
            pending = self._continue(sample, token_ids, params)
            turn = await pending.join(0, episode)
        else:
            pending = self._open(sample, token_ids, params)
            turn = await pending.join(sample.index, episode)
        turn.replica = pending.replica
        return turn

    def _open(self, sample: Sample, token_ids: list[int], params: SamplingParams) -> PendingRequest:
        """The request of the first turn, which is one for all samples."""
        if self._first is None:
            request = Request(
                prompt_ids=token_ids,
                params=params,
                num_samples=self._num_samples,
                seed=self.seed,
                wanted=self._wanted,
            )
            self._first = self._context.engines.submit(request, group_number=self.number)
        elif (token_ids, params) != (self._first.request.prompt_ids, self._first.request.params):
            raise UserError(
                f"sample {sample.index} of {sample.prompt.id} opens differently from its "
                "group; an environment must depend on nothing but the prompt and the seed"
            )
        return self._first

    def _continue(
        self, sample: Sample, token_ids: list[int], params: SamplingParams
    ) -> PendingRequest:
        """A request for a later turn."""
        seed = derive_seed(self.seed, sample.index, len(sample.turns))
        request = Request(prompt_ids=token_ids, params=params, seed=seed)
        last = self._last.get(sample.index, self._first)
        pending = self._context.engines.submit(request, last, group_number=self.number)
        self._last[sample.index] = pending
        return pending


@dataclass(slots=True)
class EncodedMessages:
    """A conversation as messages, and as the tokens that the model read and sampled."""

    messages: list[Message]
    token_ids: list[int]


class Episode:
    """A sample in its environment, which calls it like a function to talk to the model.

    It is the `Conversation` of envs/env.py. Tokens that were sampled are never encoded again: a
    conversation that goes on keeps its ids, and only what is new is encoded.
    """

    def __init__(self, context: EpisodeContext, sample: Sample, group: RunningGroup):
        self.sample = sample
        self._context = context
        self._ledger = context.ledger
        self._group = group
        # A question has one turn, whatever the options of tasks say.
        self._options = ONE_TURN if group.prompt.is_question else context.task_options
        self._timeout = asyncio.timeout(None)
        self._encoded: list[EncodedMessages] = []
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
                await self._play_or_fail(self._context.play(self, self._group.prompt))
        except TimeoutError:
            self._ledger.abort([self.sample])
        except asyncio.CancelledError:
            if self.sample.state not in LOST:  # otherwise its group is complete without it
                raise

    def on_admitted(self) -> None:
        """The deadline counts from the first admission, not from the queue."""
        self._ledger.enter(self.sample, "generating")
        if self._context.deadline is not None and self._timeout.when() is None:
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(now + self._context.deadline)

    def on_retry(self) -> None:
        self._ledger.retry(self.sample)

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
            messages = list(messages)
            token_ids = self._encode(messages, tools)
            params = self._fit(len(token_ids), stop, max_tokens)
            self.sample.transcript += _since_reply(messages)
            turn = await self._group.generate(self, token_ids, params)
            turn.state = _key(messages[-1]["content"] if state is None else state)
            reply = self._add(turn, has_tools=bool(tools))
            self._encoded.append(EncodedMessages([*messages, reply], token_ids + turn.token_ids))
            self._ledger.enter(self.sample, self.step_state)
            return dict(reply)

    def result(self, reward: float = 0.0, **measurements: dict[str, float]) -> None:
        if not self.sample.turns:
            raise UserError("result() belongs to a reply, but the model has given none yet")
        self.sample.turns[-1].result = TurnResult(reward=reward, measurements=measurements)

    async def retried(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a call that may fail now and then; only the last attempt raises."""
        for _ in range(self._context.max_retries):
            try:
                return await call()
            except FATAL:
                raise
            except Exception as error:  # any kind: rewards are user code
                if isinstance(error, RewardTimeout) and error.is_final:
                    raise
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
            self._ledger.fail(self.sample, error)
        else:
            self.sample.score = score
            self.sample.error = None
            self._ledger.end(self.sample)
            self._group.on_done()

    async def _play(self, episode: Awaitable[Ending]) -> Score:
        try:
            ending = await episode
        except OutOfTokens:
            ending = Ending(reason=self._limit_reached)
        if not self.sample.turns:
            raise UserError("the episode ended before the model replied")
        self.sample.end = ending.reason
        return self._score(ending.score)

    def _score(self, returned: Score | None) -> Score:
        """The rewards of the turns are made to sum to the score."""
        turns = self.sample.turns
        total = sum(turn.result.reward for turn in turns)
        parts = combine_measurements(turns)
        if returned is None:
            return Score(value=total, parts=parts)
        last = turns[-1].result
        reward = last.reward + returned.value - total
        turns[-1].result = TurnResult(reward=reward, measurements=last.measurements)
        return replace(returned, parts=parts | returned.parts) if parts else returned

    def _add(self, turn: Turn, has_tools: bool) -> Message:
        """Append a turn to the sample; returns its reply."""
        self.sample.add_turn(turn)
        if turn.finish_reason == "error":
            raise ArithmeticError("the model gave logits that are not finite")
        self.finish_reason = turn.finish_reason
        text = self._context.chat.decode(turn.token_ids)
        # As other engines: the tokens of a stop text stay, its text does not. That of an
        # environment's own is for the environment, which reads it.
        ends = [end for stop in self._group.params.stop if (end := text.find(stop)) >= 0]
        self.sample.reply = text[: min(ends, default=len(text))]
        reply = as_message(self.sample.reply, has_tools=has_tools)
        self.sample.transcript.append(reply)
        return reply

    def _encode(self, messages: list[Message], tools: Sequence[dict] | None) -> list[int]:
        """The ids of a conversation; those of an earlier one that it continues are kept.

        What environments write is quoted; a question may have special tokens.
        """
        chat = self._context.chat
        for earlier in reversed(self._encoded):
            known = len(earlier.messages)
            if messages[:known] == earlier.messages and len(messages) > known:
                return chat.continue_with(earlier.token_ids, messages[known:])
        encode = chat.encode if self._group.prompt.is_question else chat.encode_quoted
        return encode(messages, tools)

    def _fit(
        self, num_read: int, stop: Sequence[str] | None, max_tokens: int | None
    ) -> SamplingParams:
        """Sampling parameters for a reply that stays within the limits."""
        options = self._options
        params = self._group.params
        max_length = self._context.max_length
        if isinstance(stop, str):
            raise TypeError(f"stop={stop!r} must be a tuple of texts: ({stop!r},)")
        if len(self.sample.turns) >= options.max_turns:
            self._limit_reached = "turns"
            raise OutOfTokens(f"the episode has had its {options.max_turns} turns")
        wanted = params.max_tokens if max_tokens is None else min(max_tokens, params.max_tokens)
        room = {}
        if max_length is not None:
            room["context"] = max_length - num_read
        if options.episode_tokens is not None:
            room["tokens"] = options.episode_tokens - self.sample.num_sampled
        limit, left = min(room.items(), key=lambda item: item[1], default=("", wanted))
        if options.at_limit == "fail" and left < wanted:
            raise UserError(_TOO_LONG[limit].format(num_read, wanted, max_length))
        if left < 1:
            self._limit_reached = limit
            raise OutOfTokens(f"{num_read} tokens leave no room for a reply: {limit}")
        if not stop and wanted == params.max_tokens <= left:
            return params
        return replace(params, max_tokens=min(wanted, left), stop=(*params.stop, *(stop or ())))


_TOO_LONG = {
    "context": "{} tokens and max_tokens={} more exceed the {} that a sample may have; shorten the "
    "prompt, lower max_tokens, or raise what limits it: tokens_per_microbatch or kv_cache_gib",
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
