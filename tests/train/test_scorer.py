"""Logprobs of whole sequences against transformers, and what of them is kept on disk."""

import os

import pytest
import torch
from support.models import make_reference
from support.training_data import random_sequences, rows_with_loss

from roll_lite.cluster.cluster import Cluster
from roll_lite.train import scorer as scorer_module
from roll_lite.train.batch import pack
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.preference import with_reference
from roll_lite.train.scorer import Scorer, score_over_ranks
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.trainer import Trainer


@pytest.fixture
def folder(tmp_path):
    make_reference("qwen3").save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


def plain_sequences(num=9):
    """Without logprobs and advantages."""
    return [
        TrainingSequence(id=s.id, token_ids=s.token_ids, loss_mask=s.loss_mask)
        for s in random_sequences(num)
    ]


@torch.no_grad()
def expected_logprobs(sequence):
    ids = torch.tensor(sequence.token_ids)
    logp = torch.log_softmax(make_reference("qwen3")(ids[None]).logits[0].double(), -1)
    rows = rows_with_loss(sequence)
    return [logp[i - 1, ids[i]].item() if i in rows else 0.0 for i in range(len(ids))]


def test_scores_and_evaluation_equal_transformers(folder, monkeypatch):
    monkeypatch.setattr(scorer_module, "SEQUENCES_PER_CALL", 4)
    sequences = plain_sequences()
    expected = [expected_logprobs(sequence) for sequence in sequences]
    with Cluster("train=0 scorer=0", "cpu") as cluster:
        scorer = cluster.role("scorer", Scorer, folder=folder)
        scores = score_over_ranks(scorer.logprobs, sequences, 64)
        for found, wanted in zip(scores, expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
        trainer = cluster.role(
            "train", Trainer, folder=folder, loss=sft_loss, schedule=Schedule(lr=1e-3)
        )
        before = trainer.evaluate(pack(sequences, 64))["loss/loss"]
        num_rows = sum(len(rows_with_loss(sequence)) for sequence in sequences)
        assert before == pytest.approx(-sum(map(sum, expected)) / num_rows, rel=1e-5)
        assert trainer.step(pack(sequences, 64))["loss/loss"] == pytest.approx(before, rel=1e-6)
        assert trainer.evaluate(pack(sequences, 64))["loss/loss"] < before


def test_reference_logprobs_are_computed_once_for_the_same_data_and_model(folder, tmp_path, capsys):
    first, second, third, fourth = plain_sequences(4)
    pairs = [(first, second), (third, fourth)]
    computed = []

    def compute(sequences):
        computed.append(len(sequences))
        return [[0.1 * i for i in range(len(s.token_ids))] for s in sequences]

    def logprobs(pairs):
        path = tmp_path / "run" / "reference.safetensors"
        scored = with_reference(pairs, compute, folder=folder, path=path)
        return [[s.reference_logprobs for s in pair] for pair in scored]

    kept = logprobs(pairs)
    assert kept[1][0] == pytest.approx([0.1 * i for i in range(len(third.token_ids))])
    assert logprobs(pairs) == [[pytest.approx(x) for x in pair] for pair in kept]
    assert computed == [4]
    logprobs(pairs[:1])
    assert computed == [4, 2] and "for other data or another model" in capsys.readouterr().out
    os.utime(folder / "model.safetensors", (1, 1))
    logprobs(pairs[:1])
    assert computed == [4, 2, 2]
    (tmp_path / "run" / "reference.safetensors").write_bytes(b"half")
    logprobs(pairs[:1])
    assert computed == [4, 2, 2, 2] and "damaged" in capsys.readouterr().out
    logprobs(pairs[:1])
    assert computed == [4, 2, 2, 2]
