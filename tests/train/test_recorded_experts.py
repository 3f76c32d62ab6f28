"""Router replay: the trainer computes what the engine computed, whatever its routers choose."""

import copy
from dataclasses import replace

import pytest
import torch
from support import replay_program
from support.forked_ranks import run_ranks
from support.mixtures import make_mixture
from support.trainers import PPO, make_trainer, step_gradient
from support.training_data import random_sequences

from roll_lite.checks import UserError
from roll_lite.cluster.cluster import Cluster
from roll_lite.engine.engine import Engine
from roll_lite.engine.request import Request
from roll_lite.models.attention import PackedAttention
from roll_lite.models.config import LoraOptions
from roll_lite.models.hf import load_model, save_model
from roll_lite.train.batch import pack, unpack
from roll_lite.train.recorded_experts import RecordedExperts
from roll_lite.train.sequences import TrainingSequence
from roll_lite.types import SamplingParams

PAIRED = {"num_experts": 8, "num_experts_per_tok": 3}
"""Two pairs of experts are a token's likeliest: one, and the better one of another."""


def pair_routers(model, first):
    """Experts in pairs whose routers differ by 2e-6: the first of a pair is chosen, or the other.
    The logits of likely experts are above 0."""
    with torch.no_grad():
        for block in model.blocks:
            if hasattr(block.mlp, "router"):
                router = block.mlp.router
                router[1::2] = router[0::2]
                router[(0 if first else 1) :: 2] *= 1 + 2e-6
    return model


@pytest.fixture(scope="module")
def paired(tmp_path_factory):
    """(model of the engine, folder of a trainer whose routers differ from it by rounding)"""
    folder = tmp_path_factory.mktemp("paired")
    make_mixture(folder / "made", **PAIRED)
    engines = pair_routers(load_model(folder / "made"), first=True)
    trainers = pair_routers(load_model(folder / "made"), first=False)
    save_model(folder / "trained", trainers, like=folder / "made")
    return engines, folder / "trained"


def sample(model):
    """Samples of an engine as they are trained on, of shared prompts; its cache is too small for
    all, so some are preempted and read again."""
    config = model.config
    page = config.num_layers * 2 * 4 * config.num_kv_heads * config.head_dim * 4
    engine = Engine(
        copy.deepcopy(model), kv_cache_gib=35.5 * page / 2**30, page_size=4, records_experts=True
    )
    params = SamplingParams(max_tokens=25)
    requests = [
        Request(prompt_ids=[*range(n, 3 * n)], params=params, num_samples=2, seed=n)
        for n in (3, 5, 8)
    ]
    turns = [turn for turns in engine.generate(requests) for turn in turns]
    assert engine.scheduler.num_preempted > 0
    return [
        TrainingSequence(
            token_ids=turn.prompt_ids + turn.token_ids,
            loss_mask=[False] * len(turn.prompt_ids) + [True] * len(turn.token_ids),
            logprobs=[0.0] * len(turn.prompt_ids) + turn.logprobs,
            advantages=[1.0] * (len(turn.prompt_ids) + len(turn.token_ids)),
            experts=turn.experts,
        )
        for turn in turns
    ]


@pytest.fixture(scope="module")
def sequences(paired):
    return sample(paired[0])


def farthest(trainer, sequences, budget):
    """The largest difference of the trainer's logprobs from the engine's, and the step's share of
    other experts."""
    batch = pack(sequences, budget)
    found = unpack(batch, trainer.logprobs(batch), sequences)
    pairs = zip(found, (s.logprobs for s in sequences), strict=True)
    measured = trainer.evaluate(batch)
    differences = [abs(x - y) for pair in pairs for x, y in zip(*pair, strict=True)]
    assert measured["mismatch/logprob_max"] == pytest.approx(max(differences), abs=1e-6)
    return max(differences), measured.get("mismatch/experts")


@pytest.mark.parametrize("budget", [50, 1000])
def test_logprobs_are_the_engines_where_the_routers_would_choose_others(
    place, paired, sequences, budget
):
    trainer = make_trainer(place, paired[1], replays_experts=True)
    difference, share = farthest(trainer, sequences, budget)
    assert difference < 1e-5 and share > 0.5
    own, nothing = farthest(make_trainer(place, paired[1]), sequences, budget)
    assert own > 0.05 and nothing is None


def test_a_sequence_without_a_record_has_the_routers_own_experts(place, paired, sequences):
    mixed = [s if i % 2 else replace(s, experts=b"") for i, s in enumerate(sequences)]
    own, replayed = (
        make_trainer(place, paired[1], replays_experts=replays).logprobs(pack(some, 1000))[0]
        for replays, some in ((False, sequences), (True, sequences))
    )
    [found] = make_trainer(place, paired[1], replays_experts=True).logprobs(pack(mixed, 1000))
    is_odd_R = pack(mixed, 1000)[0].sequence_R % 2 == 1
    assert torch.equal(found, replayed.where(is_odd_R, own))


