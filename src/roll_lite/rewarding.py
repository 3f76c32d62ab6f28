"""Who scores the replies of a run: functions in processes or inline, a judge, a reward model."""

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from roll_lite.chat import Chat
from roll_lite.checks import above, at_least, read_only_if
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.device_map import DeviceMap
from roll_lite.engine.service import EngineService
from roll_lite.envs.question import Question
from roll_lite.models.config import ModelConfig, read_config
from roll_lite.models.hf import has_value_head
from roll_lite.reward_roles import Judge, RewardModel
from roll_lite.train.scorer import Scorer
from roll_lite.types import AsyncReward, Prompt, Reward, Score
from roll_lite.workers.failures import ErrorBudget, describe
from roll_lite.workers.pool import RewardWorkers


@dataclass(kw_only=True)
class RewardOptions:
    """Flat, so that the Config of a recipe can inherit them."""

    reward_workers: int = 4
    """Processes that compute rewards; 0 computes them inline, for a debugger."""
    reward_seconds: float = 10.0
    """A reward that takes longer has failed."""
    max_error_share: float = 0.2
    """The run stops when more than this share of the last 200 rewards failed."""
    judge: str | None = None
    """Hugging Face folder of a model that judges replies to prompts of domain judge."""
    judge_tokens: int = 256
    """Longest verdict of the judge, its thoughts included."""
    judge_cache_gib: float = 1.0
    """Memory of each judge's cache."""
    reward_model: str | None = None
    """Folder of a model with a scalar head, which scores prompts of domain reward_model."""

    def __post_init__(self):
        at_least(0, self, "reward_workers")
        at_least(1, self, "judge_tokens")
        above(0, self, "reward_seconds", "judge_cache_gib")
        read_only_if(self.judge is not None, "a judge", self, "judge_tokens", "judge_cache_gib")
        if not 0 <= self.max_error_share <= 1:
            raise ValueError(f"max_error_share={self.max_error_share} must be from 0 to 1 (never)")
        _ = self.reward_configs  # refuses what is no model
        if self.reward_model is not None and not has_value_head(self.reward_model):
            raise ValueError(
                f"reward_model={self.reward_model!r} has no tensor score.weight, so it gives no "
                "number; name a sequence classifier with one label"
            )

    @property
    def reward_roles(self) -> list[str]:
        """Further roles of the device map."""
        return [name for name in ("judge", "reward_model") if getattr(self, name) is not None]

    @property
    def reward_configs(self) -> dict[str, ModelConfig]:
        """Of the models that these roles have."""
        return {name: read_config(getattr(self, name)) for name in self.reward_roles}


class Rewards:
    """Makes the environment of a prompt, with the reward of its domain."""

    def __init__(
        self,
        functions: Mapping[str, Reward],
        inline: Mapping[str, Reward],
        domains: Iterable[str],
        options: RewardOptions,
        cluster: Cluster,
        tokens_per_microbatch: int = 16384,
    ):
        """Only what the domains need is started; `inline` are functions too quick for a process.

        `tokens_per_microbatch` is the reward model's.
        """
        known = {*functions, *inline, *options.reward_roles}
        if missing := sorted(set(domains) - known):
            raise ValueError(
                f"there is no reward for domain {' and '.join(map(repr, missing))} of the prompts "
                f"(a row without the field has ''); known domains: {', '.join(sorted(known))}"
            )
        self.asked: list[Judge] = []
        """For the coordinator to listen to."""
        self._by_domain: dict[str, AsyncReward] = {}
        self._pools: list[RewardWorkers] = []
        self._tallies: list[ErrorBudget] = []
        self._exits = ExitStack()
        if unasked := sorted(set(options.reward_roles) - set(domains)):
            raise ValueError(
                f"{unasked[0]} is given, but no prompt has domain {unasked[0]}; leave it out, or "
                "name the domain in the rows that it is to score"
            )
        if options.judge is not None:
            _check_hears(cluster.device_map)
            self._by_domain["judge"] = self._make_judge(options, cluster)
        if options.reward_model is not None:
            folder = options.reward_model
            scorer = cluster.role("reward_model", Scorer, folder=folder, head="value")
            model = RewardModel(scorer, Chat(folder), tokens_per_microbatch=tokens_per_microbatch)
            self._by_domain["reward_model"] = self._counted(model, options)
        # Last: nothing that can fail comes after processes were started.
        for chosen, num_workers in ((functions, options.reward_workers), (inline, 0)):
            used = {domain: chosen[domain] for domain in chosen if domain in domains}
            self._start(used, num_workers, options)

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def __call__(self, prompt: Prompt) -> Question:
        return Question(prompt, self._by_domain[prompt.domain])

    def metrics(self) -> dict[str, float]:
        """Since the last time: calls, seconds, and how many failed."""
        totals: dict[str, float] = {}
        for source in (*self._pools, *self._tallies):
            for name, value in source.metrics().items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def _start(
        self, rewards: Mapping[str, Reward], num_workers: int, options: RewardOptions
    ) -> None:
        if not rewards:
            return
        pool = RewardWorkers(
            rewards,
            num_workers=num_workers,
            seconds=options.reward_seconds,
            max_error_share=options.max_error_share,
        )
        self._exits.enter_context(pool)
        self._pools.append(pool)
        self._by_domain |= dict.fromkeys(rewards, pool.score)

    def _make_judge(self, options: RewardOptions, cluster: Cluster) -> AsyncReward:
        folder, cache = options.judge, options.judge_cache_gib
        engines = cluster.role("judge", EngineService, folder=folder, kv_cache_gib=cache)
        judge = Judge(engines, Chat(folder), max_tokens=options.judge_tokens)
        self.asked.append(judge)
        return self._counted(judge, options)

    def _counted(self, reward: AsyncReward, options: RewardOptions) -> AsyncReward:
        """The same reward, whose failures are counted like those of functions."""
        tally = ErrorBudget(options.max_error_share)
        self._tallies.append(tally)

        async def counted(prompt: Prompt, reply: str) -> Score:
            start = time.monotonic()
            try:
                score = await reward(prompt, reply)
            except ValueError as error:  # no verdict, or too long; a broken role is another matter
                tally.record(prompt, reply, time.monotonic() - start, describe(error))
                raise
            tally.record(prompt, reply, time.monotonic() - start, None)
            return score

        return counted


def _check_hears(device_map: DeviceMap) -> None:
    """Ranks of a tensor-parallel engine follow its first one, and hear nobody else meanwhile."""
    for replica in device_map["generate"].replicas:
        if deaf := sorted(set(replica[1:]) & set(device_map["judge"].ranks)):
            raise ValueError(
                f"judge is on rank {deaf[0]}, which follows rank {replica[0]} in generate and "
                "would hear no question while that generates; give the judge other ranks"
            )
