"""Packing against plain loops: every row once, weights of the whole batch, even shards."""

import copy
import random
import time
from dataclasses import fields, replace

import pytest
import torch
from support.training_data import random_sequences

from roll_lite.cluster.wire import decode, encode
from roll_lite.models.config import shape_config
from roll_lite.models.cost import SequenceCost
from roll_lite.train.batch import MicroBatch, pack, spread, unpack
from roll_lite.train.encoding import truncate
from roll_lite.train.sequences import NUMBERS, TrainingSequence, equal_parts

MORE = [name for name in NUMBERS if name not in ("logprobs", "advantages")]


def full_sequences(num=30, seed=0):
    """With every optional field, and one without any row."""
    generator = torch.Generator().manual_seed(seed)
    sequences = random_sequences(num, seed, more=MORE)
    for sequence in sequences:
        length = len(sequence.token_ids)
        sequence.segments = [t // 3 for t in range(length)]
        sequence.teacher_ids = torch.randint(0, 99, (length, 2), generator=generator)
        sequence.teacher_logprobs = -torch.rand(length, 2, generator=generator) - 1
    if num > 5:
        sequences[5].loss_mask = [True] + [False] * (len(sequences[5].token_ids) - 1)
    return sequences


def expected_rows(sequences):
    """Every row as (sequence, token id, position, numbers...), in the order of sequences."""
    return [
        (
            index, s.token_ids[i], i - 1, *(getattr(s, name)[i] for name in NUMBERS),
            *s.teacher_ids[i].tolist(), *s.teacher_logprobs[i].tolist(), s.segments[i],
        )
        for index, s in enumerate(sequences)
        for i in range(1, len(s.token_ids))
        if s.loss_mask[i]
    ]  # fmt: skip


def rows_of(micro, sequences):
    """The same, from a micro-batch; checks along the way what each row says about its place."""
    starts = micro.cu_seqlens.tolist()
    rows, segments = [], {}
    for r in range(len(micro.rows_R)):
        local, at = micro.sequence_R[r].item(), micro.rows_R[r].item()
        assert starts[local] <= at < starts[local + 1]
        position = micro.positions_T[at].item()
        assert position == at - starts[local]
        index = micro.indices_S[local].item()
        segment = sequences[index].segments[position + 1]
        assert (
            segments.setdefault((index, segment), micro.segment_R[r].item()) == micro.segment_R[r]
        )
        rows.append(
            (
                index, micro.targets_R[r].item(), position,
                *(getattr(micro, f"{name}_R")[r].item() for name in NUMBERS),
                *micro.teacher_ids_RK[r].tolist(), *micro.teacher_logprobs_RK[r].tolist(), segment,
            )
        )  # fmt: skip
    assert sorted(segments.values()) == list(range(len(segments)))
    if micro.num_sequences:
        assert len(segments) == micro.num_segments
    return rows


@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_row_is_packed_once_with_all_its_numbers(num_shards):
    sequences = full_sequences()
    batch = pack(sequences, 64, num_shards=num_shards)
    rows = [row for micro in batch for row in rows_of(micro, sequences)]
    expected = expected_rows(sequences)
    rows.sort(key=lambda row: (row[0], row[2]))
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)
    for micro in batch:
        for k, index in enumerate(micro.indices_S.tolist()):
            start, end = micro.cu_seqlens[k], micro.cu_seqlens[k + 1]
            assert micro.token_ids_T[start:end].tolist() == sequences[index].token_ids[:-1]


def weighted_loss(sequences, losses, aggregation, constant):
    """The aggregate of per-token losses, from its definition."""
    tokens = [
        [losses[s.id][i] for i in range(1, len(s.token_ids)) if s.loss_mask[i]] for s in sequences
    ]
    kept = [t for t in tokens if t]
    if aggregation == "token_mean":
        return sum(map(sum, kept)) / sum(map(len, kept))
    per_sequence = {
        "seq_mean_token_mean": lambda t: sum(t) / len(t),
        "seq_mean_token_sum": sum,
        "seq_mean_token_sum_const": lambda t: sum(t) / constant,
    }[aggregation]
    return sum(map(per_sequence, kept)) / len(kept)


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize(
    ("aggregation", "constant"),
    [
        ("token_mean", None),
        ("seq_mean_token_mean", None),
        ("seq_mean_token_sum", None),
        ("seq_mean_token_sum_const", 48.0),
    ],
)
def test_weights_are_those_of_the_whole_batch(aggregation, constant, num_shards):
    sequences = full_sequences()
    losses = {s.id: s.old_logprobs for s in sequences}
    wanted = weighted_loss(sequences, losses, aggregation, constant)
    for budget in (39, 100, 10**6):
        for order in (sequences, sequences[::-1]):
            batch = pack(
                order, budget, num_shards=num_shards, aggregation=aggregation, constant=constant
            )
            total = sum((m.weights_R.double() * m.old_logprobs_R).sum().item() for m in batch)
            assert total == pytest.approx(wanted, rel=1e-6)


