"""The weighted sum of several rewards as one reward that logs every part."""

import asyncio
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction

from roll_lite.checks import UserError
from roll_lite.types import AsyncReward, Prompt, Reward, Score


@dataclass(frozen=True, slots=True)
class Weighted:
    """A weighted sum of rewards; it pickles, so it can be sent to workers."""

    rewards: tuple[tuple[str, Reward | AsyncReward, float], ...]
    """Name, reward and weight."""

    def __call__(self, prompt: Prompt, reply: str) -> Score:
        return self._sum([reward(prompt, reply) for _, reward, _ in self.rewards])

    def _sum(self, scores: Sequence[Score | float]) -> Score:
        """Parts are the unweighted scores; the parts of reward `name` are called name/part."""
        value = 0.0
        parts = {}
        reasons = []
        for (name, _, weight), score in zip(self.rewards, scores, strict=True):
            score = Score.of(score)
            value += weight * score.value
            parts[name] = score.value
            parts |= {f"{name}/{part}": v for part, v in score.parts.items() if part != name}
            reasons += [f"{name}: {score.reason}"] if score.reason else []
        return Score(value=value, parts=parts, reason="; ".join(reasons))


class AsyncWeighted(Weighted):
    """A weighted sum with an `async def` in it: all rewards are computed at the same time."""

    __slots__ = ()

    async def __call__(self, prompt: Prompt, reply: str) -> Score:
        calls = (
            reward(prompt, reply) if is_async(reward) else asyncio.to_thread(reward, prompt, reply)
            for _, reward, _ in self.rewards
        )
        return self._sum(await asyncio.gather(*calls))


def is_async(reward: Reward | AsyncReward) -> bool:
    """Whether it is an `async def`, a partial of one, or an object that is called like one."""
    return iscoroutinefunction(reward) or iscoroutinefunction(type(reward).__call__)


def weighted(rewards: Mapping[str, tuple[Reward | AsyncReward, float]]) -> Weighted:
    """Example: `weighted({"correct": (math_answer, 1.0), "format": (has_tags, 0.2)})`."""
    if not rewards:
        raise UserError("rewards={} is empty; name at least one reward and its weight")
    for name, (reward, weight) in rewards.items():
        if not name or "/" in name:
            raise UserError(f"name={name!r} must be text without a slash")
        _ = Score(value=0.0, parts={name: 0.0})  # refuses the name of a metric
        if not math.isfinite(weight):
            raise UserError(f"weight={weight} of {name} must be a finite number")
        _check_pickles(name, reward)
    kind = AsyncWeighted if any(is_async(reward) for reward, _ in rewards.values()) else Weighted
    return kind(tuple((name, reward, weight) for name, (reward, weight) in rewards.items()))


def _check_pickles(name: str, reward: Reward) -> None:
    try:
        pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"the reward of {name} cannot be sent to a worker ({error}); "
            "use a function at the top of a module, or functools.partial of one"
        ) from None
