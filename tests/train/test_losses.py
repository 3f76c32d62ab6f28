"""Losses against the papers' formulas in plain Python floats, gradients against differences."""

import math
import pickle
import random
import statistics
from collections import defaultdict
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

from roll_lite.checks import UserError
from roll_lite.options import from_flat
from roll_lite.train.batch import pack
from roll_lite.train.distillation import DistillLoss
from roll_lite.train.losses import LOSSES, LossOptions, PolicyLoss, ValueLoss, sft_loss
from roll_lite.train.preference import DPOLoss
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.totals import critic_metrics


def policy_loss(**options):
    return from_flat(PolicyLoss, **options)


def policy_sequences(num=12, seed=0):
    """`values` stands for the trained policy's logprobs, which a batch does not carry."""
    more = ("values", "old_logprobs", "reference_logprobs")
    sequences = random_sequences(num, seed, longest=24, more=more)
    for sequence in sequences:
        sequence.segments = [i // 4 for i in range(len(sequence.token_ids))]
    sequences[-1].loss_mask = [False] * len(sequences[-1].token_ids)
    return sequences


def clip(x, low, high):
    return min(max(x, low), high)


def ratios(loss, sequence, policy):
    """exp(policy - denominator) of each row: of the token, or the mean of its part."""
    rows = rows_with_loss(sequence)
    chosen = sequence.old_logprobs if loss.options.denominator == "old" else sequence.logprobs
    delta = {i: policy[i] - chosen[i] for i in rows}
    if loss.options.loss not in ("gspo", "segment"):
        return {i: math.exp(d) for i, d in delta.items()}, sum(delta.values())
    parts = defaultdict(list)
    for i in rows:
        parts[sequence.segments[i] if loss.options.loss == "segment" else 0].append(i)
    means = {i: sum(delta[j] for j in part) / len(part) for part in parts.values() for i in part}
    return {i: math.exp(d) for i, d in means.items()}, sum(delta.values())


PAPER_CLIPS = {"gspo": (3e-4, 4e-4)}


def policy_term(loss, sequence, i, policy, frozen):
    """One row; what the papers take no gradient of comes from `frozen`."""
    ratio_of, log_ratio = ratios(loss, sequence, policy)
    frozen_ratio_of, frozen_log_ratio = ratios(loss, sequence, frozen)
    ratio, frozen_ratio, a = ratio_of[i], frozen_ratio_of[i], sequence.advantages[i]
    given = loss.options.options
    low, high = PAPER_CLIPS.get(loss.options.loss, (0.2, 0.2))
    low, high = 1 - given.get("clip_low", low), 1 + given.get("clip_high", high)
    if loss.options.loss in ("ppo", "gspo", "segment"):
        objective = min(ratio * a, clip(ratio, low, high) * a)
        if "dual_clip" in given and a < 0:
            objective = max(objective, given["dual_clip"] * a)
        return -objective
    if loss.options.loss == "raft++":
        return -min(ratio, clip(ratio, low, high)) if a > 0 else 0.0
    if loss.options.loss == "cispo":
        return -clip(frozen_ratio, low, high) * a * policy[i]
    if loss.options.loss == "tis":
        return -min(frozen_ratio, given.get("ratio_cap", 1.0)) * a * policy[i]
    if loss.options.loss == "topr":
        weight = min(1.0, math.exp(frozen_log_ratio)) if a < 0 else 1.0
        return -weight * a * policy[i]
    if loss.options.loss == "kimi":
        tau = given.get("tau", 0.1)
        return (a - tau * log_ratio) ** 2 / (2 * tau)
    return -a * policy[i]


def off_policy_ratio(level, sequence, i):
    rows = rows_with_loss(sequence) if level == "sequence" else [i]
    return math.exp(sum(sequence.old_logprobs[j] - sequence.logprobs[j] for j in rows))


def expected_row(loss, sequence, i, policy, frozen):
    value = policy_term(loss, sequence, i, policy, frozen)
    if loss.options.correction != "none":
        value *= min(
            off_policy_ratio(loss.options.correction, sequence, i), loss.options.correction_cap
        )
    d = policy[i] - sequence.reference_logprobs[i]
    kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[loss.kl.kl_estimator or "k3"]
    value += loss.kl.kl_coef * kl - loss.options.entropy_coef * 2.0
    if loss.options.rejection != "none":
        ratio = off_policy_ratio(loss.options.rejection, sequence, i)
        if not loss.options.rejection_low <= ratio <= loss.options.rejection_high:
            value = 0.0
    return value


def expected_total(loss, sequences, policy, frozen):
    """Token mean."""
    rows = [
        expected_row(loss, s, i, policy[s.id], frozen[s.id])
        for s in sequences
        for i in rows_with_loss(s)
    ]
    return sum(rows) / len(rows)


OLD = {"denominator": "old"}
CASES = [{"loss": kind} for kind in LOSSES] + [
    {"loss": "ppo", "clip_low": 0.1, "clip_high": 0.3},
    {"loss": "ppo", "dual_clip": 1.2},
    {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.05},
    {"loss": "tis", "ratio_cap": 1.3},
    {"loss": "kimi", "tau": 0.7},
    {"kl_coef": 0.3, "entropy_coef": 0.01},
    {"loss": "reinforce", "kl_coef": 0.3, "kl_estimator": "k1"},
    {"loss": "cispo", "kl_coef": 0.3, "kl_estimator": "k2"},
    {"loss": "gspo", **OLD},
    {**OLD, "correction": "token"},
    {**OLD, "correction": "sequence", "correction_cap": 1.1},
    {**OLD, "rejection": "token", "kl_coef": 0.1},
    {**OLD, "loss": "kimi", "rejection": "sequence"},
    {**OLD, "correction": "token", "rejection": "token", "rejection_low": 0.8, "entropy_coef": 0.1},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_policy_losses_are_the_papers_formulas(options):
    loss, sequences = policy_loss(**options), policy_sequences()
    total, gradient = total_and_gradient(loss, sequences)
    frozen = {s.id: s.values for s in sequences}
    assert total == pytest.approx(expected_total(loss, sequences, frozen, frozen), rel=1e-5)
    slopes = set()
    for name, token in random.Random(0).sample(sorted(gradient), 25):

        def total_at(values, name=name):
            return expected_total(loss, sequences, frozen | {name: values}, frozen)

        expected = slope(total_at, frozen[name], token)
        assert gradient[name, token] == pytest.approx(expected, rel=1e-4, abs=1e-7), (name, token)
        slopes.add(round(expected, 6))
    assert len(slopes) > 3


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_gradients_do_not_depend_on_cut_order_or_ranks(kind, aggregation):
    loss, sequences = policy_loss(loss=kind, kl_coef=0.1), policy_sequences()
    whole, gradient = total_and_gradient(loss, sequences, aggregation=aggregation)
    for options in ({"budget": 24}, {"budget": 40, "num_shards": 3}, {"num_shards": 12}):
        total, again = total_and_gradient(loss, sequences[::-1], aggregation=aggregation, **options)
        assert total == pytest.approx(whole, rel=1e-6)
        assert again == pytest.approx(gradient, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", LOSSES)
def test_masked_numbers_change_nothing(kind):
    loss, sequences = policy_loss(loss=kind, kl_coef=0.1), policy_sequences()
    before = total_and_gradient(loss, sequences)
    for sequence in sequences:
        for i in set(range(len(sequence.token_ids))) - set(rows_with_loss(sequence)):
            for name in ("logprobs", "values", "old_logprobs", "reference_logprobs", "advantages"):
                getattr(sequence, name)[i] = 100.0
    assert total_and_gradient(loss, sequences) == before


def idle():
    """A micro-batch without rows, with every optional field."""
    sequences = policy_sequences(2)
    for sequence in sequences:
        length = len(sequence.token_ids)
        sequence.returns = [0.0] * length
        sequence.teacher_ids = torch.zeros(length, 3, dtype=torch.int64)
        sequence.teacher_logprobs = torch.full((length, 3), -2.0)
    micro = pack(sequences, 100, num_shards=3)[-1]
    assert len(micro.rows_R) == 0
    return micro


EVERY_LOSS = [
    sft_loss,
    *(policy_loss(**options) for options in CASES),
    DPOLoss(),
    DPOLoss(kind="ipo"),
    *(DistillLoss(kind=kind) for kind in ("forward", "reverse", "skewed", "js")),
]


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=lambda loss: str(loss).split(" at ")[0][:60])
def test_without_rows_every_loss_is_empty_and_has_no_gradient(loss):
    parameter = torch.ones(3, requires_grad=True)
    shape = (0, 3) if isinstance(loss, DistillLoss) else (0,)
    logprobs = (parameter[None].expand(0, 3) if len(shape) == 2 else parameter[:0]) * 1.0
    loss_R, measurements = loss(logprobs, parameter[:0] * 1.0, idle())
    loss_R.sum().backward()
    assert loss_R.shape == (0,) and parameter.grad.tolist() == [0.0] * 3
    assert all(len(value) == 0 for value in measurements.values())


@pytest.mark.parametrize("clip", [None, 0.2])
def test_without_rows_the_value_loss_is_empty(clip):
    parameter = torch.ones(3, requires_grad=True)
    loss_R, _ = ValueLoss(clip=clip)(parameter[:0] * 1.0, idle())
    loss_R.sum().backward()
    assert parameter.grad.tolist() == [0.0] * 3


def test_losses_travel():
    for loss in EVERY_LOSS:
        assert pickle.loads(pickle.dumps(loss)) == loss


def measured(loss, sequences):
    (micro,) = map(double, pack(sequences, 10**6))
    entropy_R = torch.linspace(0, 1, len(micro.rows_R))
    return loss(micro.values_R.clone().requires_grad_(), entropy_R, micro)[1], micro


def test_measurements_of_ppo():
    loss, sequences = policy_loss(kl_coef=0.1), policy_sequences()
    found, micro = measured(loss, sequences)
    rows = [(s, i) for s in sequences for i in rows_with_loss(s)]
    assert len(rows) == len(micro.rows_R)
    for r, (s, i) in enumerate(rows):  # one micro-batch keeps the order
        delta, a = s.values[i] - s.logprobs[i], s.advantages[i]
        ratio = math.exp(delta)
        expected = {
            "policy/clip_fraction": ratio * a > clip(ratio, 0.8, 1.2) * a,
            "policy/ratio": ratio,
            "policy/ratio_max": ratio,
            "loss/kl": math.exp(s.reference_logprobs[i] - s.values[i])
            - 1 - s.reference_logprobs[i] + s.values[i],
            "loss/entropy": r / (len(rows) - 1),
            "mismatch/logprob_mean": abs(delta),
            "mismatch/logprob_max": abs(delta),
            "mismatch/k3": ratio - 1 - delta,
            "mismatch/outside": not 0.5 <= ratio <= 2,
            "policy/kl": ratio - 1 - delta,
            "policy/outside": not 0.5 <= ratio <= 2,
        }  # fmt: skip
        assert {name: value[r].item() for name, value in found.items()} == pytest.approx(
            {name: float(value) for name, value in expected.items()}, rel=1e-4, abs=1e-5
        )
    for name in ("policy/clip_fraction", "mismatch/outside"):
        assert 0 < found[name].mean() < 1


def test_mismatch_is_between_the_trainer_before_the_update_and_the_engine():
    sequences = policy_sequences()
    found, micro = measured(policy_loss(**OLD, rejection="token"), sequences)
    delta = micro.old_logprobs_R - micro.logprobs_R
    torch.testing.assert_close(found["mismatch/logprob_mean"], delta.abs())
    moved = micro.values_R - micro.old_logprobs_R
    torch.testing.assert_close(found["policy/kl"], moved.exp() - 1 - moved)
    outside = (delta.exp() < 0.5) | (delta.exp() > 2)
    assert found["loss/rejected"].tolist() == outside.float().tolist()
    assert 0 < outside.sum() < len(outside)


def test_a_large_log_ratio_of_a_sequence_does_not_overflow():
    """A thousand rows of +1 each: the truncated weight is the cap, in fp32 too."""
    sequence = TrainingSequence(
        token_ids=[1] * 1001, loss_mask=[True] * 1001, logprobs=[-2.0] * 1001,
        old_logprobs=[-1.0] * 1001, advantages=[-1.0] * 1001,
    )  # fmt: skip
    (micro,) = pack([sequence], 1000)
    for options in ({"correction": "sequence"}, {"loss": "topr", "correction": "sequence"}):
        loss = policy_loss(**OLD, **options)
        logprobs = torch.full((1000,), -1.0, requires_grad=True)
        loss_R, _ = loss(logprobs, torch.zeros(1000), micro)
        loss_R.sum().backward()
        assert logprobs.grad.tolist() == pytest.approx([2.0] * 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "a2c"}, "loss='a2c' is not known; use one of ppo, gspo"),
        (
            {"loss": "reinforce", "clip_low": 0.1},
            r"clip_low=0.1 is read by loss ppo, gspo, segment, raft\+\+, cispo; loss='reinforce' "
            "does not: choose one that reads it, or leave it out",
        ),
        (
            {"loss": "gspo", "dual_clip": 3.0},
            "dual_clip=3.0 is read by loss ppo; loss='gspo' does not",
        ),
        ({"tau": 0.5}, "tau=0.5 is read by loss kimi; loss='ppo' does not"),
        ({"clip": 0.5}, "clip: not among the options"),
        ({"correction": "token"}, "only read with denominator='old'"),
        ({"kl_estimator": "k1"}, "kl_estimator='k1' is only read with kl_coef above 0"),
        ({"dual_clip": 0.5}, "dual_clip=0.5 must be above 1"),
        ({"clip_high": -0.1}, "clip_high=-0.1 must be at least 0"),
        ({"loss": "kimi", "tau": 0.0}, "tau=0.0 must be above 0"),
        ({"loss": "tis", "ratio_cap": 0.0}, "ratio_cap=0.0 must be above 0"),
        ({"entropy_coef": -1.0}, "entropy_coef=-1.0 must be at least 0"),
    ],
)
def test_wrong_and_unread_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**options)


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (PolicyLoss(), "logprobs"),
        (policy_loss(**OLD), "old_logprobs"),
        (PolicyLoss(), "advantages"),
        (policy_loss(kl_coef=0.1), "reference_logprobs"),
        (DPOLoss(), "reference_logprobs"),
    ],
)
def test_what_a_loss_lacks_is_named(loss, field):
    (micro,) = pack([replace(s, **{field: []}) for s in policy_sequences(3)[:2]], 1000)
    with pytest.raises(ValueError, match=f"needs {field}_R"):
        loss(micro.values_R, micro.values_R, micro)


