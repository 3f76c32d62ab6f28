"""The weighted sum of several rewards as one reward that logs every part."""

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

from roll_lite.types import Prompt, Reward, Score


@dataclass(frozen=True, slots=True)
class Weighted:
    """A weighted sum of rewards; it pickles, so it can be sent to workers."""

    rewards: tuple[tuple[str, Reward, float], ...]
    """Name, reward and weight."""

    def __call__(self, prompt: Prompt, reply: str) -> Score:
        """Parts are the unweighted scores; the parts of reward `name` are called name/part."""
        value, parts = 0.0, {}
        for name, reward, weight in self.rewards:
            score = reward(prompt, reply)
            if not isinstance(score, Score):
                score = Score(value=float(score))
            value += weight * score.value
            parts[name] = score.value
            parts |= {f"{name}/{part}": v for part, v in score.parts.items() if part != name}
        return Score(value=value, parts=parts)


def weighted(rewards: Mapping[str, tuple[Reward, float]]) -> Weighted:
    """Example: `weighted({"correct": (math_answer, 1.0), "format": (has_tags, 0.2)})`."""
    if not rewards:
        raise ValueError("rewards={} is empty; name at least one reward and its weight")
    for name, (reward, weight) in rewards.items():
        if not name or "/" in name:
            raise ValueError(f"name={name!r} must be text without a slash")
        if not math.isfinite(weight):
            raise ValueError(f"weight={weight} of {name} must be a finite number")
        _check_pickles(name, reward)
    return Weighted(tuple((name, reward, weight) for name, (reward, weight) in rewards.items()))


def _check_pickles(name: str, reward: Reward) -> None:
    try:
        pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the reward of {name} cannot be sent to a worker ({error}); "
            "use a function at the top of a module, or functools.partial of one"
        ) from None
