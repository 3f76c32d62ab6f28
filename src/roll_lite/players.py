"""What plays the prompts of a recipe: questions with their rewards, episodes of environments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from roll_lite.envs.env import Conversation, Ending
from roll_lite.rewarding import Rewards
from roll_lite.rewards.registry import check_prompts
from roll_lite.types import Prompt
from roll_lite.workers.do_nothing import DoNothingCheck
from roll_lite.workers.pool import EnvWorkers

if TYPE_CHECKING:
    from roll_lite.cluster.cluster import Cluster


def make_players(
    cfg: Any,
    prompts: Sequence[Prompt],
    domains: Iterable[str],
    cluster: Cluster,
    *,
    needs_rewards: bool = True,
    tokens_per_microbatch: int = 16384,
    wrapped: Callable[..., tuple[Mapping, Mapping, Mapping]] = lambda *tables: tables,
) -> Players:
    """What plays the prompts of a recipe.

    `cfg` is its Config; `prompts` are known already, `domains` those of all that will come. Without
    `needs_rewards`, a domain may have none; `tokens_per_microbatch` is for a reward model.
    `wrapped` replaces the tables of rewards, inline rewards and environments, for a debugger.
    """
    domains = {*domains, *(prompt.domain for prompt in prompts)} - cfg.players.keys()
    functions, inline = cfg.own.rewards(cfg.REWARDS, cfg.INLINE)
    if not needs_rewards:
        known = {*functions, *inline, *cfg.scoring.reward_roles}
        inline |= dict.fromkeys(domains - known, unscored)
    check_prompts(prompts, functions | inline)
    envs = cfg.players
    used = []
    if cfg.scoring.reward_workers:
        used += [function for domain, function in functions.items() if domain in domains]
    if cfg.environments.env_workers:
        used += [cfg.env_names[spec.partition(":")[0]] for spec in envs]
    cfg.own.warn_of_torch(used)
    functions, inline, envs = wrapped(functions, inline, envs)
    rewards = check = None
    if domains:
        rewards = Rewards(functions, inline, domains, cfg.scoring, cluster, tokens_per_microbatch)
        check = DoNothingCheck(prompts, functions, rewards.workers)
    return Players(rewards, EnvWorkers(envs, **cfg.environments.limits) if envs else None, check)


def unscored(prompt: Prompt, reply: str) -> float:
    """For domains without a reward, where only a teacher judges."""
    return 0.0


class Players:
    """Questions and environments of a run, for `with`; either may be missing."""

    def __init__(
        self, rewards: Rewards | None, envs: EnvWorkers | None, check: DoNothingCheck | None = None
    ):
        self._rewards = rewards
        self._envs = envs
        self._check = check
        self._parts = [part for part in (rewards, envs) if part]
        self._exits = ExitStack()
        self.engine_clients = rewards.engine_clients if rewards else ()
        """Engine roles that rewards query, for the coordinator."""

    def __enter__(self) -> Players:
        with ExitStack() as exits:
            if self._check:
                exits.callback(self._check.join)
            for part in self._parts:
                exits.enter_context(part)
            if self._check:
                exits.callback(self._check.stop)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.__exit__(*error)

    def play(self, chat: Conversation, prompt: Prompt) -> Awaitable[Ending]:
        """One sample; its prompt says what plays it."""
        return (self._rewards if prompt.is_question else self._envs).play(chat, prompt)

    def check_tests(self) -> Callable[[], list[Prompt]]:
        """Begin to try a program that does nothing on the prompts; what is returned returns those
        that it passes, as far as they were found since its last call."""
        if self._check is None:
            return list
        self._check.start()
        return self._check.take

    def metrics(self) -> dict[str, float]:
        """Calls, seconds and failures since the last time."""
        return {name: value for part in self._parts for name, value in part.metrics().items()}
