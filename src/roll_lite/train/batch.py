"""Packed micro-batches: no padding, under a token budget, of even cost on all ranks.

Only rows go through the head: tokens with loss, and where a loss asks for them those that the
environment wrote. Any other token influences them only as their context. Each row carries its
weight in the loss of the whole batch, so the gradient does not depend on how the batch is split
into micro-batches and over ranks.
"""

import struct
from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush, heapreplace

import torch
import torch.nn.functional as F
from torch import Tensor

from roll_lite.checks import UserError
from roll_lite.models.attention import PackedAttention
from roll_lite.models.cost import BY_LENGTH, SequenceCost
from roll_lite.train.sequences import (
    NUMBERS,
    OPTIONAL,
    TENSORS,
    Pair,
    TrainingSequence,
    row_weights,
    sample_runs,
)

FOLLOWING = ("positions_T", "sequence_R", "sample_R", "segment_R")
"""Fields of a micro-batch that follow from others."""
CODES = {"b": torch.int8, "q": torch.int64, "d": torch.float64}  # of struct


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
    observed_R: Tensor | None = None
    """Whether a row is a token that the environment wrote. All numbers of such a row are 0 but its
    weight: its share among the rows of this kind."""
    logprobs_R: Tensor | None = None
    """Behaviour logprobs of the targets."""
    old_logprobs_R: Tensor | None = None
    reference_logprobs_R: Tensor | None = None
    advantages_R: Tensor | None = None
    values_R: Tensor | None = None
    returns_R: Tensor | None = None
    teacher_ids_RK: Tensor | None = None
    teacher_logprobs_RK: Tensor | None = None
    experts_TK: Tensor | None = None
    """uint8: the experts that the engine used in all sparse layers, end to end."""
    is_recorded_T: Tensor | None = None
    """Whether those of a token are known."""

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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those that others do not follow from, by names without their dimensions."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name not in FOLLOWING:
                yield field.name.removesuffix("K").rstrip("TRS").rstrip("_"), value

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
    only: Container[int] | None = None,
) -> list[MicroBatch]:
    """Split a batch into micro-batches of at most `tokens_per_microbatch` tokens.

    Every shard gets the same number of them: data-parallel rank i of `num_shards` trains on the
    i-th contiguous part of the list. Each run of `together` sequences stays in one micro-batch, in
    order, and `by_sample` each sample, for losses that have a number per sample. `constant` divides
    the sums of aggregation seq_mean_token_sum_const. `only` leaves out all but the sequences in
    these places, and the rest weigh what they do in the whole batch.
    """
    known = _known_fields(sequences)
    samples = sample_runs(sequences)
    weights_S = _weights(sequences, samples, aggregation, constant)
    if num_shards < 1 or together < 1 or len(sequences) % together:
        raise UserError(
            f"num_shards={num_shards} must be at least 1, and together={together} must divide "
            f"{len(sequences)} sequences"
        )
    runs = [range(i, i + together) for i in range(0, len(sequences), together)]
    runs = samples if by_sample else runs
    runs = [run for run in runs if only is None or run[0] in only]
    tokens = [len(sequence.token_ids) - 1 for sequence in sequences]
    lengths = [sum(tokens[i] for i in run) for run in runs]
    for run, length in zip(runs, lengths, strict=True):
        if length > tokens_per_microbatch:
            _refuse_length([sequences[i].id for i in run], length, tokens_per_microbatch)
    costs = [sum(cost(tokens[i]) for i in run) for run in runs]
    bins = spread(lengths, costs, tokens_per_microbatch, num_shards) or [[]] * num_shards
    idle = _idle_microbatch(sequences[0], known) if [] in bins else None
    return [
        _pack(sequences, [i for run in chosen for i in runs[run]], weights_S, known)
        if chosen
        else idle
        for chosen in bins
    ]


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


def _weights(
    sequences: Sequence[TrainingSequence],
    samples: list[range],
    aggregation: str,
    constant: float | None,
) -> list[tuple[float, float]]:
    """For each sequence the weight of a row that was sampled, and of one that was observed."""
    sampled = [sum(sum(sequences[i].loss_mask[1:]) for i in run) for run in samples]
    observed = [sum(_num_observed(sequences[i]) for i in run) for run in samples]
    weights = row_weights(sampled, aggregation, constant)
    nothing = [0.0] * len(samples)
    others = row_weights(observed, aggregation, constant) if any(observed) else nothing
    pairs = zip(weights, others, strict=True)
    return [pair for run, pair in zip(samples, pairs, strict=True) for _ in run]


