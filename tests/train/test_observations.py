"""Rows for the tokens that an environment wrote: their weights, and what they leave as it was."""

import copy
from dataclasses import replace

import pytest
import torch
from support.models import make_reference
from support.trainers import make_trainer, same, step_gradient
from support.training_data import double, make_groups, make_sample, random_sequences

from roll_lite.options import from_flat
from roll_lite.train.advantages import AdvantageOptions
from roll_lite.train.batch import pack, unpack
from roll_lite.train.losses import LOSSES, PolicyLoss, ValueLoss
from roll_lite.train.sample_rows import Rows
from roll_lite.train.sequences import with_field
from roll_lite.types import Group, Turn

KINDS = ("sampled", "observed")
AGGREGATIONS = {
    "token_mean": None,
    "seq_mean_token_mean": None,
    "seq_mean_token_sum": None,
    "seq_mean_token_sum_const": 48.0,
}


def episodes(num=10, seed=0):
    """Prompts, then runs of three tokens that the model and the environment wrote in turn.

    Two sequences in a row are a sample. The last sequence has no turn of the environment.
    """
    more = ("old_logprobs", "reference_logprobs", "values", "returns")
    sequences = random_sequences(num, seed, longest=24, more=more)
    for number, sequence in enumerate(sequences):
        length, prompt = len(sequence.token_ids), sequence.loss_mask.index(True)
        turn = [max(0, (i - prompt) // 3) for i in range(length)]
        sequence.segments = turn
        sequence.sample = number // 2
        sequence.observed = [i >= prompt and turn[i] % 2 == 1 for i in range(length)]
        sequence.loss_mask = [i >= prompt and turn[i] % 2 == 0 for i in range(length)]
    sequences[-1].observed = [False] * len(sequences[-1].token_ids)
    sequences[0].observed[sequences[0].loss_mask.index(True)] = True  # it stays a sampled token
    return sequences


def without(sequences):
    return [replace(sequence, observed=[]) for sequence in sequences]


def kind_of(sequence, i):
    """None, sampled or observed."""
    if i == 0 or not (sequence.loss_mask[i] or sequence.observed[i]):
        return None
    return "sampled" if sequence.loss_mask[i] else "observed"


def places(sequences, kind):
    return [
        (s, i)
        for s, sequence in enumerate(sequences)
        for i in range(len(sequence.token_ids))
        if kind_of(sequence, i) == kind
    ]


def packed_places(micro):
    """(sequence, token) of each row."""
    tokens = micro.positions_T[micro.rows_R] + 1
    members = micro.indices_S[micro.sequence_R]
    return list(zip(members.tolist(), tokens.tolist(), strict=True))


def test_what_was_read_after_the_first_sampled_token_is_observed():
    sample = make_sample(1.0, num_turns=2)
    (sequence,) = sample.sequences
    assert [int(x) for x in sequence.observed] == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0]
    other = [1, 2, 3]  # history was left out: a first prompt of its own, however long
    turn = Turn(
        prompt_ids=other, token_ids=[4], logprobs=[-1.0], finish_reason="stop", versions=[(0, 0)]
    )
    sample.add_turn(turn)
    assert sample.sequences[1].observed == [False] * 4
    group = Group(prompt=sample.prompt, samples=[sample, make_sample(0.0, index=1)])
    rows = Rows([group], AdvantageOptions())
    first, second, third = rows.sequences(torch.zeros(2), with_observations=True)
    assert first.observed == sequence.observed and second.observed == [False] * 4
    assert third.observed == [False] * 5
    assert all(s.observed == [] for s in rows.sequences(torch.zeros(2)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("budget", "shards"), [(10**6, 1), (60, 1), (60, 3), (10**6, 12)])
def test_both_kinds_of_rows_have_the_weights_of_the_whole_batch(aggregation, budget, shards):
    sequences, constant = episodes(), AGGREGATIONS[aggregation]
    options = {"num_shards": shards, "aggregation": aggregation, "constant": constant}
    found = {kind: {} for kind in KINDS}
    for micro in pack(sequences, budget, **options):
        for r, place in enumerate(packed_places(micro)):
            found[KINDS[micro.observed_R[r]]][place] = micro.weights_R[r].item()
    for kind in KINDS:
        wanted = places(sequences, kind)
        counts = {}
        for s, _ in wanted:
            sample = sequences[s].sample
            counts[sample] = counts.get(sample, 0) + 1
        for s, i in wanted:
            of_sample = {
                "token_mean": len(counts) / len(wanted),
                "seq_mean_token_mean": 1 / counts[sequences[s].sample],
                "seq_mean_token_sum": 1.0,
                "seq_mean_token_sum_const": 1 / 48.0,
            }[aggregation]
            assert found[kind].pop((s, i)) == pytest.approx(of_sample / len(counts), rel=1e-6)
        assert not found[kind]


def test_sampled_rows_are_what_they_are_without_observations():
    sequences = episodes()
    plain = pack(without(sequences), 60, num_shards=2)
    assert all(micro.observed_R is None for micro in plain)
    for micro, other in zip(pack(sequences, 60, num_shards=2), plain, strict=True):
        sampled_R = ~micro.observed_R
        for name in ("weights", "targets", "rows", "logprobs", "advantages", "old_logprobs"):
            assert getattr(micro, f"{name}_R")[sampled_R].equal(getattr(other, f"{name}_R")), name
        for name in ("logprobs", "advantages", "old_logprobs", "reference_logprobs", "values"):
            assert not getattr(micro, f"{name}_R")[micro.observed_R].any(), name


def test_a_batch_without_a_word_of_the_environment_is_fine():
    sequences = episodes()
    silent = [replace(s, observed=[False] * len(s.token_ids)) for s in sequences]
    for micro, other in zip(pack(silent, 60), pack(without(sequences), 60), strict=True):
        assert micro.weights_R.equal(other.weights_R) and not micro.observed_R.any()
    sequences[3].observed = []
    with pytest.raises(ValueError, match="'s3' has no observed, unlike sequence 's0'"):
        pack(sequences, 60)


def test_an_idle_microbatch_has_no_row():
    sequences = episodes(2)
    sequences[0].loss_mask[1], sequences[0].observed[1] = False, True
    idle = [micro for micro in pack(sequences, 100, num_shards=4) if not micro.num_sequences]
    assert len(idle) == 2 and all(len(micro.observed_R) == len(micro.rows_R) == 0 for micro in idle)


def logprobs_of(micro):
    """Any numbers, for observed tokens too."""
    return -(micro.targets_R.double() % 7 + 1) / 3 - micro.positions_T[micro.rows_R] / 50


def evaluated(function, sequences, budget, **options):
    """Total, measurements and slopes by (sequence, token)."""
    total, measured, slopes = 0.0, {}, {}
    for micro in map(double, pack(sequences, budget, **options)):
        logprobs_R = logprobs_of(micro).requires_grad_()
        loss_R, measurements = function(logprobs_R, micro)
        (loss_R * micro.weights_R).sum().backward()
        total += (loss_R * micro.weights_R).sum().item()
        for r, place in enumerate(packed_places(micro)):
            slopes[place] = logprobs_R.grad[r].item()
            measured[place] = {name: value[r].item() for name, value in measurements.items()}
    return total, measured, slopes


OLD = {"denominator": "old"}
CASES = [{"loss": kind} for kind in LOSSES] + [
    {"kl_coef": 0.3, "entropy_coef": 0.01},
    {"kl_coef": 0.3, "kl_estimator": "k2"},
    {**OLD, "correction": "token", "rejection": "token", "rejection_low": 0.8},
    {**OLD, "correction": "sequence", "rejection": "sequence", "rejection_low": 0.2},
    {**OLD, "rejection": "token", "rejection_low": 1.2},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("budget", [10**6, 60])
def test_policy_losses_of_sampled_rows_stay_what_they_are(options, budget):
    """With 0.5 on each observed row, the rest of the loss is as if there were none."""
    built_in = from_flat(PolicyLoss, **options)

    def half(logprobs_R, delta_R, advantages_R, batch):
        loss_R, measurements = built_in.options.function(logprobs_R, delta_R, advantages_R, batch)
        measurements["loss/own_observed"] = logprobs_R
        observed_R = batch.observed_R
        return loss_R.masked_fill(observed_R, 0.0) - 0.5 * logprobs_R * observed_R, measurements

    def entropy(logprobs_R):
        return 3.0 + logprobs_R.detach()

    sequences = episodes()
    plain, plain_measured, plain_slopes = evaluated(
        lambda x, micro: built_in(x, entropy(x), micro), without(sequences), 10**6, by_sample=True
    )
    mixed = replace(built_in, function=half)
    total, measured, slopes = evaluated(
        lambda x, micro: mixed(x, entropy(x), micro), sequences, budget, by_sample=True
    )
    observed = places(sequences, "observed")
    values = [logprob_at(sequences, place) for place in observed]
    assert total == pytest.approx(plain - 0.5 * sum(values) / len(values), rel=1e-6)
    for place, slope in plain_slopes.items():
        assert slopes.pop(place) == pytest.approx(slope, rel=1e-6), place
        own = measured.pop(place)
        assert own.pop("loss/own_observed") == 0.0
        assert own == pytest.approx(plain_measured[place], rel=1e-6)
    assert slopes == dict.fromkeys(observed, pytest.approx(-0.5 / len(observed), rel=1e-6))
    for place, value in zip(observed, values, strict=True):
        assert measured[place].pop("loss/own_observed") == pytest.approx(value)
        assert not any(measured[place].values())


def logprob_at(sequences, place):
    s, i = place
    return -(sequences[s].token_ids[i] % 7 + 1) / 3 - (i - 1) / 50


def test_a_critic_does_not_learn_from_observations():
    sequences, loss = episodes(), ValueLoss(clip=0.2)
    plain, plain_measured, plain_slopes = evaluated(loss, without(sequences), 10**6)
    total, measured, slopes = evaluated(loss, sequences, 60)
    assert total == pytest.approx(plain, rel=1e-6)
    for place in places(sequences, "observed"):
        assert slopes.pop(place) == 0.0 and not any(measured.pop(place).values())
    assert slopes == {place: pytest.approx(slope) for place, slope in plain_slopes.items()}
    assert measured == plain_measured


def predicts(logprobs_R, delta_R, advantages_R, batch):
    """Takes every row, of either kind, differently."""
    loss_R, measurements = LOSSES["gspo"](logprobs_R, delta_R, advantages_R, batch)
    measurements["loss/own_observed"] = -logprobs_R
    return loss_R.where(~batch.observed_R, -0.3 * logprobs_R), measurements


@pytest.fixture
def qwen_folder(tmp_path):
    make_reference("qwen3").save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


def measured_by(metrics):
    kept = ("loss/", "mismatch/")
    changes = ("loss/lr", "loss/loss", "loss/grad_norm")
    return {k: v for k, v in metrics.items() if k.startswith(kept) and k not in changes}


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_sum"])
def test_metrics_of_a_step_are_of_their_own_rows(place, qwen_folder, aggregation):
    """And what is noted of tokens comes back to the sampled ones."""
    sequences = episodes()
    options = {"loss": "ppo", "kl_coef": 0.1, "entropy_coef": 0.01}
    plain = from_flat(PolicyLoss, **options)
    trainer = make_trainer(place, qwen_folder, plain)
    batch = pack(without(sequences), 60, aggregation=aggregation)
    expected = measured_by(trainer.step(batch))
    noted = by_token(trainer, batch, sequences)

    def mixed(*arguments):
        loss_R, measurements = LOSSES["ppo"](*arguments)
        return loss_R, measurements | {"loss/own_observed": -arguments[0]}

    trainer = make_trainer(place, qwen_folder, replace(plain, function=mixed))
    logprobs = trainer.logprobs(everywhere := pack(observed_alone(sequences), 10**6))
    batch = pack(sequences, 60, aggregation=aggregation)
    found = measured_by(trainer.step(batch))
    all_logprobs = unpack(everywhere, logprobs, sequences)
    said = [-all_logprobs[s][i] for s, i in places(sequences, "observed")]
    cross_entropy = found.pop("loss/own_observed")
    assert cross_entropy == pytest.approx(sum(said) / len(said), rel=1e-4)
    assert found == pytest.approx(expected, rel=1e-4)
    again = by_token(trainer, batch, sequences)
    assert again.keys() == noted.keys() == {"entropies", "mismatches"}
    for field, values in noted.items():
        assert any(map(any, values))
        assert all(
            a == pytest.approx(b, rel=1e-4) for a, b in zip(again[field], values, strict=True)
        )


def by_token(trainer, batch, sequences):
    """What the last step noted, by field, sequence and token."""
    micros = trainer.noted()
    return {f: unpack(batch, [micro[f] for micro in micros], sequences) for f in micros[0]}


def test_a_mismatch_is_the_distance_from_the_behaviour_logprob(place, qwen_folder):
    """Also where ratios are of the trainer's own logprobs before the update."""
    sequences = without(episodes())
    for options in ({}, {"denominator": "old"}):
        trainer = make_trainer(place, qwen_folder, from_flat(PolicyLoss, **options))
        batch = pack(sequences, 60)
        own = unpack(batch, trainer.logprobs(batch), sequences)
        if options:
            sequences = with_field(sequences, "old_logprobs", own)
        trainer.step(batch := pack(sequences, 60))
        found = by_token(trainer, batch, sequences)["mismatches"]
        for sequence, trainers, mismatches in zip(sequences, own, found, strict=True):
            expected = [
                abs(a - b) * is_learnt
                for a, b, is_learnt in zip(
                    trainers, sequence.logprobs, sequence.loss_mask, strict=True
                )
            ]
            assert mismatches[1:] == pytest.approx(expected[1:], abs=1e-5)


def observed_alone(sequences):
    """Sequences that have a row for each observed token, and no other."""
    return [
        replace(
            s, observed=[], loss_mask=[kind_of(s, i) == "observed" for i in range(len(s.token_ids))]
        )
        for s in sequences
    ]


@pytest.mark.parametrize(("budget", "shards"), [(60, 1), (60, 3), (10**6, 12)])
def test_the_gradient_does_not_depend_on_the_cut(place, qwen_folder, budget, shards):
    """With micro-batches that are idle, too."""
    sequences, loss = episodes(), PolicyLoss(function=predicts)
    whole, metrics = step_gradient(
        make_trainer(place, qwen_folder, loss), pack(sequences, 10**6, by_sample=True)
    )
    batch = pack(copy.deepcopy(sequences)[::-1], budget, num_shards=shards, by_sample=True)
    cut, cut_metrics = step_gradient(make_trainer(place, qwen_folder, loss), batch)
    same(cut, whole)
    for name in ("loss/loss", "loss/own_observed", "loss/entropy", "policy/ratio"):
        assert cut_metrics[name] == pytest.approx(metrics[name], rel=1e-4), name


def test_without_observed_tokens_their_measurement_is_0(place, qwen_folder):
    groups = make_groups([[0.0, 1.0]])
    rows = Rows(groups, AdvantageOptions())
    sequences = rows.sequences(rows.rewards_S, with_observations=True)
    trainer = make_trainer(place, qwen_folder, PolicyLoss(function=predicts))
    assert trainer.step(pack(sequences, 60, by_sample=True))["loss/own_observed"] == 0.0
