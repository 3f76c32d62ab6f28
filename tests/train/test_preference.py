"""DPO and IPO against the papers' formulas in plain Python floats."""

import math
import random
from dataclasses import replace

import pytest
import torch
from support.training_data import (
    double,
    random_sequences,
    rows_with_loss,
    slope,
    total_and_gradient,
)

from roll_lite.train.batch import pack, pack_pairs
from roll_lite.train.preference import DPOLoss


def pair_sequences():
    sequences = random_sequences(8, longest=12, more=("values", "reference_logprobs"))
    return [replace(s, advantages=[], logprobs=[]) for s in sequences]


def expected_preference(loss, sequences, policy):
    def log_ratio(sequence):
        return sum(
            policy[sequence.id][i] - sequence.reference_logprobs[i]
            for i in rows_with_loss(sequence)
        )

    total = 0.0
    for chosen, rejected in zip(sequences[::2], sequences[1::2], strict=True):
        h = log_ratio(chosen) - log_ratio(rejected)
        if loss.kind == "ipo":
            total += (h - 1 / (2 * loss.beta)) ** 2
        else:
            agree = -math.log(1 / (1 + math.exp(-loss.beta * h)))
            disagree = -math.log(1 / (1 + math.exp(loss.beta * h)))
            total += (1 - loss.label_smoothing) * agree + loss.label_smoothing * disagree
    return total / (len(sequences) / 2)


@pytest.mark.parametrize(
    "loss", [DPOLoss(), DPOLoss(beta=0.5, label_smoothing=0.2), DPOLoss(kind="ipo", beta=0.3)]
)
def test_dpo_is_the_mean_over_pairs(loss):
    sequences = pair_sequences()
    options = {"aggregation": "seq_mean_token_mean", "together": 2}
    policy = {s.id: s.values for s in sequences}
    for budget, num_shards in ((10**6, 1), (24, 1), (24, 3)):
        total, gradient = total_and_gradient(
            loss, sequences, budget, num_shards=num_shards, **options
        )
        assert total == pytest.approx(expected_preference(loss, sequences, policy), rel=1e-6)
        for name, token in random.Random(0).sample(sorted(gradient), 10):

            def total_at(values, name=name):
                return expected_preference(loss, sequences, policy | {name: values})

            expected = slope(total_at, policy[name], token)
            assert gradient[name, token] == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_measurements_of_dpo_are_means_over_pairs():
    sequences = pair_sequences()
    rewards = [
        0.1 * sum(s.values[i] - s.reference_logprobs[i] for i in rows_with_loss(s))
        for s in sequences
    ]
    margins = [c - r for c, r in zip(rewards[::2], rewards[1::2], strict=True)]
    (micro,) = map(
        double, pack_pairs(list(zip(sequences[::2], sequences[1::2], strict=True)), 10**6)
    )
    _, found = DPOLoss()(micro.values_R, torch.zeros_like(micro.values_R), micro)
    means = {name: (value * micro.weights_R).sum().item() for name, value in found.items()}
    assert means["reward/margin"] == pytest.approx(sum(margins) / 4, rel=1e-5)
    assert means["reward/accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 4, rel=1e-5)
    assert means["reward/chosen"] == pytest.approx(sum(rewards[::2]) / 4, rel=1e-5)
    assert means["reward/rejected"] == pytest.approx(sum(rewards[1::2]) / 4, rel=1e-5)
    assert 0 < means["reward/accuracy"] < 1
    _, found = DPOLoss()(micro.reference_logprobs_R, torch.zeros_like(micro.values_R), micro)
    assert set(found["reward/accuracy"].tolist()) == {0.5}


def test_what_is_no_pair_is_refused():
    sequences = pair_sequences()
    sequences[2].loss_mask = [False] * len(sequences[2].token_ids)
    for wrong in (sequences[:4], sequences[4:7]):
        (micro,) = pack(wrong, 1000)
        with pytest.raises(ValueError, match="not made of pairs"):
            DPOLoss()(micro.values_R, micro.values_R, micro)
    with pytest.raises(ValueError, match=r"label_smoothing=0.1 is only read with kind='sigmoid'"):
        DPOLoss(kind="ipo", label_smoothing=0.1)
