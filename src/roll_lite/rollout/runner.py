"""Runs single samples and whole groups in the coordinator's event loop, and counts how they end."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from roll_lite.chat import Chat
from roll_lite.envs.env import Env
from roll_lite.rollout.replicas import Replicas
from roll_lite.rollout.sample import run_sample
from roll_lite.rollout.turns import GroupTurns, derive_seed
from roll_lite.types import Prompt, Sample, SamplingParams

LOST = ("filtered", "failed", "aborted")
ENDS = ("done", *LOST)


@dataclass(frozen=True, slots=True)
class Visit:
    """One time that a prompt is sampled; a prompt that comes again is sampled anew."""

    prompt: Prompt
    number: int


class SampleRunner:
    """Runs single samples and whole groups, and counts how they end."""

    def __init__(
        self,
        *,
        replicas: Replicas,
        chat: Chat,
        make_env: Callable[[Prompt], Env],
        seed: int,
        max_retries: int,
        deadline: float | None = None,
    ):
        self._replicas, self._chat, self._make_env = replicas, chat, make_env
        self._seed, self._max_retries, self._deadline = seed, max_retries, deadline
        self.counts: Counter[str] = Counter()
        """Samples by what became of them, and what else happened to them."""
        self.dropped: list[tuple[Sample, str]] = []
        """Samples that nobody gets, and why."""

    def make_samples(self, prompt: Prompt, num_samples: int) -> list[Sample]:
        samples = [Sample(prompt=prompt, index=index) for index in range(num_samples)]
        for sample in samples:
            sample.enter("queued", self._version())
        self.counts["started"] += num_samples
        return samples

    def make_turns(self, visit: Visit, num_samples: int, params: SamplingParams) -> GroupTurns:
        seed = derive_seed(self._seed, visit.prompt.id, visit.number)
        return GroupTurns(self._replicas.ask, num_samples, params, seed, self._on_retry)

    async def run_group(self, samples: list[Sample], turns: GroupTurns) -> None:
        await asyncio.gather(*(self._run(sample, turns) for sample in samples))

    async def _run(self, sample: Sample, turns: GroupTurns) -> None:
        try:
            async with asyncio.timeout(None) as timeout:

                def begin() -> None:
                    sample.enter("generating", self._version())
                    if self._deadline is not None and timeout.when() is None:
                        timeout.reschedule(asyncio.get_running_loop().time() + self._deadline)

                await run_sample(
                    sample,
                    self._make_env(sample.prompt),
                    turns.seed,
                    self._chat,
                    generate=lambda token_ids: turns.generate(sample, token_ids, begin),
                    version=self._version,
                    max_retries=self._max_retries,
                    on_retry=self._on_retry,
                )
        except TimeoutError:
            self.abort([sample])
        if sample.state == "failed":
            self.counts["failed"] += 1
            self.dropped.append((sample, "failed"))

    def abort(self, samples: Iterable[Sample]) -> None:
        """Samples that will not be waited for."""
        for sample in samples:
            if sample.state not in ENDS:
                sample.enter("aborted", self._version())
                self.counts["aborted"] += 1
                self.dropped.append((sample, "aborted"))

    def discard(self, samples: Iterable[Sample], count: str, why: str = "") -> None:
        """Samples that are done, or could be, and not wanted: filtered, aborted or stale."""
        for sample in samples:
            if sample.state not in LOST:
                sample.enter("filtered", self._version())
                self.counts[count] += 1
                self.dropped.append((sample, why or count))

    def _on_retry(self, sample: Sample) -> None:
        sample.enter("retried", self._version())
        self.counts["retried"] += 1

    def _version(self) -> int:
        return self._replicas.policy_version
