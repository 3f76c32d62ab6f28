"""The rewards of a run: functions in worker processes or inline, a judge, a reward model.

Every reward is awaited by one sample at a time; the judge and the reward model compute together
what arrives together. What runs on ranks is imported where it is made: options need no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_lite.chat import Chat
from roll_lite.chat_template import ChatOptions
from roll_lite.checks import UserError, above, at_least
from roll_lite.cluster.errors import RoleError
from roll_lite.device_map import DeviceMap
from roll_lite.envs.env import Player
from roll_lite.envs.play import question_player
from roll_lite.models.config import ModelConfig, read_config
from roll_lite.options import Argument
from roll_lite.rewards.combine import is_async
from roll_lite.types import AsyncReward, Reward
from roll_lite.workers.pool import RewardWorkers

if TYPE_CHECKING:
    from roll_lite.cluster.cluster import Cluster
    from roll_lite.reward_roles import Judge


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Rewards: worker processes, judge, reward model."""

    reward_workers: int = 4
    """Processes that compute rewards; 0 computes them inline, for a debugger."""
    max_async_rewards: Argument[int] = 256
    """Calls of `async def` rewards at once; waiting for a place does not count as time."""
    reward_seconds: float = 10.0
    """Time limit of one reward; a reward that takes longer has failed."""
    max_error_share: Argument[float] = 0.2
    """Stop the run when more than this share of the last 200 rewards failed."""
    judge: str | None = None
    """Hugging Face folder of a model that judges replies to prompts of domain judge."""
    judge_tokens: Argument[int] = 256
    """Longest verdict of the judge, in tokens."""
    judge_cache_gib: Argument[float] = 1.0
    """KV cache of each judge engine, in GiB."""
    judge_template_args: Argument[tuple[str, ...] | None] = None
    """NAME=VALUE that the judge's chat template reads, as in enable_thinking=false."""
    reward_model: str | None = None
    """Folder of a model with a scalar head, which scores prompts of domain reward_model."""

    def __post_init__(self):
        at_least(0, self, "reward_workers")
        at_least(1, self, "judge_tokens", "max_async_rewards")
        above(0, self, "reward_seconds", "judge_cache_gib")
        _ = self.judge_chat  # refuses what is not NAME=VALUE
        if not 0 <= self.max_error_share <= 1:
            raise UserError(f"max_error_share={self.max_error_share} must be from 0 to 1 (never)")
        _ = self.reward_configs  # refuses a folder that is no model
        if self.reward_model is not None:
            from roll_lite.models.hf import has_value_head

            if not has_value_head(self.reward_model):
                raise UserError(
                    f"reward_model={self.reward_model!r} has no tensor score.weight, so it gives "
                    "no number; name a sequence classifier with one label"
                )

    @property
    def judge_chat(self) -> ChatOptions:
        return ChatOptions(template_args=self.judge_template_args)

    @property
    def reward_roles(self) -> list[str]:
        """Roles of the device map that rewards need."""
        return [name for name in ("judge", "reward_model") if getattr(self, name) is not None]

    @property
    def reward_configs(self) -> dict[str, ModelConfig]:
        """Model configs of these roles."""
        return {name: read_config(getattr(self, name)) for name in self.reward_roles}