@pytest.mark.parametrize("name", ["its loss", "loss/size"])
def test_a_loss_that_averages_is_refused(name, monkeypatch):
    def averaging(logprobs_R, delta_R, advantages_R, batch):
        size_R = logprobs_R.detach()
        is_loss = name == "its loss"
        loss = -logprobs_R.mean() if is_loss else -logprobs_R
        return loss, {"loss/size": size_R if is_loss else size_R.mean()}

    monkeypatch.setitem(LOSSES, "reinforce", averaging)
    message = rf"test_losses.py line \d+: averaging returned shape \(\) as {name}, not a tensor"
    with pytest.raises(UserError, match=message):
        measured(policy_loss(loss="reinforce"), policy_sequences())


# ---- the critic


@pytest.mark.parametrize("limit", [None, 0.2])
def test_the_value_loss_is_pessimistic(limit):
    sequences = random_sequences(more=("values", "returns"))
    (micro,) = map(double, pack(sequences, 10**6))
    torch.manual_seed(0)
    values = micro.values_R + 0.4 * torch.randn_like(micro.values_R)
    values.requires_grad_()
    loss_R, found = ValueLoss(clip=limit)(values, micro)
    loss_R.sum().backward()
    num_clipped = 0
    for r, (v, old, target) in enumerate(
        zip(values.tolist(), micro.values_R.tolist(), micro.returns_R.tolist(), strict=True)
    ):
        plain, expected, derivative = (v - target) ** 2, (v - target) ** 2, v - target
        if limit is not None:
            bounded = (old + clip(v - old, -limit, limit) - target) ** 2
            expected = max(plain, bounded)
            if bounded > plain:
                derivative, num_clipped = 0.0, num_clipped + 1
            assert found["loss/value_clip_fraction"][r].item() == float(bounded > plain)
        assert loss_R[r].item() == pytest.approx(expected / 2)
        assert values.grad[r].item() == pytest.approx(derivative)
        assert found["loss/value_error"][r].item() == pytest.approx(plain)
    assert limit is None or 0 < num_clipped < len(values)


