"""The life of a sample: queued, generating, stepping or scoring, until it is done or lost.

`RunningGroup` starts the samples of a prompt and makes engine requests of their turns; `Episode`
takes one sample through its environment; `SampleRunner` has what all samples share, and counts how
they end. Everything here runs in the coordinator's event loop.
"""

import asyncio
import bdb
import hashlib
import inspect
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterable

from roll_lite.chat import Chat
from roll_lite.cluster.errors import RoleError
from roll_lite.engine.request import Request
from roll_lite.envs.env import Env, Observation
from roll_lite.rollout.engines import EngineClient, PendingRequest
from roll_lite.rollout.prompts import Visit
from roll_lite.types import Group, Prompt, Sample, SamplingParams, Score, State, Turn
from roll_lite.workers.failures import RewardsBroken

LOST = ("filtered", "failed", "aborted")
ENDS = ("done", *LOST)
FATAL = (bdb.BdbQuit, RewardsBroken, RoleError)
"""Errors that end the run rather than one sample: a debugger that was left, rewards that fail too
often, a broken role."""


def derive_seed(*parts: int | str) -> int:
    """63 bits that depend on all parts and their order."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class SampleRunner:
    """What all samples are run with, and counts of how they end."""

    def __init__(
        self,
        *,
        engines: EngineClient,
        chat: Chat,
        make_env: Callable[[Prompt], Env],
        seed: int,
        max_retries: int,
        deadline: float | None = None,
        max_length: int | None = None,
    ):
        self.engines, self.chat, self.make_env, self.seed = engines, chat, make_env, seed
        self.max_retries, self.deadline = max_retries, deadline
        self.max_length = max_length
        self.version = engines.version
        self.counts: Counter[str] = Counter()
        """Samples by how they ended, and retries."""
        self.dropped: list[tuple[Sample, str]] = []
        """Samples that are in no group, or failed, each with the reason."""

    def make_samples(self, prompt: Prompt, num_samples: int) -> list[Sample]:
        samples = [Sample(prompt=prompt, index=index) for index in range(num_samples)]
        for sample in samples:
            self.enter(sample, "queued")
        self.counts["started"] += num_samples
        return samples

    def enter(self, sample: Sample, state: State) -> None:
        """What is lost stays lost: an environment may ignore that it was cancelled."""
        if not sample.events or sample.state not in LOST:
            sample.enter(state, self.version.current)

    def retry(self, sample: Sample) -> None:
        self.enter(sample, "retried")
        self.counts["retried"] += 1

    def fail(self, sample: Sample, error: str) -> None:
        sample.error = error
        self._drop(sample, "failed", "failed", "failed")

    def abort(self, samples: Iterable[Sample]) -> None:
        """Drop the samples that have not ended."""
        for sample in samples:
            if sample.state != "done":
                self._drop(sample, "aborted", "aborted", "aborted")

    def discard(self, samples: Iterable[Sample], count: str, reason: str = "") -> None:
        """Drop the samples that are done or still running; they count as `count`."""
        for sample in samples:
            self._drop(sample, "filtered", count, reason or count)

    def take_dropped(self) -> list[tuple[Sample, str]]:
        """Those since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def _drop(self, sample: Sample, state: State, count: str, reason: str) -> None:
        if sample.state not in LOST:
            self.enter(sample, state)
            self.counts[count] += 1
            self.dropped.append((sample, reason))


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
        runner: SampleRunner,
        visit: Visit,
        num_samples: int,
        params: SamplingParams,
        num_extra: int = 0,
    ):
        self.visit, self._num_wanted = visit, num_samples
        self.samples = runner.make_samples(visit.prompt, num_samples + num_extra)
        self._episodes: list[asyncio.Task] = []
        self.seed = derive_seed(runner.seed, visit.prompt.id, visit.number)
        self._runner, self._params = runner, params
        self._first: PendingRequest | None = None
        self._last: dict[int, PendingRequest] = {}
        """The request of each sample's last turn, if it was not the first."""

    @property
    def domain(self) -> str:
        return self.visit.prompt.domain

    async def run(self) -> Group:
        """Run all samples to their end."""
        episodes = (Episode(self._runner, sample, self) for sample in self.samples)
        self._episodes = [asyncio.create_task(episode.run()) for episode in episodes]
        await asyncio.gather(*self._episodes)
        return Group(prompt=self.visit.prompt, samples=self.samples)

    def on_done(self) -> None:
        """A sample is done. If it is the last that is wanted, abort those that are running."""
        if sum(sample.state == "done" for sample in self.samples) < self._num_wanted:
            return
        for sample, episode in zip(self.samples, self._episodes, strict=True):
            if sample.state not in ENDS:
                self._runner.discard([sample], "aborted", "one too many")
                episode.cancel()

    async def generate(self, episode: "Episode", token_ids: list[int]) -> Turn:
        """The next turn of a sample."""
        sample = episode.sample
        if sample.turns:
            seed = derive_seed(self.seed, sample.index, len(sample.turns))
            last = self._last.get(sample.index, self._first)
            self._last[sample.index] = pending = self._submit(token_ids, 1, seed, last)
            return await pending.join(0, episode)
        if self._first is None:
            self._first = self._submit(token_ids, len(self.samples), self.seed)
        elif token_ids != self._first.request.prompt_ids:
            raise ValueError(
                f"sample {sample.index} of {sample.prompt.id} opens differently from its "
                "group; an environment must depend on nothing but the prompt and the seed"
            )
        return await self._first.join(sample.index, episode)

    def first_version(self, sample: Sample) -> int | None:
        """Policy version of a sample's first token; None if no engine has reported one."""
        if sample.first_version is None and self._first is not None:
            return self._first.first_versions.get(sample.index)
        return sample.first_version

    def _submit(
        self,
        token_ids: list[int],
        num_samples: int,
        seed: int,
        last: PendingRequest | None = None,
    ) -> PendingRequest:
        max_length, max_tokens = self._runner.max_length, self._params.max_tokens
        if max_length is not None and len(token_ids) + max_tokens > max_length:
            raise ValueError(
                f"{len(token_ids)} tokens and max_tokens={max_tokens} more exceed the {max_length} "
                "that a sample may have; shorten the prompt, lower max_tokens, or raise "
                "tokens_per_microbatch"
            )
        request = Request(
            prompt_ids=token_ids, params=self._params, num_samples=num_samples, seed=seed
        )
        return self._runner.engines.submit(request, same_replica_as=last)