def test_means_weigh_one_in_all():
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        batch = pack(full_sequences(), 64, num_shards=2, aggregation=aggregation)
        assert sum(m.weights_R.double().sum().item() for m in batch) == pytest.approx(1.0)


def test_masked_numbers_change_nothing():
    sequences = full_sequences()
    changed = copy.deepcopy(sequences)
    for sequence in changed:
        for i, is_learned in enumerate(sequence.loss_mask):
            if not is_learned or i == 0:
                for name in NUMBERS:
                    getattr(sequence, name)[i] = 100.0
                sequence.teacher_logprobs[i] = 100.0
    for micro, again in zip(pack(sequences, 64), pack(changed, 64), strict=True):
        for f in fields(MicroBatch):
            a, b = getattr(micro, f.name), getattr(again, f.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, f.name


@pytest.mark.parametrize("num_shards", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(6))
def test_shards_are_even_and_within_the_budget(seed, num_shards):
    """Costs of shards within 10% of the mean, when a shard has dozens of sequences."""
    generator = random.Random(seed)
    num, capacity = generator.randint(150, 400), 4096
    lengths = [min(capacity, int(generator.lognormvariate(5.5, 1.0)) + 2) for _ in range(num)]
    cost = SequenceCost.of(shape_config("qwen3-0.6b"))
    costs = [cost(length) for length in lengths]
    bins = spread(lengths, costs, capacity, num_shards)
    assert sorted(i for members in bins for i in members) == list(range(num))
    assert all(sum(lengths[i] for i in members) <= capacity for members in bins)
    assert len(bins) % num_shards == 0
    per_shard = len(bins) // num_shards
    fewest = -(-sum(lengths) // (capacity * num_shards))
    assert per_shard <= fewest + 1  # no more than one above what would fit without any waste
    totals = [
        sum(costs[i] for members in bins[s * per_shard : (s + 1) * per_shard] for i in members)
        for s in range(num_shards)
    ]
    assert max(totals) <= 1.1 * sum(totals) / num_shards
    assert bins == spread(lengths, costs, capacity, num_shards)


def test_the_number_of_microbatches_comes_before_evenness():
    """Only the tight filling (60 + 40, 70 + 30) has two bins; by cost alone it would be three."""
    lengths = [60, 70, 30, 40]
    bins = spread(lengths, [length**2 for length in lengths], 100, 2)
    assert sorted(map(sorted, bins)) == [[0, 3], [1, 2]]


def test_even_cost_is_not_even_length():
    """One long sequence costs as much as many short ones, where attention counts."""
    lengths = [1000] + [100] * 40
    bins = spread(lengths, [float(length**2) for length in lengths], 10_000, 2)
    loads = sorted(sum(lengths[i] ** 2 for i in members) for members in bins)
    assert loads == [400_000, 1_000_000]


def test_cost_counts_the_flops_of_blocks():
    """SmolLM2's 134.5M parameters are 106.2M in blocks and 28.3M in the tied embedding."""
    cost = SequenceCost.of(shape_config("smollm2-135m"))
    assert cost.linear == pytest.approx(2 * 106.2e6, rel=1e-3)
    pairs = 4 * 9 * 64 * 30  # flops: scores and values, heads of 64, layers
    assert cost(10) == pytest.approx(10 * cost.linear + pairs * 10 * 10 / 2)


def test_idle_microbatches_add_nothing():
    sequences = full_sequences(2)
    batch = pack(sequences, 100, num_shards=4)
    assert len(batch) == 4
    idle = [micro for micro in batch if micro.num_sequences == 0]
    assert len(idle) == 2
    for micro in idle:
        assert micro.token_ids_T.tolist() == micro.positions_T.tolist() == [0]
        assert micro.cu_seqlens.tolist() == [0, 1] and micro.max_seqlen == 1
        assert len(micro.rows_R) == len(micro.weights_R) == len(micro.indices_S) == 0
        assert micro.teacher_logprobs_RK.shape == (0, 2)
        assert all(getattr(micro, f"{name}_R").shape == (0,) for name in NUMBERS)


def test_pairs_stay_together_in_order():
    sequences = random_sequences(40)
    batch = pack(sequences, 80, num_shards=2, together=2)
    assert len(batch) > 4
    for micro in batch:
        indices = micro.indices_S.tolist()
        assert indices[::2] == [i - 1 for i in indices[1::2]]
        assert all(i % 2 == 0 for i in indices[::2])
    with pytest.raises(ValueError, match="together=2 must divide 39 sequences"):
        pack(sequences[1:], 80, together=2)


def test_rows_come_back_to_their_tokens():
    sequences = full_sequences()
    batch = pack(sequences, 64, num_shards=3)
    lists = unpack(batch, [micro.values_R for micro in batch], sequences)
    for values, sequence in zip(lists, sequences, strict=True):
        masked = [
            v if i and m else 0.0
            for i, (v, m) in enumerate(zip(sequence.values, sequence.loss_mask, strict=True))
        ]
        assert values == pytest.approx(masked, rel=1e-6)


def test_a_batch_is_split_over_updates():
    sequences = random_sequences(7)
    parts = equal_parts(sequences, 3)
    assert [[s.id for s in part] for part in parts] == [
        ["s0", "s3", "s6"], ["s1", "s4"], ["s2", "s5"],
    ]  # fmt: skip
    assert len(equal_parts(sequences, 9)) == 7 and equal_parts([], 3) == []


def test_microbatches_travel_and_move():
    (micro,) = pack(full_sequences(4), 1000)
    moved = micro.to(torch.device("meta"))
    for copied in (decode(encode(micro)), micro.to(torch.device("cpu"))):
        for f in fields(MicroBatch):
            a, b = getattr(micro, f.name), getattr(copied, f.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, f.name
    assert moved.teacher_ids_RK.is_meta and moved.num_sequences == 4
    assert decode(encode(pack(random_sequences(2), 100)))[0].values_R is None


def test_fields_that_no_sequence_has_are_none():
    plain = [TrainingSequence(token_ids=[1, 2, 3], loss_mask=[False, True, True])]
    (micro,) = pack(plain, 10)
    assert all(getattr(micro, f"{name}_R") is None for name in NUMBERS)
    assert micro.teacher_ids_RK is None and micro.segment_R.tolist() == [0, 0]


def test_what_does_not_fit_is_refused_or_cut():
    sequences = full_sequences(6)
    sequences[0].loss_mask = [True] * len(sequences[0].token_ids)
    too_long = max(sequences, key=lambda s: len(s.token_ids))
    tokens = len(too_long.token_ids) - 1
    with pytest.raises(
        ValueError, match=rf"'{too_long.id}' has {tokens} tokens.*microbatch=2;.*truncate\(\)"
    ):
        pack([too_long], 2)
    cut, num_cut = truncate(sequences, 10)
    assert num_cut == sum(len(s.token_ids) > 11 for s in sequences) > 0
    for sequence, short in zip(sequences, cut, strict=True):
        assert short.token_ids == sequence.token_ids[:11]
        assert short.values == sequence.values[:11]
        assert torch.equal(short.teacher_ids, sequence.teacher_ids[:11])
    assert all(len(micro.token_ids_T) <= 10 for micro in pack(cut, 10))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"values": []}, {}, "'s1' has no values, unlike sequence 's0'"),
        ({"teacher_ids": None}, {}, "'s1' has no teacher_ids"),
        ({"returns": [0.0]}, {}, "'s1' has .* tokens but 1 entries in returns"),
        ({"loss_mask": [True]}, {}, "'s1' has .* tokens but 1 entries in loss_mask"),
        ({"token_ids": [4]}, {}, "'s1' has 1 tokens; it needs at least 2"),
        ({}, {"aggregation": "mean"}, "'mean' is not known; use one of token_mean, seq_mean"),
        ({}, {"constant": 5.0}, "constant=5.0 with aggregation='token_mean'"),
        ({}, {"aggregation": "seq_mean_token_sum_const"}, "constant=None .* needs one"),
    ],
)
def test_what_is_wrong_is_named(change, options, message):
    sequences = full_sequences(3)
    sequences[1] = replace(sequences[1], **change)
    with pytest.raises(ValueError, match=message):
        pack(sequences, 1000, **options)


def test_a_batch_without_loss_is_refused():
    masked = TrainingSequence(token_ids=[1, 2, 3], loss_mask=[True, False, False])
    for sequences in ([], [masked], [masked, masked]):
        with pytest.raises(ValueError, match="no token"):
            pack(sequences, 10)


def test_a_large_batch_is_packed_in_a_moment():
    """Two million tokens. A loop over tokens in Python would take several times the limit."""
    sequence = random_sequences(1, longest=4)[0]
    long = TrainingSequence(
        token_ids=sequence.token_ids[:1] * 2000,
        loss_mask=[False] * 500 + [True] * 1500,
        logprobs=[-0.5] * 2000,
        advantages=[0.5] * 2000,
    )
    start = time.process_time()  # others may be using the machine
    pack([long] * 1000, 16384, num_shards=8)
    assert time.process_time() - start < 2.0  # 0.5 s on a slow core