def test_the_critic_has_its_own_metrics():
    returns, values = [1.0, 3.0, 2.0, 6.0], [1.5, 2.0, 2.0, 5.0]
    error = sum((v - r) ** 2 for v, r in zip(values, returns, strict=True)) / 4
    found = critic_metrics(
        {
            "loss/loss": error / 2,
            "loss/value_error": error,
            "loss/return": statistics.fmean(returns),
            "loss/return_square": statistics.fmean(r * r for r in returns),
            "time/train": 2.0,
            "train/tokens_per_second": 9.0,
        }
    )
    assert found["critic/loss"] == error / 2 and found["critic/tokens_per_second"] == 9.0
    assert found["time/critic"] == 2.0
    explained = 1 - error / statistics.pvariance(returns)
    assert found["critic/explained_variance"] == pytest.approx(explained)
    assert not any(name.startswith(("loss/", "train/")) for name in found)
    flat = dict.fromkeys(("loss/value_error", "loss/return", "loss/return_square"), 1.0)
    assert "critic/explained_variance" not in critic_metrics(flat | {"time/train": 1.0})


def test_losses_have_the_defaults_of_their_papers():
    gspo = LossOptions(loss="gspo")
    assert gspo.options == {} and gspo.function.keywords == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert LossOptions(loss="ppo").function.keywords == {
        "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None,
    }  # fmt: skip
    assert LossOptions(loss="topr").chosen_aggregation == "seq_mean_token_sum"
    assert LossOptions(loss="kimi").chosen_aggregation == "seq_mean_token_mean"
    assert LossOptions(loss="ppo").chosen_aggregation == "token_mean"
