"""Rewards on one scale: by the batch, by the group, or by all rewards so far."""

import torch
from torch import Tensor

from roll_lite.train.estimators import EPSILON, EQUAL, grpo, whiten


class RunningMoments:
    """Mean and variance of all numbers so far (Chan et al.'s update, batch by batch)."""

    def __init__(self):
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def update(self, values: Tensor) -> None:
        if not len(values):
            return
        values = values.double()
        mean = values.mean().item()
        total = self.count + len(values)
        shift = mean - self.mean
        self.squares += (values - mean).square().sum().item()
        self.squares += shift * shift * self.count * len(values) / total
        self.mean += shift * len(values) / total
        self.count = total

    def normalise(self, values: Tensor) -> Tensor:
        variance = self.squares / max(1, self.count - 1)
        if variance < EQUAL:
            return torch.zeros_like(values)
        return (values - self.mean) / (variance**0.5 + EPSILON)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


def normalise(
    rewards_S: Tensor, groups_S: Tensor, by: str, moments: RunningMoments | None = None
) -> Tensor:
    """`by`: none, batch, group, or running (updates the moments with these rewards first)."""
    if by == "running":
        moments.update(rewards_S)
        return moments.normalise(rewards_S)
    if by == "group":
        return grpo(rewards_S, groups_S)
    return whiten(rewards_S) if by == "batch" else rewards_S
