"""Changes of rewards, weights and groups around the advantages, each a call of its own."""

from dataclasses import dataclass, replace
from statistics import fmean

from roll_lite.checks import at_least, one_of, read_only_if
from roll_lite.train.packing import TrainingSequence
from roll_lite.types import Group, Sample, Score


@dataclass(kw_only=True)
class Shaping:
    """Flat, so that the Config of a recipe can inherit them."""

    max_tokens: int = 16
    """Longest reply, in tokens."""
    overlong: str = "train"
    """Replies cut at max_tokens: train on them, mask them, or lower rewards softly by a penalty."""
    overlong_buffer: int = 0
    """overlong=penalty: over the last so many tokens the reward falls, by 1 in the end (DAPO)."""
    length_power: float = 0.0
    """Weigh samples by (mean length / length) to this power, from 0.5 to 2; 0 is off."""

    def __post_init__(self):
        at_least(1, self, "max_tokens")
        one_of(("train", "mask", "penalty"), self, "overlong")
        read_only_if(self.overlong == "penalty", "overlong='penalty'", self, "overlong_buffer")
        if self.overlong == "penalty":
            overlong_penalty(0, self.max_tokens, self.overlong_buffer)

    def shape_rewards(self, groups: list[Group]) -> list[Group]:
        """Before advantages are computed."""
        if self.overlong == "penalty":
            return penalise_overlong(groups, self.max_tokens, self.overlong_buffer)
        return groups

    def shape_weights(
        self, sequences: list[TrainingSequence], groups: list[Group]
    ) -> list[TrainingSequence]:
        """After that; sequences that count nothing are left out."""
        if self.overlong == "mask":
            sequences = mask_overlong(sequences, groups)
        if self.length_power:
            sequences = weigh_by_length(sequences, power=self.length_power)
        return [sequence for sequence in sequences if sequence.weight > 0]


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to max_tokens - buffer, then linear to -1 at max_tokens."""
    if not 0 < buffer <= max_tokens:
        raise ValueError(
            f"overlong_buffer={buffer} must be above 0 and at most max_tokens={max_tokens}"
        )
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - buffer)) / buffer))


def penalise_overlong(groups: list[Group], max_tokens: int, buffer: int) -> list[Group]:
    """Groups whose scores include the penalty for sampled tokens, as the part `overlong`."""

    def penalised(sample: Sample) -> Sample:
        penalty = overlong_penalty(sum(sample.loss_mask), max_tokens, buffer)
        parts = {**sample.score.parts, "overlong": penalty}
        return replace(sample, score=Score(value=sample.score.value + penalty, parts=parts))

    return [
        Group(prompt=group.prompt, samples=[penalised(sample) for sample in group.samples])
        for group in groups
    ]


def mask_overlong(sequences: list[TrainingSequence], groups: list[Group]) -> list[TrainingSequence]:
    """Weight 0 for the samples of `groups`, in order, whose last turn was cut by its length."""
    samples = [sample for group in groups for sample in group.samples]
    return [
        replace(sequence, weight=0.0)
        if sample.turns and sample.turns[-1].finish_reason == "length"
        else sequence
        for sequence, sample in zip(sequences, samples, strict=True)
    ]


def weigh_by_length(
    sequences: list[TrainingSequence], *, power: float = 1.0, low: float = 0.5, high: float = 2.0
) -> list[TrainingSequence]:
    """Weights times (mean length / length)^power, within [low, high]; length in tokens with loss.

    A positive power favours short sequences, a negative one long ones.
    """
    if not 0 <= low <= high:
        raise ValueError(f"low={low} must be at least 0 and not above high={high}")
    lengths = [max(1, sum(sequence.loss_mask)) for sequence in sequences]
    mean = fmean(lengths)
    return [
        replace(sequence, weight=sequence.weight * min(high, max(low, (mean / length) ** power)))
        for sequence, length in zip(sequences, lengths, strict=True)
    ]
