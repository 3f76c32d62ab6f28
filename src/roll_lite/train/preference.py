"""Learning from pairs of replies, one preferred to the other.

In a micro-batch, sequences 2i and 2i + 1 are the chosen and the rejected reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from roll_lite.checks import above, one_of, only_read_by
from roll_lite.train.losses import Measurements, required, sum_rows
from roll_lite.train.packing import MicroBatch, TrainingSequence, pack

Pair = tuple[TrainingSequence, TrainingSequence]
"""The chosen and the rejected reply, each with its prompt."""


def check_pairs_fit(pairs: Sequence[Pair], tokens_per_microbatch: int) -> None:
    """Refuse a pair that no micro-batch holds, before anything is trained."""
    for chosen, rejected in pairs:
        length = len(chosen.token_ids) + len(rejected.token_ids) - 2
        if length > tokens_per_microbatch:
            raise ValueError(
                f"{chosen.id} and {rejected.id} have {length} tokens together, over "
                f"tokens_per_microbatch={tokens_per_microbatch}; raise it, or leave the pair out"
            )


def pack_pairs(
    pairs: Sequence[Pair], tokens_per_microbatch: int, num_shards: int = 1
) -> list[MicroBatch]:
    """Micro-batches of whole pairs, weighted so that the batch's loss is the mean over pairs."""
    return pack(
        [sequence for pair in pairs for sequence in pair],
        tokens_per_microbatch,
        num_shards=num_shards,
        together=2,
        aggregation="seq_mean_token_mean",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOLoss:
    """With h = log ratio of the chosen minus that of the rejected, summed over tokens:

    sigmoid: -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), s the label smoothing
    ipo: (h - 1 / (2 beta))^2, not divided by lengths, as in the paper
    """

    kind: str = "sigmoid"
    """sigmoid or ipo."""
    beta: float = 0.1
    label_smoothing: float = 0.0
    """Probability that a pair is labelled the wrong way round."""

    def __post_init__(self):
        one_of(("sigmoid", "ipo"), self, "kind")
        only_read_by({"label_smoothing": ("sigmoid",)}, self)
        above(0, self, "beta")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} must be at least 0 and below 0.5"
            )

    def __call__(
        self, logprobs_R: Tensor, entropy_R: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Measurements]:
        """Every row has the loss of its pair."""
        _check_pairs(batch)
        delta_R = logprobs_R - required(batch, "reference_logprobs_R")
        chosen_P, rejected_P = (
            sum_rows(delta_R, batch.sequence_R, batch.num_sequences).view(-1, 2).unbind(1)
        )
        margin_P = chosen_P - rejected_P
        pair_R = batch.sequence_R // 2
        with torch.no_grad():
            by_pair = {
                "reward/margin": self.beta * margin_P,
                "reward/accuracy": (1 + margin_P.sign()) / 2,  # at the start, all are ties
                "reward/chosen": self.beta * chosen_P,
                "reward/rejected": self.beta * rejected_P,
            }
            measurements = {name: value_P[pair_R] for name, value_P in by_pair.items()}
        measurements["loss/entropy"] = entropy_R.detach()
        return self._pair_loss(margin_P)[pair_R], measurements

    def _pair_loss(self, margin_P: Tensor) -> Tensor:
        if self.kind == "ipo":
            return (margin_P - 1 / (2 * self.beta)).square()
        agree_P, disagree_P = (
            F.logsigmoid(self.beta * margin_P),
            F.logsigmoid(-self.beta * margin_P),
        )
        return -(1 - self.label_smoothing) * agree_P - self.label_smoothing * disagree_P


def _check_pairs(batch: MicroBatch) -> None:
    """A reply without rows would shift the weights of pairs against each other."""
    rows_S = torch.bincount(batch.sequence_R, minlength=batch.num_sequences)
    if batch.num_sequences % 2 or not bool(rows_S.all()):
        raise ValueError(
            f"a micro-batch of {batch.num_sequences} sequences with {rows_S.tolist()} tokens to "
            "learn from is not made of pairs; use pack_pairs(), and leave out empty replies"
        )
