"""Sequences and packed micro-batches: no padding, under a token budget.

Only rows (tokens with loss) go through the head, so a masked token influences others only as their
context. Each row carries its weight in the loss of the whole batch, so the gradient does not depend
on how the batch is split into micro-batches and over ranks.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from roll_lite.models.attention import PackedAttention
from roll_lite.models.cost import BY_LENGTH, SequenceCost
from roll_lite.train.balance import spread

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_const",
)
NUMBERS = ("logprobs", "old_logprobs", "reference_logprobs", "advantages", "values", "returns")
TENSORS = ("teacher_ids", "teacher_logprobs")
OPTIONAL = (*NUMBERS, *TENSORS, "segments")
CODES = {"b": torch.int8, "q": torch.int64, "d": torch.float64}  # of struct


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
    entropies: list[float] = field(default_factory=list)
    """Of the policy at token i when it was first trained on; for records alone."""
    teacher_ids: Tensor | None = None
    """(tokens, k): the teacher's likeliest tokens at the place of token i."""
    teacher_logprobs: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Sequences end to end. Row r predicts `targets_R[r]` at packed position `rows_R[r]`.

    Fields about rows that the sequences do not have are None.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows_R: Tensor
    targets_R: Tensor
    weights_R: Tensor
    """Share of each row in the loss of the whole batch."""
    sequence_R: Tensor
    """Which sequence of the micro-batch a row belongs to."""
    sample_R: Tensor
    """Which sample; all of a sample is here if the batch was packed `by_sample`."""
    segment_R: Tensor
    """Which segment (turn) of the micro-batch; a sequence without segments is one."""
    num_sequences: int
    num_samples: int
    num_segments: int
    indices_S: Tensor
    """Place of each sequence in the list that was packed."""
    logprobs_R: Tensor | None = None
    """Behaviour logprobs of the targets."""
    old_logprobs_R: Tensor | None = None
    reference_logprobs_R: Tensor | None = None
    advantages_R: Tensor | None = None
    values_R: Tensor | None = None
    returns_R: Tensor | None = None
    teacher_ids_RK: Tensor | None = None
    teacher_logprobs_RK: Tensor | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """On CUDA by way of pinned memory, so that the host does not wait for the device."""

        def moved(value: Tensor) -> Tensor:
            if device.type == "cuda" and not value.is_cuda:
                value = value.pin_memory()
            return value.to(device, non_blocking=True)

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicroBatch(
            **{k: moved(v) if isinstance(v, Tensor) else v for k, v in values.items()}
        )

    @property
    def attention(self) -> PackedAttention:
        return PackedAttention(self.cu_seqlens, self.max_seqlen)


def pack(
    sequences: Sequence[TrainingSequence],
    tokens_per_microbatch: int,
    *,
    num_shards: int = 1,
    aggregation: str = "token_mean",
    constant: float | None = None,
    together: int = 1,
    by_sample: bool = False,
    cost: SequenceCost = BY_LENGTH,
) -> list[MicroBatch]:
    """Split a batch into micro-batches of at most `tokens_per_microbatch` tokens.

    Every shard gets the same number of them: data-parallel rank i of `num_shards` trains on the
    i-th contiguous part of the list. Each run of `together` sequences stays in one micro-batch, in
    order, and `by_sample` each sample, for losses that have a number per sample. `constant` divides
    the sums of aggregation seq_mean_token_sum_const.
    """
    known = _known_fields(sequences)
    samples = sample_runs(sequences)
    rows = [sum(sum(sequences[i].loss_mask[1:]) for i in run) for run in samples]
    weights = row_weights(rows, aggregation, constant)
    weights_S = [weight for run, weight in zip(samples, weights, strict=True) for _ in run]
    if num_shards < 1 or together < 1 or len(sequences) % together:
        raise ValueError(
            f"num_shards={num_shards} must be at least 1, and together={together} must divide "
            f"{len(sequences)} sequences"
        )
    runs = [range(i, i + together) for i in range(0, len(sequences), together)]
    runs = samples if by_sample else runs
    tokens = [len(sequence.token_ids) - 1 for sequence in sequences]
    lengths = [sum(tokens[i] for i in run) for run in runs]
    for run, length in zip(runs, lengths, strict=True):
        if length > tokens_per_microbatch:
            _refuse_length([sequences[i].id for i in run], length, tokens_per_microbatch)
    costs = [sum(cost(tokens[i]) for i in run) for run in runs]
    bins = spread(lengths, costs, tokens_per_microbatch, num_shards)
    idle = _idle_microbatch(sequences[0], known) if [] in bins else None
    return [
        _pack(sequences, [i for run in chosen for i in runs[run]], weights_S, known)
        if chosen
        else idle
        for chosen in bins
    ]


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


