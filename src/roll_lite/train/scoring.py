"""What models say of sampled tokens before the first update: reference, values, old logprobs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from roll_lite.cluster.role import Method, split
from roll_lite.progress import ProgressBar
from roll_lite.train.packing import MicroBatch, TrainingSequence, pack, unpack
from roll_lite.types import Group

Read = Callable[[list[MicroBatch]], list[Tensor]]
"""`logprobs` or `values` of a Scorer or Trainer."""
SEQUENCES_PER_CALL = 512  # bounds what a call over ranks carries


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
    read: Read,
    sequences: Sequence[TrainingSequence],
    tokens_per_microbatch: int,
    num_shards: int = 1,
) -> list[list[float]]:
    """A number for each token of each sequence; 0 where there is no loss."""
    batch = pack(sequences, tokens_per_microbatch, num_shards=num_shards)
    return unpack(batch, read(batch), sequences)


def score_over_ranks(
    method: Method, sequences: Sequence[TrainingSequence], tokens_per_microbatch: int
) -> list[list[float]]:
    """The same by a role's `logprobs` or `values`."""

    def read(batch: list[MicroBatch]) -> list[Tensor]:
        return [rows_R for replica in method(split(batch)) for rows_R in replica]

    scores, num_shards = [], method.role.num_replicas
    with ProgressBar(len(sequences), method.role.name) as bar:
        for start in range(0, len(sequences), SEQUENCES_PER_CALL):
            part = sequences[start : start + SEQUENCES_PER_CALL]
            scores += score_tokens(read, part, tokens_per_microbatch, num_shards)
            bar.advance(len(part))
    return scores


def with_field(
    sequences: list[TrainingSequence], name: str, lists: Sequence[list[float]]
) -> list[TrainingSequence]:
    """The sequences with one more list of numbers each."""
    return [replace(s, **{name: numbers}) for s, numbers in zip(sequences, lists, strict=True)]
