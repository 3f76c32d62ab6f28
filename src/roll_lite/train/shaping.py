"""Rewards and weights of samples, changed before they are trained on: scale, overlong replies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from roll_lite.checks import UserError, at_least, check_choices, read_only_if
from roll_lite.train.advantages import EPSILON, EQUAL, standardise
from roll_lite.train.sequences import TrainingSequence, samples_of
from roll_lite.types import Group, Sample

if TYPE_CHECKING:
    from torch import Tensor


def normalise(rewards_S: Tensor, groups_S: Tensor, by: str, moments: RunningMoments) -> Tensor:
    """`by`: none, batch, group, or running (the moments include these rewards)."""
    if by == "running":
        moments.update(rewards_S)
        return moments.normalise(rewards_S)
    if by == "none":
        return rewards_S
    return standardise(rewards_S, groups_S if by == "group" else 0 * groups_S)


class RunningMoments:
    """Mean and variance of all numbers so far (Chan et al.'s update, batch by batch)."""

    def __init__(self):
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0

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
            return values.new_zeros(len(values))
        return (values - self.mean) / (variance**0.5 + EPSILON)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count = state["count"]
        self.mean = state["mean"]
        self.squares = state["squares"]


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Length of replies."""

    max_tokens: int | None = None
    """Longest reply, in tokens; None chooses by the model's size, and prints it."""
    long_prompts: Literal["error", "drop"] = "error"
    """Prompts of files that leave no room for max_tokens: refuse them all, or drop them."""
    overlong: Literal["train", "mask", "penalty"] = "train"
    """Replies cut at max_tokens: train on them, mask them out, or subtract a soft penalty."""
    overlong_buffer: int = 0
    """overlong=penalty: the penalty grows from 0 to 1 over this many last tokens (DAPO)."""

    def __post_init__(self):
        at_least(1, self, "max_tokens")
        check_choices(self)
        read_only_if(self.overlong == "penalty", "overlong='penalty'", self, "overlong_buffer")
        if self.overlong == "penalty" and self.max_tokens is not None:
            overlong_penalty(0, self.max_tokens, self.overlong_buffer)

    def shape_rewards(self, groups: list[Group]) -> list[Group]:
        """Call this before advantages are computed."""
        if self.overlong == "penalty":
            return penalise_overlong(groups, self.max_tokens, self.overlong_buffer)
        return groups

    def shape_sequences(
        self, sequences: list[TrainingSequence], groups: list[Group]
    ) -> list[TrainingSequence]:
        """Call this after advantages were computed; masked sequences are left out."""
        return mask_overlong(sequences, groups) if self.overlong == "mask" else sequences


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to max_tokens - buffer, then linear to -1 at max_tokens."""
    if not 0 < buffer <= max_tokens:
        raise UserError(
            f"overlong_buffer={buffer} must be above 0 and at most max_tokens={max_tokens}"
        )
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - buffer)) / buffer))


def penalise_overlong(groups: list[Group], max_tokens: int, buffer: int) -> list[Group]:
    """Groups whose scores include the penalty for sampled tokens, as the part `overlong`."""

    def penalised(sample: Sample) -> Sample:
        penalty = overlong_penalty(sample.num_sampled, max_tokens, buffer)
        parts = {**sample.score.parts, "overlong": penalty}
        score = replace(sample.score, value=sample.score.value + penalty, parts=parts)
        *turns, last = sample.turns
        result = replace(last.result, reward=last.result.reward + penalty)
        return replace(sample, score=score, turns=[*turns, replace(last, result=result)])

    return [
        Group(prompt=group.prompt, samples=[penalised(sample) for sample in group.samples])
        for group in groups
    ]


def mask_overlong(sequences: list[TrainingSequence], groups: list[Group]) -> list[TrainingSequence]:
    """Without the samples of `groups`, by number, that have a reply cut by its length."""
    samples = samples_of(groups)
    return [sequence for sequence in sequences if not samples[sequence.sample].is_cut]
