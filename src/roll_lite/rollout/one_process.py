"""Rollouts over one engine of this process, which the rollout itself pumps.

Between two steps the coroutines whose turns have ended go on, so rewards are computed while other
samples still generate.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from roll_lite.chat import Chat
from roll_lite.engine.engine import Engine
from roll_lite.engine.sequence import Request
from roll_lite.envs.env import Env
from roll_lite.progress import ProgressBar
from roll_lite.rollout.sample import run_sample
from roll_lite.rollout.turns import GroupTurns, derive_seed
from roll_lite.types import Group, Prompt, Sample, SamplingParams, Turn


class Rollout:
    """Runs groups of samples to their end over one engine of this very process."""

    def __init__(self, *, engine: Engine, chat: Chat, make_env: Callable[[Prompt], Env], seed: int):
        self.engine, self.chat, self.make_env, self.seed = engine, chat, make_env, seed
        self._num_visits: Counter[str] = Counter()
        """By prompt: a prompt that comes again is sampled anew, whatever came in between."""

    def collect(
        self, prompts: Iterable[Prompt], *, num_samples: int, params: SamplingParams
    ) -> list[Group]:
        """One group of samples for each prompt, in the order of the prompts."""
        return asyncio.run(self._collect(list(prompts), num_samples, params))

    async def _collect(
        self, prompts: list[Prompt], num_samples: int, params: SamplingParams
    ) -> list[Group]:
        with ProgressBar(len(prompts) * num_samples, "rollout") as bar:
            groups = asyncio.gather(
                *(self._run_group(prompt, num_samples, params, bar) for prompt in prompts)
            )
            try:
                while not groups.done():  # which it also is at the first exception
                    await asyncio.sleep(0)  # samples go on: submit, step their environments
                    if self.engine.has_work:
                        self.engine.step()
                return groups.result()
            finally:
                self.engine.abort_all()

    async def _run_group(
        self, prompt: Prompt, num_samples: int, params: SamplingParams, bar: ProgressBar
    ) -> Group:
        seed = derive_seed(self.seed, prompt.id, self._num_visits[prompt.id])
        self._num_visits[prompt.id] += 1
        turns = GroupTurns(self._ask, num_samples, params, seed, on_retry=lambda sample: None)

        async def run(index: int) -> Sample:
            sample = Sample(prompt=prompt, index=index)
            sample.enter("queued", self.engine.policy_version)
            await run_sample(
                sample,
                self.make_env(prompt),
                seed,
                self.chat,
                generate=lambda token_ids: turns.generate(sample, token_ids),
                version=lambda: self.engine.policy_version,
            )
            bar.advance()
            return sample

        samples = await asyncio.gather(*(run(index) for index in range(num_samples)))
        return Group(prompt=prompt, samples=samples)

    def _ask(
        self,
        request: Request,
        futures: list[asyncio.Future],
        on_retry: Callable[[int], None],
        near: None,
    ) -> None:
        def resolve(index: int, turn: Turn) -> None:
            if not futures[index].done():
                futures[index].set_result(turn)

        try:
            self.engine.submit(request, resolve)
        except ValueError as error:  # refused: every sample that waits for it fails with the reason
            for future in futures:
                future.set_exception(error)
