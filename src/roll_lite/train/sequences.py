"""Sequences to train on, the samples that they belong to, and what their tokens weigh in a loss.

No torch: data is encoded and options are checked before anything needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Literal

from roll_lite.checks import UserError
from roll_lite.types import Group, Sample

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = ("logprobs", "old_logprobs", "reference_logprobs", "advantages", "values", "returns")
TENSORS = ("teacher_ids", "teacher_logprobs")
OPTIONAL = (*NUMBERS, *TENSORS, "segments", "observed")


@dataclass(slots=True, kw_only=True)
class TrainingSequence:
    """A sequence to train on. Entry i of every list belongs to token i; empty is unknown."""

    id: str = ""
    """Named in errors."""
    sample: int | None = None
    """Neighbouring sequences with the same number are one sample: the batch weighs them as one."""
    token_ids: list[int]
    loss_mask: list[bool]
    """True for the tokens to learn from."""
    logprobs: list[float] = field(default_factory=list)
    """Behaviour logprobs: of the policy that sampled the tokens."""
    old_logprobs: list[float] = field(default_factory=list)
    """The trainer's own, before the first update."""
    reference_logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """The critic's value of the tokens before token i."""
    returns: list[float] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    """The turn that each token belongs to."""
    observed: list[bool] = field(default_factory=list)
    """True for tokens that the environment wrote between the model's turns, if they are to have
    rows too; those in loss_mask stay what they are."""
    entropies: list[float] = field(default_factory=list)
    """Entropy of the policy at token i when it was first trained on; for records alone."""
    mismatches: list[float] = field(default_factory=list)
    """Distance of the policy's logprob of token i from its behaviour logprob when it was first
    trained on; for records alone."""
    teacher_ids: Tensor | None = None
    """(tokens, k): the teacher's likeliest tokens at the place of token i."""
    teacher_logprobs: Tensor | None = None
    experts: bytes = field(default=b"", repr=False)
    """Those that the engine used, a byte each: equally many for each token but the last."""


Pair = tuple[TrainingSequence, TrainingSequence]
"""A chosen and a rejected reply, each with its prompt."""


def plain_sequences(groups: list[Group], *, with_experts: bool = False) -> list[TrainingSequence]:
    """Every sample as tokens and masks alone: all that a model reads to score it. The policy also
    reads which experts it had.

    A sample is one sequence, or several that have its number.
    """
    return [
        TrainingSequence(
            id=name_of(sample),
            sample=number,
            token_ids=part.token_ids,
            loss_mask=part.loss_mask,
            experts=part.experts if with_experts else b"",
        )
        for number, sample in enumerate(samples_of(groups))
        for part in sample.sequences
    ]


def samples_of(groups: list[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def name_of(sample: Sample) -> str:
    return f"sample {sample.index} of prompt {sample.prompt.id}"


def with_field(
    sequences: list[TrainingSequence], name: str, lists: Sequence[list[float]]
) -> list[TrainingSequence]:
    """The sequences with one more list of numbers each."""
    return [replace(s, **{name: numbers}) for s, numbers in zip(sequences, lists, strict=True)]


def sampled_numbers(
    sequences: list[TrainingSequence], name: Literal["advantages", "entropies", "mismatches"]
) -> dict[int, list[float]]:
    """Numbers of the sampled tokens, by the number of their sample; none where unknown."""
    found: dict[int, list[float]] = {}
    for sequence in sequences:
        numbers = compress(getattr(sequence, name), sequence.loss_mask)
        found.setdefault(sequence.sample, []).extend(numbers)
    return found


def equal_parts(
    sequences: Sequence[TrainingSequence], num_parts: int
) -> list[list[TrainingSequence]]:
    """Parts of equally many samples (or one less), none empty, each with some of every group."""
    runs = sample_runs(sequences)
    parts = ([sequences[i] for run in runs[n::num_parts] for i in run] for n in range(num_parts))
    return [part for part in parts if part]


def sample_runs(sequences: Sequence[TrainingSequence]) -> list[range]:
    """The places of each sample's sequences."""
    starts = [
        i
        for i, sequence in enumerate(sequences)
        if i == 0 or sequence.sample is None or sequence.sample != sequences[i - 1].sample
    ]
    return [range(*bounds) for bounds in pairwise([*starts, len(sequences)])]


# ---- the weight of a row in the loss of a batch

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_const",
)


def row_weights(
    rows_S: Sequence[int], aggregation: str, constant: float | None = None
) -> list[float]:
    """The weight in the batch's loss of each row of a sample, given the numbers of rows.

    Samples without rows do not count. The aggregations call a sample a sequence, as papers do.
    `constant` divides the sums of seq_mean_token_sum_const.
    """
    check_aggregation(aggregation, constant)
    if not any(rows_S):
        raise UserError("no token of the batch carries loss: every loss_mask is empty")
    if aggregation == "token_mean":
        return [(1.0 if rows else 0.0) / sum(rows_S) for rows in rows_S]
    num_samples = sum(rows > 0 for rows in rows_S)
    if aggregation == "seq_mean_token_mean":
        return [1 / (num_samples * rows) if rows else 0.0 for rows in rows_S]
    return [1 / (num_samples * (constant or 1.0)) if rows else 0.0 for rows in rows_S]


def check_aggregation(aggregation: str, constant: float | None) -> None:
    """Refuse an unknown name, and a constant that is missing or not read."""
    if aggregation not in AGGREGATIONS:
        raise UserError(
            f"aggregation={aggregation!r} is not known; use one of {', '.join(AGGREGATIONS)}"
        )
    if (constant is not None) != (aggregation == "seq_mean_token_sum_const"):
        raise UserError(
            f"constant={constant} with aggregation={aggregation!r}; seq_mean_token_sum_const "
            "needs one (the longest reply, say), other aggregations read none"
        )
    if constant is not None and not constant > 0:
        raise UserError(f"constant={constant} must be above 0")