class Episode:
    """One sample in its environment, until it is done, failed or aborted."""

    def __init__(self, runner: SampleRunner, sample: Sample, group: RunningGroup):
        self.sample, self._runner, self._group = sample, runner, group
        self._timeout = asyncio.timeout(None)

    async def run(self) -> None:
        """Play to the end. A sample that passes its deadline is aborted."""
        try:
            async with self._timeout:
                await self._play_or_fail(self._runner.make_env(self.sample.prompt))
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

    async def _play_or_fail(self, env: Env) -> None:
        try:
            score = await self._play(env)
        except FATAL as error:
            if isinstance(error, RewardsBroken) and error.failure:
                self.sample.error = error.failure.text
            raise
        except Exception:  # any kind: environments and rewards are user code
            self._runner.fail(self.sample, traceback.format_exc())
        else:
            self.sample.score, self.sample.error = score, None
            self._runner.enter(self.sample, "done")
            self._group.on_done()

    async def _play(self, env: Env) -> Score:
        """Reset the environment, then generate and step until the episode is over."""
        sample, chat = self.sample, self._runner.chat
        total, parts = 0.0, Counter()
        messages, _ = env.reset(self._group.seed)
        token_ids = chat.encode(messages)
        while True:
            sample.transcript += messages
            turn = await self._group.generate(self, token_ids)
            sample.add_turn(turn)
            if turn.finish_reason == "error":
                raise ArithmeticError("the model gave logits that are not finite")
            sample.reply = chat.decode(turn.token_ids)
            sample.transcript.append({"role": "assistant", "content": sample.reply})
            self._runner.enter(sample, getattr(env, "step_state", "stepping"))
            env.finish_reason = turn.finish_reason
            messages, reward, is_over, info = await self._step(env)
            total += reward
            parts.update(info.get("parts", {}))
            if is_over:
                return Score(value=total, parts=dict(parts))
            token_ids = chat.continue_with(sample.token_ids, messages)

    async def _step(self, env: Env) -> tuple[Observation, float, bool, dict]:
        """The environment's answer to the last turn; only the last attempt may raise."""
        for _ in range(self._runner.max_retries):
            try:
                return await self._try_step(env)
            except FATAL:
                raise
            except Exception:  # any kind: environments and rewards are user code
                self.sample.error = traceback.format_exc()  # in case the run stops before the last
                self.on_retry()
        return await self._try_step(env)

    async def _try_step(self, env: Env) -> tuple[Observation, float, bool, dict]:
        result = env.step(self.sample.reply)
        if inspect.isawaitable(result):
            result = await result
        messages, reward, terminated, truncated, info = result
        if not math.isfinite(reward):
            raise ValueError(f"reward={reward} is not a finite number")
        return messages, reward, terminated or truncated, info