class Rewards:
    """Questions with the reward of their domain."""

    def __init__(
        self,
        functions: Mapping[str, Reward],
        inline: Mapping[str, Reward],
        domains: Iterable[str],
        options: RewardOptions,
        cluster: Cluster,
        tokens_per_microbatch: int = 16384,
    ):
        """Has only what the domains need; enter it to start processes. `functions` run in worker
        processes, `inline` ones in the event loop; `tokens_per_microbatch` is for the reward model.
        """
        known = {*functions, *inline, *options.reward_roles}
        if missing := sorted(set(domains) - known):
            raise UserError(
                f"there is no reward for domain {' and '.join(map(repr, missing))} of the prompts "
                f"(a row without the field has ''); known domains: {', '.join(sorted(known))}. "
                "Name one for all rows without, as --columns domain=math, or add one in the "
                "REWARDS of a file given with --code"
            )
        for domain in domains:
            _check_signature(domain, functions.get(domain) or inline.get(domain))
        self.engine_clients: list[Judge] = []
        """Engine roles that rewards query, for the coordinator."""
        self.workers: dict[str, RewardWorkers] = {}
        """Those of domains whose reward runs in worker processes."""
        self._by_domain: dict[str, AsyncReward] = {}
        self._pools: list[RewardWorkers] = []
        self._exits = ExitStack()
        if unused := sorted(set(options.reward_roles) - set(domains)):
            raise UserError(
                f"{unused[0]} is given, but no prompt has domain {unused[0]}; leave it out, or "
                "name the domain in the rows that it is to score"
            )
        if options.judge is not None:
            _check_judge_ranks(cluster.device_map)
            self._add({"judge": self._make_judge(options, cluster)}, 0, options)
        if options.reward_model is not None:
            from roll_lite.reward_roles import RewardModel
            from roll_lite.train.scorer import Scorer

            folder = options.reward_model
            scorer = cluster.role("reward_model", Scorer, folder=folder, head="value")
            model = RewardModel(scorer, Chat(folder), tokens_per_microbatch=tokens_per_microbatch)
            self._add({"reward_model": model}, 0, options)
        for chosen, num_workers in ((functions, options.reward_workers), (inline, 0)):
            used = {domain: chosen[domain] for domain in chosen if domain in domains}
            self._add(used, num_workers, options)

    def __enter__(self) -> Rewards:
        with ExitStack() as exits:  # those that were entered end if the next one cannot
            for pool in self._pools:
                exits.enter_context(pool)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    @property
    def play(self) -> Player:
        """Have the model answer a prompt, and score its reply."""
        return question_player(self._by_domain)

    def metrics(self) -> dict[str, float]:
        """Calls, seconds and failures since the last time."""
        totals: dict[str, float] = {}
        for pool in self._pools:
            for name, value in pool.metrics().items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def _add(
        self,
        rewards: Mapping[str, Reward | AsyncReward],
        num_workers: int,
        options: RewardOptions,
    ) -> None:
        """Rewards whose failures are counted together; num_workers=0 is in the event loop."""
        if not rewards:
            return
        pool = RewardWorkers(
            rewards,
            num_workers=num_workers,
            max_waiting=options.max_async_rewards,
            seconds=options.reward_seconds,
            max_error_share=options.max_error_share,
            fatal=(RoleError,),
        )
        self._pools.append(pool)
        self._by_domain |= dict.fromkeys(rewards, pool.score)
        if num_workers:
            self.workers |= {d: pool for d, reward in rewards.items() if not is_async(reward)}

    def _make_judge(self, options: RewardOptions, cluster: Cluster) -> Judge:
        from roll_lite.engine.service import EngineService
        from roll_lite.reward_roles import Judge

        folder = options.judge
        cache = options.judge_cache_gib
        engines = cluster.role("judge", EngineService, folder=folder, kv_cache_gib=cache)
        judge = Judge(
            engines, Chat(folder, **options.judge_chat.arguments), max_tokens=options.judge_tokens
        )
        self.engine_clients.append(judge)
        return judge


def _check_signature(domain: str, reward: Reward | None) -> None:
    try:
        inspect.signature(reward).bind("prompt", "reply") if reward else None
    except TypeError:
        raise UserError(
            f"the reward of domain {domain!r}, {getattr(reward, '__name__', reward)}"
            f"{inspect.signature(reward)}, must take (prompt, reply)"
        ) from None
    except ValueError:  # a builtin without signature
        return


def _check_judge_ranks(device_map: DeviceMap) -> None:
    """Ranks of a tensor-parallel engine follow its first rank, and receive nothing else."""
    for replica in device_map["generate"].replicas:
        if followers := sorted(set(replica[1:]) & set(device_map["judge"].ranks)):
            raise UserError(
                f"judge is on rank {followers[0]}, which follows rank {replica[0]} in generate and "
                "cannot receive requests meanwhile; give the judge other ranks"
            )