def _num_observed(sequence: TrainingSequence) -> int:
    both = zip(sequence.observed[1:], sequence.loss_mask[1:], strict=False)
    return sum([is_observed and not is_sampled for is_observed, is_sampled in both])


def _known_fields(sequences: Sequence[TrainingSequence]) -> list[str]:
    """Optional fields that the sequences have; all of them or none may have a field."""
    known = [name for name in OPTIONAL if _has(sequences[0], name)] if sequences else []
    for sequence in sequences:
        length = len(sequence.token_ids)
        if length < 2:
            raise UserError(f"sequence {sequence.id!r} has {length} tokens; it needs at least 2")
        for name in ("loss_mask", *OPTIONAL):
            is_known = _has(sequence, name)
            if name != "loss_mask" and is_known != (name in known):
                raise UserError(
                    f"sequence {sequence.id!r} has {name if is_known else f'no {name}'}, unlike "
                    f"sequence {sequences[0].id!r}; give {name} to all of a batch or to none"
                )
            if (is_known or name == "loss_mask") and len(getattr(sequence, name)) != length:
                raise UserError(
                    f"sequence {sequence.id!r} has {length} tokens but "
                    f"{len(getattr(sequence, name))} entries in {name}; give one per token"
                )
    return known


def _refuse_length(ids: list[str], length: int, budget: int) -> None:
    raise UserError(
        f"sequence {', '.join(map(repr, ids))} has {length} tokens, over "
        f"tokens_per_microbatch={budget}; raise it, or shorten the sequences with truncate()"
    )


def _has(sequence: TrainingSequence, name: str) -> bool:
    value = getattr(sequence, name)
    return value is not None and len(value) > 0


def _idle_microbatch(like: TrainingSequence, known: list[str]) -> MicroBatch:
    """One token without loss: keeps a rank in step and adds exactly zero to the gradient."""
    contents = {name: getattr(like, name)[:2] for name in known}
    contents |= {"observed": [False, False]} if "observed" in known else {}
    contents |= {"experts": b""}
    sequence = replace(like, token_ids=[0, 0], loss_mask=[False, False], **contents)
    micro = _pack([sequence], [0], [(0.0, 0.0)], known)
    nothing = {"num_sequences": 0, "num_samples": 0, "num_segments": 0}
    return replace(micro, **nothing, indices_S=micro.indices_S[:0])


def _pack(
    sequences: Sequence[TrainingSequence],
    indices: list[int],
    weights_S: Sequence[tuple[float, float]],
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
    is_row_N = mask_N | joined("observed", "b") if "observed" in known else mask_N.clone()
    is_row_N[starts_S] = 0
    learned_R = is_row_N.nonzero()[:, 0]
    observed_R = mask_N[learned_R] == 0
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
        weights_R=torch.tensor([weights_S[i] for i in indices])[sequence_R, observed_R.long()],
        sequence_R=sequence_R,
        sample_R=sample_S[sequence_R],
        segment_R=segment_R,
        num_sequences=len(members),
        num_samples=len(runs),
        num_segments=num_segments,
        indices_S=torch.tensor(indices),
        observed_R=observed_R if "observed" in known else None,
        **{
            f"{name}_R": joined(name, "d")[learned_R].float().masked_fill(observed_R, 0.0)
            for name in NUMBERS
            if name in known
        },
        **{
            f"{name}_RK": torch.cat([getattr(s, name) for s in members])[learned_R]
            for name in TENSORS
            if name in known
        },
        **_recorded_experts(members),
    )


def _recorded_experts(members: list[TrainingSequence]) -> dict[str, Tensor]:
    """Of all tokens but the last of each sequence; nothing if no sequence has any."""
    sizes = [len(sequence.token_ids) - 1 for sequence in members]
    pairs = zip(members, sizes, strict=True)
    found = {len(s.experts) / size: s.id for s, size in pairs if s.experts}
    if not found:
        return {}
    width = int(max(found))
    if found.keys() != {width}:
        raise UserError(
            f"sequence {found[max(found)]!r} has {max(found):g} experts for each token but the "
            f"last, and another {min(found):g}; give all the same whole number, or none"
        )
    pairs = zip(members, sizes, strict=True)
    joined = bytearray().join([s.experts or bytes(width * size) for s, size in pairs])
    is_recorded_S = torch.tensor([bool(s.experts) for s in members])
    return {
        "experts_TK": torch.frombuffer(joined, dtype=torch.uint8).view(-1, width),
        "is_recorded_T": is_recorded_S.repeat_interleave(torch.tensor(sizes)),
    }


