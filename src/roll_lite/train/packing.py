"""Sequences of many lengths -> packed micro-batches under a token budget, without padding.

Only rows that carry loss go through the head, so a token outside the mask cannot change anything
but the context of others. Each row has its weight in the loss from the start, over the whole
batch: how a batch is cut into micro-batches does not change the gradient.
"""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from roll_lite.models.attention import PackedAttention


@dataclass(slots=True, kw_only=True)
class TrainingSequence:
    token_ids: list[int]
    loss_mask: list[bool]
    """True for the tokens to learn from."""
    logprobs: list[float] = field(default_factory=list)
    """Behaviour logprobs of the tokens; may be empty where the loss does not use them."""
    advantage: float = 1.0


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Sequences end to end. Row r predicts `targets_R[r]` at packed position `rows_R[r]`."""

    token_ids_T: Tensor
    positions_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows_R: Tensor
    targets_R: Tensor
    logprobs_R: Tensor
    """Behaviour logprobs of the targets."""
    advantages_R: Tensor
    teacher_ids_RK: Tensor | None = None
    weights_R: Tensor
    """Share of each row in the batch's loss; all rows of a batch sum to 1 (token mean)."""

    def to(self, device: torch.device) -> "MicroBatch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicroBatch(
            **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        )

    @property
    def attention(self) -> PackedAttention:
        return PackedAttention(self.cu_seqlens, self.max_seqlen)


def pack(sequences: list[TrainingSequence], tokens_per_microbatch: int) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most so many tokens."""
    num_rows = sum(sum(sequence.loss_mask[1:]) for sequence in sequences)
    if num_rows == 0:
        raise ValueError("no token of the batch carries loss: every loss_mask is empty")
    bins = _fill_bins([len(s.token_ids) - 1 for s in sequences], tokens_per_microbatch)
    return [_pack([sequences[i] for i in indices], 1.0 / num_rows) for indices in bins]


def _fill_bins(lengths: list[int], capacity: int) -> list[list[int]]:
    """First fit, longest first: few bins, each of similar lengths."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > capacity:
            raise ValueError(
                f"a sequence of {lengths[i]} tokens is longer than "
                f"tokens_per_microbatch={capacity}; raise it or shorten the sequence"
            )
        chosen = next((b for b, left in enumerate(room) if left >= lengths[i]), None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            room.append(capacity)
        bins[chosen].append(i)
        room[chosen] -= lengths[i]
    return bins


def _pack(sequences: list[TrainingSequence], row_weight: float) -> MicroBatch:
    """A sequence's last token predicts nothing, so it is a target only."""
    token_ids, positions, starts = [], [], [0]
    rows, targets, logprobs, advantages = [], [], [], []
    for sequence in sequences:
        start, length = len(token_ids), len(sequence.token_ids) - 1
        token_ids += sequence.token_ids[:-1]
        positions += range(length)
        starts.append(start + length)
        learned = [i for i in range(length) if sequence.loss_mask[i + 1]]
        rows += [start + i for i in learned]
        targets += [sequence.token_ids[i + 1] for i in learned]
        if sequence.logprobs:
            logprobs += [sequence.logprobs[i + 1] for i in learned]
        else:
            logprobs += [0.0] * len(learned)
        advantages += [sequence.advantage] * len(learned)
    return MicroBatch(
        token_ids_T=torch.tensor(token_ids),
        positions_T=torch.tensor(positions),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=max(len(sequence.token_ids) - 1 for sequence in sequences),
        rows_R=torch.tensor(rows, dtype=torch.int64),
        targets_R=torch.tensor(targets, dtype=torch.int64),
        logprobs_R=torch.tensor(logprobs),
        advantages_R=torch.tensor(advantages),
        weights_R=torch.full((len(rows),), row_weight),
    )