def truncate(
    sequences: Sequence[TrainingSequence], tokens_per_microbatch: int
) -> tuple[list[TrainingSequence], int]:
    """Sequences truncated so that each fits in a micro-batch, and how many were truncated."""
    longest = tokens_per_microbatch + 1  # the last token is only a target
    per_token = ("token_ids", "loss_mask", *OPTIONAL)
    result, num_cut = [], 0
    for sequence in sequences:
        if len(sequence.token_ids) > longest:
            values = {name: getattr(sequence, name) for name in per_token}
            cut = {name: v[:longest] for name, v in values.items() if v is not None}
            sequence, num_cut = replace(sequence, **cut), num_cut + 1
        result.append(sequence)
    return result, num_cut


def unpack(
    batch: list[MicroBatch], rows: list[Tensor], sequences: Sequence[TrainingSequence]
) -> list[list[float]]:
    """Values of rows, one tensor per micro-batch, as lists by token; 0 where there is no loss."""
    lengths = torch.tensor([len(sequence.token_ids) for sequence in sequences])
    starts_S = lengths.cumsum(0) - lengths
    flat_N = torch.zeros(int(lengths.sum()))
    for micro, values_R in zip(batch, rows, strict=True):
        place_R = micro.positions_T[micro.rows_R] + 1  # a row predicts the next token
        start_R = starts_S[micro.indices_S][micro.sequence_R.cpu()]
        flat_N[start_R + place_R.cpu()] = values_R.detach().float().cpu()
    return [part.tolist() for part in flat_N.split(lengths.tolist())]


def _known_fields(sequences: Sequence[TrainingSequence]) -> list[str]:
    """Optional fields that the sequences have; all of them or none may have a field."""
    known = [name for name in OPTIONAL if _has(sequences[0], name)] if sequences else []
    for sequence in sequences:
        length = len(sequence.token_ids)
        if length < 2:
            raise ValueError(f"sequence {sequence.id!r} has {length} tokens; it needs at least 2")
        for name in ("loss_mask", *OPTIONAL):
            is_known = _has(sequence, name)
            if name != "loss_mask" and is_known != (name in known):
                raise ValueError(
                    f"sequence {sequence.id!r} has {name if is_known else f'no {name}'}, unlike "
                    f"sequence {sequences[0].id!r}; give {name} to all of a batch or to none"
                )
            if (is_known or name == "loss_mask") and len(getattr(sequence, name)) != length:
                raise ValueError(
                    f"sequence {sequence.id!r} has {length} tokens but "
                    f"{len(getattr(sequence, name))} entries in {name}; give one per token"
                )
    return known


def _refuse_length(ids: list[str], length: int, budget: int) -> None:
    raise ValueError(
        f"sequence {', '.join(map(repr, ids))} has {length} tokens, over "
        f"tokens_per_microbatch={budget}; raise it, or shorten the sequences with truncate()"
    )


def _has(sequence: TrainingSequence, name: str) -> bool:
    value = getattr(sequence, name)
    return value is not None and len(value) > 0


def _idle_microbatch(like: TrainingSequence, known: list[str]) -> MicroBatch:
    """One token without loss: keeps a rank in step and adds exactly zero to the gradient."""
    contents = {name: getattr(like, name)[:2] for name in known}
    sequence = replace(like, token_ids=[0, 0], loss_mask=[False, False], **contents)
    micro = _pack([sequence], [0], [0.0], known)
    nothing = {"num_sequences": 0, "num_samples": 0, "num_segments": 0}
    return replace(micro, **nothing, indices_S=micro.indices_S[:0])