def join_numbers(lists: Iterable[Sequence[float]], code: str) -> Tensor:
    """Lists end to end as a tensor; `struct` takes a tenth of the time of torch.tensor."""
    joined = bytearray().join([struct.pack(f"{len(values)}{code}", *values) for values in lists])
    dtype = CODES[code]
    return torch.frombuffer(joined, dtype=dtype) if joined else torch.empty(0, dtype=dtype)


def _count_segments(sequence_R: Tensor, segment_R: Tensor) -> tuple[Tensor, int]:
    """Segments with rows, numbered from 0 over all sequences."""
    distinct, number_R = (sequence_R * 2**32 + segment_R).unique(return_inverse=True)
    return number_R, len(distinct)


# ---- bin packing: which sequences share a micro-batch, and which micro-batches a rank

Bin = list[int]
"""Indices of the items in it."""


def spread(
    lengths: Sequence[int], costs: Sequence[float], capacity: int, num_shards: int
) -> list[Bin]:
    """Items in bins of at most `capacity` in length, the same number of bins for every shard.

    As few bins as best-fit-decreasing finds; shards of even cost among those. Shard i has the i-th
    contiguous part of the result, its costliest bin first, so that shards stay in step.
    """
    items = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    tight = _best_fit(items, lengths, capacity)
    num_bins = -(-len(tight) // num_shards)
    shards = _even(items, costs, lengths, num_shards, num_bins * capacity) or []
    filled = [_fill(shard, costs, lengths, num_bins, capacity) for shard in shards]
    if not filled or None in filled:  # too little slack to be even: deal out the tight bins
        filled = _deal(tight, costs, num_shards, num_bins)

    def cost_of(members: Bin) -> float:
        return sum(costs[i] for i in members)

    return [sorted(b) for bins in filled for b in sorted(bins, key=cost_of, reverse=True)]


def _best_fit(items: Bin, lengths: Sequence[int], capacity: int) -> list[Bin]:
    """Longest first, each into the fullest bin that has room."""
    bins: list[Bin] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), sorted
    for i in sorted(items, key=lambda i: (-lengths[i], i)):
        at = bisect_left(rooms, (lengths[i], -1))
        if at < len(rooms):
            room, chosen = rooms.pop(at)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(i)
        insort(rooms, (room - lengths[i], chosen))
    return bins


def _even(
    items: Bin, costs: Sequence[float], lengths: Sequence[int], num_bins: int, capacity: int
) -> list[Bin] | None:
    """Items come costliest first; each goes into the cheapest bin with room. None: no room."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    room = [capacity] * num_bins
    cheapest = [(0.0, b) for b in range(num_bins)]  # a heap
    for i in items:
        full = []
        while cheapest and room[cheapest[0][1]] < lengths[i]:
            full.append(heappop(cheapest))
        if not cheapest:
            return None
        cost, chosen = cheapest[0]
        heapreplace(cheapest, (cost + costs[i], chosen))
        bins[chosen].append(i)
        room[chosen] -= lengths[i]
        for entry in full:
            heappush(cheapest, entry)
    return bins


def _fill(
    items: Bin, costs: Sequence[float], lengths: Sequence[int], num_bins: int, capacity: int
) -> list[Bin] | None:
    """One shard's items in exactly `num_bins` bins: even ones, else tight ones, or None."""
    bins = _even(items, costs, lengths, num_bins, capacity) or _best_fit(items, lengths, capacity)
    return bins + [[] for _ in range(num_bins - len(bins))] if len(bins) <= num_bins else None


def _deal(
    bins: list[Bin], costs: Sequence[float], num_shards: int, num_bins: int
) -> list[list[Bin]]:
    """Whole bins to shards, at most `num_bins` to each, costliest first."""
    totals = [sum(costs[i] for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-totals[b], b))
    shards = _even(order, totals, [1] * len(bins), num_shards, num_bins)
    return [[bins[b] for b in shard] + [[]] * (num_bins - len(shard)) for shard in shards]