def test_adapters_train_with_the_record_and_off_they_are_a_reference_of_its_own(
    place, paired, tmp_path
):
    lora = LoraOptions(rank=4, targets=("qkv", "out"))
    trainer = make_trainer(place, paired[1], lora=lora, replays_experts=True)
    torch.manual_seed(0)
    for name, parameter in trainer.optimizer.parameters.items():
        if name.endswith("adapter.up"):
            torch.nn.init.normal_(parameter.to_local(), 0.0, 0.1)
    trainer.export(tmp_path / "merged")
    sequences = sample(pair_routers(load_model(tmp_path / "merged"), first=True))
    difference, share = farthest(trainer, sequences, 100)
    assert difference < 1e-5 and share > 0.5
    batch = pack(sequences, 1000)
    own = make_trainer(place, paired[1]).logprobs(batch)
    assert torch.equal(trainer.reference_logprobs(batch)[0], own[0])


def test_routers_get_the_gradient_of_the_weights_of_recorded_experts(paired, sequences):
    """By finite differences, where the routers' own choices would jump."""
    model = load_model(paired[1]).double().requires_grad_(True)
    [micro] = pack(sequences[:2], 1000)
    attend = PackedAttention(micro.cu_seqlens, micro.max_seqlen)
    torch.manual_seed(0)
    weights_TH = torch.randn(len(micro.token_ids_T), 64)

    def measured():
        given = RecordedExperts(micro, model.config, slice(None))
        hidden = model.hidden_states(micro.token_ids_T, micro.positions_T, attend, given)
        return (hidden * weights_TH).sum()

    measured().backward()
    router = model.blocks[2].mlp.router
    direction = torch.randn_like(router)
    around = []
    with torch.no_grad():
        for step in (1e-3, -2e-3):
            router += step * direction
            around.append(measured().item())
    expected = (around[0] - around[1]) / 2e-3
    assert (router.grad * direction).sum().item() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_what_backward_computes_again_has_the_recorded_experts_too(
    place, paired, sequences, checkpointing
):
    options = {"replays_experts": True, "checkpointing": checkpointing}
    grads, metrics = step_gradient(
        make_trainer(place, paired[1], PPO, **options), pack(sequences, 10**6)
    )
    expected, plain = step_gradient(
        make_trainer(place, paired[1], PPO, replays_experts=True), pack(sequences[::-1], 60)
    )
    assert metrics["mismatch/experts"] == pytest.approx(plain["mismatch/experts"], abs=0.02)
    for name, grad in grads.items():
        assert (grad - expected[name]).norm() < 1e-4 * expected[name].norm(), name


def test_the_record_is_among_the_tensors_of_the_batch_that_are_digested(place, paired, sequences):
    changed = [replace(s, experts=bytes(reversed(s.experts))) for s in sequences]
    found = []
    for some in (sequences, changed):
        trainer = make_trainer(place, paired[1], replays_experts=True)
        trainer.step(pack(some, 1000))
        found.append(trainer.digests())
    assert found[0]["batch/experts"] != found[1]["batch/experts"]
    assert found[0]["batch/token_ids"] == found[1]["batch/token_ids"]


def test_records_of_other_lengths_are_refused():
    first, second = random_sequences(2)
    first = replace(first, id="a", experts=bytes(6 * (len(first.token_ids) - 1)))
    for experts in (bytes(5 * (len(second.token_ids) - 1)), bytes(7)):
        with pytest.raises(UserError, match="experts for each token but the last, and another"):
            pack([first, replace(second, id="b", experts=experts)], 1000)


def test_idle_microbatches_and_microbatches_without_a_record_measure_nothing(
    place, paired, sequences
):
    batch = pack(sequences[:2], 1000, num_shards=3)
    metrics = make_trainer(place, paired[1], PPO, replays_experts=True).evaluate(batch)
    assert 0 < metrics["mismatch/experts"] < 1


@pytest.mark.slow
def test_ranks_that_cut_tokens_or_weights_replay_the_same(paired, sequences, tmp_path):
    folder, samples, results = paired[1], tmp_path / "samples.pt", tmp_path / "results.pt"
    torch.save(sequences, samples)
    run_ranks(4, replay_program.__file__, folder, samples, results)
    with Cluster("alone=0", "cpu") as cluster:
        [(_, trainer, _)] = replay_program.roles(cluster, ["alone"], folder)
        expected, alone = replay_program.measure(trainer, sequences, 1)
    for layout, (grads, metrics) in torch.load(results, weights_only=False).items():
        assert metrics["mismatch/logprob_max"] < 1e-5, layout
        for name in ("mismatch/experts", "loss/loss"):
            assert metrics[name] == pytest.approx(alone[name], abs=0.02), (layout, name)
        for name, grad in grads.items():
            error = (grad - expected[name]).norm() / expected[name].norm()
            assert error < 1e-5, (layout, name, error)