def _pack(
    sequences: Sequence[TrainingSequence],
    indices: list[int],
    weights_S: Sequence[float],
    known: list[str],
) -> MicroBatch:
    """A sequence's last token predicts nothing, so it is a target only.

    N counts all tokens, T all but the last of each sequence: token n of sequence s is predicted
    at packed position n - 1 - s.
    """
    members = [sequences[i] for i in indices]

    def joined(name: str, code: str) -> Tensor:
        return join_numbers((getattr(sequence, name) for sequence in members), code)

    lengths_S = torch.tensor([len(sequence.token_ids) for sequence in members])
    ends_S = lengths_S.cumsum(0)
    starts_S = ends_S - lengths_S
    token_ids_N, mask_N = joined("token_ids", "q"), joined("loss_mask", "b")
    place_N = torch.arange(len(mask_N)) - starts_S.repeat_interleave(lengths_S)
    is_input_N = torch.ones(len(mask_N), dtype=torch.bool)
    is_input_N[ends_S - 1] = False
    mask_N[starts_S] = 0
    learned_R = mask_N.nonzero()[:, 0]
    sequence_R = torch.arange(len(members)).repeat_interleave(lengths_S)[learned_R]
    runs = sample_runs(members)
    sample_S = torch.arange(len(runs)).repeat_interleave(torch.tensor([len(run) for run in runs]))
    segment_R, num_segments = sequence_R, len(members)
    if "segments" in known:
        segment_R, num_segments = _count_segments(sequence_R, joined("segments", "q")[learned_R])
    return MicroBatch(
        token_ids_T=token_ids_N[is_input_N],
        positions_T=place_N[is_input_N],
        cu_seqlens=F.pad((lengths_S - 1).cumsum(0), (1, 0)).int(),
        max_seqlen=int(lengths_S.max()) - 1,
        rows_R=learned_R - 1 - sequence_R,
        targets_R=token_ids_N[learned_R],
        weights_R=torch.tensor([weights_S[i] for i in indices])[sequence_R],
        sequence_R=sequence_R,
        sample_R=sample_S[sequence_R],
        segment_R=segment_R,
        num_sequences=len(members),
        num_samples=len(runs),
        num_segments=num_segments,
        indices_S=torch.tensor(indices),
        **{f"{name}_R": joined(name, "d")[learned_R].float() for name in NUMBERS if name in known},
        **{
            f"{name}_RK": torch.cat([getattr(s, name) for s in members])[learned_R]
            for name in TENSORS
            if name in known
        },
    )


def join_numbers(lists: Iterable[Sequence[float]], code: str) -> Tensor:
    """Lists end to end as a tensor; `struct` takes a tenth of the time of torch.tensor."""
    joined = bytearray().join([struct.pack(f"{len(values)}{code}", *values) for values in lists])
    dtype = CODES[code]
    return torch.frombuffer(joined, dtype=dtype) if joined else torch.empty(0, dtype=dtype)


def _count_segments(sequence_R: Tensor, segment_R: Tensor) -> tuple[Tensor, int]:
    """Segments with rows, numbered from 0 over all sequences."""
    distinct, number_R = (sequence_R * 2**32 + segment_R).unique(return_inverse=True)
    return number_R, len(distinct)


def row_weights(
    rows_S: Sequence[int], aggregation: str, constant: float | None = None
) -> list[float]:
    """The weight in the batch's loss of each row of a sample, given the numbers of rows.

    Samples without rows do not count. The aggregations call a sample a sequence, as papers do.
    `constant` divides the sums of seq_mean_token_sum_const.
    """
    check_aggregation(aggregation, constant)
    if not any(rows_S):
        raise ValueError("no token of the batch carries loss: every loss_mask is empty")
    if aggregation == "token_mean":
        return [(1.0 if rows else 0.0) / sum(rows_S) for rows in rows_S]
    num_samples = sum(rows > 0 for rows in rows_S)
    if aggregation == "seq_mean_token_mean":
        return [1 / (num_samples * rows) if rows else 0.0 for rows in rows_S]
    return [1 / (num_samples * (constant or 1.0)) if rows else 0.0 for rows in rows_S]


def check_aggregation(aggregation: str, constant: float | None) -> None:
    """Refuse an unknown name, and a constant that is missing or not read."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation={aggregation!r} is not known; use one of {', '.join(AGGREGATIONS)}"
        )
    if (constant is not None) != (aggregation == "seq_mean_token_sum_const"):
        raise ValueError(
            f"constant={constant} with aggregation={aggregation!r}; seq_mean_token_sum_const "
            "needs one (the longest reply, say), other aggregations read none"
        )
    if constant is not None and not constant > 0:
        raise ValueError(f"constant={constant} must be above 0")
