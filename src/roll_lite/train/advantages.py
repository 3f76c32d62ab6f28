"""From rewards to advantages, and from groups to what is trained on."""

from statistics import fmean

from roll_lite.train.packing import TrainingSequence
from roll_lite.types import Group


def grpo(rewards: list[float], *, divide_by_std: bool = True) -> list[float]:
    """Reward minus the group's mean, over its (sample) standard deviation.

    Equal rewards, or a group of one, give 0. Without the division this is Dr. GRPO.
    """
    mean = fmean(rewards)
    centred = [reward - mean for reward in rewards]
    variance = sum(c * c for c in centred) / max(1, len(rewards) - 1)
    if variance < 1e-12:
        return [0.0] * len(rewards)
    return [c / (variance**0.5 + 1e-6) for c in centred] if divide_by_std else centred


def with_advantages(groups: list[Group], *, divide_by_std: bool = True) -> list[TrainingSequence]:
    """Every sample of every group with the advantage of its reward within the group."""
    return [
        TrainingSequence(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            logprobs=sample.logprobs,
            advantage=advantage,
        )
        for group in groups
        for sample, advantage in zip(
            group.samples,
            grpo([s.score.value for s in group.samples], divide_by_std=divide_by_std),
            strict=True,
        )
    ]
