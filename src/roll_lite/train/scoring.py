"""What models say of sampled tokens before the first update: reference, values, old logprobs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from roll_lite.train.packing import MicroBatch, TrainingSequence, pack, unpack
from roll_lite.types import Group

Read = Callable[[list[MicroBatch]], list[Tensor]]
"""`logprobs` or `values` of a Scorer or Trainer."""


def plain_sequences(groups: list[Group]) -> list[TrainingSequence]:
    """Every sample of every group as tokens and mask alone: all that a model reads."""
    return [
        TrainingSequence(
            id=f"sample {sample.index} of prompt {sample.prompt.id}",
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
        )
        for group in groups
        for sample in group.samples
    ]


def score_tokens(
    read: Read, sequences: list[TrainingSequence], tokens_per_microbatch: int
) -> list[list[float]]:
    """A number for each token of each sequence; 0 where there is no loss."""
    batch = pack(sequences, tokens_per_microbatch)
    return unpack(batch, read(batch), sequences)


def with_field(
    sequences: list[TrainingSequence], name: str, lists: Sequence[list[float]]
) -> list[TrainingSequence]:
    """The sequences with one more list of numbers each."""
    return [replace(s, **{name: numbers}) for s, numbers in zip(sequences, lists, strict=True)]
