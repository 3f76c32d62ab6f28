"""The life of a sample: queued, generating, stepping or scoring, until it is done or lost.

`SampleRun` drives one sample through its environment and records its state changes; `GroupTurns`
turns the model calls of a group into engine requests; `SampleRunner` runs groups and counts how
their samples end. Everything here runs in the coordinator's event loop.
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
from roll_lite.engine.sequence import Request
from roll_lite.envs.env import Env, Observation
from roll_lite.rollout.engines import EngineClient, PendingRequest
from roll_lite.rollout.prompts import Visit
from roll_lite.types import Prompt, Sample, SamplingParams, Score, State, Turn
from roll_lite.workers.errors import RewardsBroken

LOST = ("filtered", "failed", "aborted")
ENDS = ("done", *LOST)
FATAL = (bdb.BdbQuit, RewardsBroken, RoleError)
"""Errors that end the run rather than one sample: a debugger that was left, rewards that fail too
often, a broken role."""


def derive_seed(*parts: int | str) -> int:
    """63 bits that depend on all parts and their order."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class GroupTurns:
    """The model calls of a group's samples, as engine requests.

    All samples open alike, so one request reads the opening and forks it. Later turns stay on the
    replica of the first, which has the conversation in its cache.
    """

    def __init__(self, engines: EngineClient, num_samples: int, params: SamplingParams, seed: int):
        self.seed = seed
        self._engines, self._num_samples, self._params = engines, num_samples, params
        self._first: PendingRequest | None = None

    async def generate(self, run: "SampleRun", token_ids: list[int]) -> Turn:
        """The next turn of a sample."""
        sample = run.sample
        if sample.turns:
            seed = derive_seed(self.seed, sample.index, len(sample.turns))
            return await self._submit(token_ids, 1, seed).join(0, run)
        if self._first is None:
            self._first = self._submit(token_ids, self._num_samples, self.seed)
        elif token_ids != self._first.request.prompt_ids:
            raise ValueError(
                f"sample {sample.index} of {sample.prompt.id} opens differently from its "
                "group; an environment must depend on nothing but the prompt and the seed"
            )
        return await self._first.join(sample.index, run)

    def first_version(self, sample: Sample) -> int | None:
        """Policy version of a sample's first token; None if no engine has reported one."""
        if sample.first_version is None and self._first is not None:
            return self._first.first_versions.get(sample.index)
        return sample.first_version

    def _submit(self, token_ids: list[int], num_samples: int, seed: int) -> PendingRequest:
        request = Request(
            prompt_ids=token_ids, params=self._params, num_samples=num_samples, seed=seed
        )
        return self._engines.submit(request, same_replica_as=self._first)


class SampleRunner:
    """Runs the samples of groups and counts how they end."""

    def __init__(
        self,
        *,
        engines: EngineClient,
        chat: Chat,
        make_env: Callable[[Prompt], Env],
        seed: int,
        max_retries: int,
        deadline: float | None = None,
    ):
        self.chat, self.make_env = chat, make_env
        self.max_retries, self.deadline = max_retries, deadline
        self.version = engines.version
        self._engines, self._seed = engines, seed
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

    def make_turns(self, visit: Visit, num_samples: int, params: SamplingParams) -> GroupTurns:
        seed = derive_seed(self._seed, visit.prompt.id, visit.number)
        return GroupTurns(self._engines, num_samples, params, seed)

    async def run_group(self, samples: list[Sample], turns: GroupTurns) -> None:
        await asyncio.gather(*(SampleRun(self, sample, turns).run() for sample in samples))

    def enter(self, sample: Sample, state: State) -> None:
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
            if sample.state not in ENDS:
                self._drop(sample, "aborted", "aborted", "aborted")

    def discard(self, samples: Iterable[Sample], count: str, reason: str = "") -> None:
        """Drop the samples that are done or still running; they count as `count`."""
        for sample in samples:
            if sample.state not in LOST:
                self._drop(sample, "filtered", count, reason or count)

    def take_dropped(self) -> list[tuple[Sample, str]]:
        """Those since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def _drop(self, sample: Sample, state: State, count: str, reason: str) -> None:
        self.enter(sample, state)
        self.counts[count] += 1
        self.dropped.append((sample, reason))


class SampleRun:
    """One sample on its way through its environment."""

    def __init__(self, runner: SampleRunner, sample: Sample, turns: GroupTurns):
        self.sample, self._runner, self._turns = sample, runner, turns
        self._timeout = asyncio.timeout(None)

    async def run(self) -> None:
        """Play the episode. A sample that passes its deadline is aborted."""
        try:
            async with self._timeout:
                await self._play(self._runner.make_env(self.sample.prompt))
        except TimeoutError:
            self._runner.abort([self.sample])

    def on_admitted(self) -> None:
        """The deadline counts from the first admission, not from the queue."""
        self._runner.enter(self.sample, "generating")
        if self._runner.deadline is not None and self._timeout.when() is None:
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(now + self._runner.deadline)

    def on_retry(self) -> None:
        self._runner.retry(self.sample)

    async def _play(self, env: Env) -> None:
        """Reset, then generate and step until the episode ends; an error fails the sample."""
        try:
            score = await self._episode(env)
        except FATAL:
            raise
        except Exception:  # any kind: environments and rewards are user code
            self._runner.fail(self.sample, traceback.format_exc())
        else:
            self.sample.score = score
            self._runner.enter(self.sample, "done")

    async def _episode(self, env: Env) -> Score:
        sample, chat = self.sample, self._runner.chat
        total, parts = 0.0, Counter()
        messages, _ = env.reset(self._turns.seed)
        token_ids = chat.encode(messages)
        while True:
            turn = await self._turns.generate(self, token_ids)
            sample.add_turn(turn)
            if turn.finish_reason == "error":
                raise ArithmeticError("the model gave logits that are not finite")
            sample.reply = chat.decode(turn.token_ids)
            self._runner.enter(sample, getattr(env, "step_state", "stepping"))
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
