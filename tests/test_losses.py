"""Losses against the papers' formulas in plain Python floats, gradients against differences."""

import math
import pickle
import random
from collections import defaultdict
from dataclasses import fields, replace

import pytest
import torch
from training_data import random_sequences

from roll_lite.train.distillation import DistillLoss, complete
from roll_lite.train.losses import ValueLoss, sft_loss
from roll_lite.train.packing import MicroBatch, TrainingSequence, pack
from roll_lite.train.policy_loss import KINDS, PolicyLoss
from roll_lite.train.preference import DPOLoss

STEP = 1e-5


def policy_sequences(num=12, seed=0):
    """`values` stands for the trained policy's logprobs, which a batch does not carry."""
    more = ("values", "old_logprobs", "reference_logprobs")
    sequences = random_sequences(num, seed, longest=24, more=more)
    for sequence in sequences:
        sequence.segments = [i // 4 for i in range(len(sequence.token_ids))]
    sequences[-1].loss_mask = [False] * len(sequences[-1].token_ids)
    return sequences


def double(micro):
    values = {f.name: getattr(micro, f.name) for f in fields(MicroBatch)}
    return MicroBatch(
        **{
            name: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for name, v in values.items()
        }
    )


def total_and_gradient(loss, sequences, budget=10**6, **options):
    """The batch's loss, and its derivative by the policy's logprob of (sequence, token)."""
    total, gradient = 0.0, {}
    for micro in map(double, pack(sequences, budget, **options)):
        logprobs_R = micro.values_R.clone().requires_grad_()
        loss_R, measurements = loss(logprobs_R, torch.full_like(logprobs_R, 2.0), micro)
        weighted = (loss_R * micro.weights_R).sum()
        weighted.backward()
        assert all(value.shape == loss_R.shape for value in measurements.values())
        assert not any(value.requires_grad for value in measurements.values())
        total += weighted.item()
        names = [sequences[i].id for i in micro.indices_S.tolist()]
        for r, slope in enumerate(logprobs_R.grad.tolist()):
            token = micro.positions_T[micro.rows_R[r]].item() + 1
            gradient[names[micro.sequence_R[r]], token] = slope
    return total, gradient


def rows_with_loss(sequence):
    return [i for i in range(1, len(sequence.token_ids)) if sequence.loss_mask[i]]


def clip(x, low, high):
    return min(max(x, low), high)


def ratios(loss, sequence, policy):
    """exp(policy - denominator) of each row: of the token, or the mean of its part."""
    rows = rows_with_loss(sequence)
    chosen = sequence.old_logprobs if loss.denominator == "old" else sequence.logprobs
    delta = {i: policy[i] - chosen[i] for i in rows}
    if loss.kind not in ("gspo", "segment"):
        return {i: math.exp(d) for i, d in delta.items()}, sum(delta.values())
    parts = defaultdict(list)
    for i in rows:
        parts[sequence.segments[i] if loss.kind == "segment" else 0].append(i)
    means = {i: sum(delta[j] for j in part) / len(part) for part in parts.values() for i in part}
    return {i: math.exp(d) for i, d in means.items()}, sum(delta.values())


def policy_term(loss, sequence, i, policy, frozen):
    """One row; what the papers take no gradient of comes from `frozen`."""
    ratio_of, log_ratio = ratios(loss, sequence, policy)
    frozen_ratio_of, frozen_log_ratio = ratios(loss, sequence, frozen)
    ratio, frozen_ratio, a = ratio_of[i], frozen_ratio_of[i], sequence.advantages[i]
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    if loss.kind in ("ppo", "gspo", "segment"):
        objective = min(ratio * a, clip(ratio, low, high) * a)
        if loss.dual_clip is not None and a < 0:
            objective = max(objective, loss.dual_clip * a)
        return -objective
    if loss.kind == "raft++":
        return -min(ratio, clip(ratio, low, high)) if a > 0 else 0.0
    if loss.kind == "cispo":
        return -clip(frozen_ratio, low, high) * a * policy[i]
    if loss.kind == "tis":
        return -min(frozen_ratio, loss.ratio_cap) * a * policy[i]
    if loss.kind == "topr":
        weight = min(1.0, math.exp(frozen_log_ratio)) if a < 0 else 1.0
        return -weight * a * policy[i]
    if loss.kind == "kimi":
        return (a - loss.tau * log_ratio) ** 2 / (2 * loss.tau)
    return -a * policy[i]


def off_policy_ratio(level, sequence, i):
    rows = rows_with_loss(sequence) if level == "sequence" else [i]
    return math.exp(sum(sequence.old_logprobs[j] - sequence.logprobs[j] for j in rows))


def expected_row(loss, sequence, i, policy, frozen):
    value = policy_term(loss, sequence, i, policy, frozen)
    if loss.correction != "none":
        value *= min(off_policy_ratio(loss.correction, sequence, i), loss.correction_cap)
    d = policy[i] - sequence.reference_logprobs[i]
    kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[loss.kl_estimator]
    value += loss.kl_coef * kl - loss.entropy_coef * 2.0
    if loss.rejection != "none":
        ratio = off_policy_ratio(loss.rejection, sequence, i)
        if not loss.rejection_low <= ratio <= loss.rejection_high:
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
CASES = [{"kind": kind} for kind in KINDS] + [
    {"kind": "ppo", "clip_low": 0.1, "clip_high": 0.3},
    {"kind": "ppo", "dual_clip": 1.2},
    {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.05},
    {"kind": "tis", "ratio_cap": 1.3},
    {"kind": "kimi", "tau": 0.7},
    {"kl_coef": 0.3, "entropy_coef": 0.01},
    {"kind": "reinforce", "kl_coef": 0.3, "kl_estimator": "k1"},
    {"kind": "cispo", "kl_coef": 0.3, "kl_estimator": "k2"},
    {"kind": "gspo", **OLD},
    {**OLD, "correction": "token"},
    {**OLD, "correction": "sequence", "correction_cap": 1.1},
    {**OLD, "rejection": "token", "kl_coef": 0.1},
    {**OLD, "kind": "kimi", "rejection": "sequence"},
    {**OLD, "correction": "token", "rejection": "token", "rejection_low": 0.8, "entropy_coef": 0.1},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_policy_losses_are_the_papers_formulas(options):
    loss, sequences = PolicyLoss(**options), policy_sequences()
    total, gradient = total_and_gradient(loss, sequences)
    frozen = {s.id: s.values for s in sequences}
    assert total == pytest.approx(expected_total(loss, sequences, frozen, frozen), rel=1e-5)
    slopes = set()
    for name, token in random.Random(0).sample(sorted(gradient), 25):
        around = []
        for step in (STEP, -STEP):
            moved = {key: list(values) for key, values in frozen.items()}
            moved[name][token] += step
            around.append(expected_total(loss, sequences, moved, frozen))
        slope = (around[0] - around[1]) / (2 * STEP)
        assert gradient[name, token] == pytest.approx(slope, rel=1e-4, abs=1e-7), (name, token)
        slopes.add(round(slope, 6))
    assert len(slopes) > 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_gradients_do_not_depend_on_cut_order_or_ranks(kind, aggregation):
    loss, sequences = PolicyLoss(kind=kind, kl_coef=0.1), policy_sequences()
    whole, gradient = total_and_gradient(loss, sequences, aggregation=aggregation)
    for options in ({"budget": 24}, {"budget": 40, "num_shards": 3}, {"num_shards": 12}):
        total, again = total_and_gradient(loss, sequences[::-1], aggregation=aggregation, **options)
        assert total == pytest.approx(whole, rel=1e-6)
        assert again == pytest.approx(gradient, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_numbers_change_nothing(kind):
    loss, sequences = PolicyLoss(kind=kind, kl_coef=0.1), policy_sequences()
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
    *(PolicyLoss(**options) for options in CASES),
    DPOLoss(),
    DPOLoss(kind="ipo"),
    *(DistillLoss(kind=kind) for kind in ("forward", "reverse", "skewed", "js")),
]


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=lambda loss: str(loss)[:60])
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
    loss, sequences = PolicyLoss(kl_coef=0.1), policy_sequences()
    found, micro = measured(loss, sequences)
    rows = [(s, i) for s in sequences for i in rows_with_loss(s)]
    assert len(rows) == len(micro.rows_R)
    for r, (s, i) in enumerate(rows):  # one micro-batch keeps the order
        delta, a = s.values[i] - s.logprobs[i], s.advantages[i]
        ratio = math.exp(delta)
        expected = {
            "loss/clip_fraction": ratio * a > clip(ratio, 0.8, 1.2) * a,
            "loss/ratio": ratio,
            "loss/ratio_max": ratio,
            "loss/kl": math.exp(s.reference_logprobs[i] - s.values[i])
            - 1 - s.reference_logprobs[i] + s.values[i],
            "loss/entropy": r / (len(rows) - 1),
            "mismatch/logprob_mean": abs(delta),
            "mismatch/logprob_max": abs(delta),
            "mismatch/k3": ratio - 1 - delta,
            "mismatch/outside": not 0.5 <= ratio <= 2,
        }  # fmt: skip
        assert {name: value[r].item() for name, value in found.items()} == pytest.approx(
            {name: float(value) for name, value in expected.items()}, rel=1e-4, abs=1e-5
        )
    for name in ("loss/clip_fraction", "mismatch/outside"):
        assert 0 < found[name].mean() < 1


def test_mismatch_is_between_the_trainer_before_the_update_and_the_engine():
    sequences = policy_sequences()
    found, micro = measured(PolicyLoss(**OLD, rejection="token"), sequences)
    delta = micro.old_logprobs_R - micro.logprobs_R
    torch.testing.assert_close(found["mismatch/logprob_mean"], delta.abs())
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
    for options in ({"correction": "sequence"}, {"kind": "topr", "correction": "sequence"}):
        loss = PolicyLoss(**OLD, **options)
        logprobs = torch.full((1000,), -1.0, requires_grad=True)
        loss_R, _ = loss(logprobs, torch.zeros(1000), micro)
        loss_R.sum().backward()
        assert logprobs.grad.tolist() == pytest.approx([2.0] * 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "a2c"}, "kind='a2c' is not known; use one of ppo, gspo"),
        ({"kind": "reinforce", "clip_low": 0.1}, "clip_low=0.1 is not read by kind='reinforce'"),
        (
            {"kind": "gspo", "dual_clip": 3.0},
            "dual_clip=3.0 is not read by kind='gspo', only by ppo",
        ),
        ({"tau": 0.5}, "tau=0.5 is not read by kind='ppo', only by kimi"),
        ({"correction": "token"}, "set denominator='old'"),
        ({**OLD, "correction_cap": 3.0}, "correction_cap=3.0 is not read"),
        ({**OLD, "rejection_low": 0.1}, "rejection_low=0.1 .* not read"),
        ({"kl_estimator": "k1"}, "kl_estimator='k1' is not read with kl_coef=0"),
        ({"dual_clip": 0.5}, "dual_clip=0.5 must be above 1"),
        ({"entropy_coef": -1.0}, "entropy_coef=-1.0 must be at least 0"),
    ],
)
def test_wrong_and_unread_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**options)


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (PolicyLoss(), "logprobs"),
        (PolicyLoss(**OLD), "old_logprobs"),
        (PolicyLoss(), "advantages"),
        (PolicyLoss(kl_coef=0.1), "reference_logprobs"),
        (DPOLoss(), "reference_logprobs"),
    ],
)
def test_what_a_loss_lacks_is_named(loss, field):
    (micro,) = pack([replace(s, **{field: []}) for s in policy_sequences(3)[:2]], 1000)
    with pytest.raises(ValueError, match=f"needs {field}_R"):
        loss(micro.values_R, micro.values_R, micro)


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
        plain, expected, slope = (v - target) ** 2, (v - target) ** 2, v - target
        if limit is not None:
            bounded = (old + clip(v - old, -limit, limit) - target) ** 2
            expected = max(plain, bounded)
            if bounded > plain:
                slope, num_clipped = 0.0, num_clipped + 1
            assert found["loss/value_clip_fraction"][r].item() == float(bounded > plain)
        assert loss_R[r].item() == pytest.approx(expected / 2)
        assert values.grad[r].item() == pytest.approx(slope)
        assert found["loss/value_error"][r].item() == pytest.approx(plain)
    assert limit is None or 0 < num_clipped < len(values)


# ---- preferences


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
            around = []
            for step in (STEP, -STEP):
                moved = {key: list(values) for key, values in policy.items()}
                moved[name][token] += step
                around.append(expected_preference(loss, sequences, moved))
            slope = (around[0] - around[1]) / (2 * STEP)
            assert gradient[name, token] == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_measurements_of_dpo_are_means_over_pairs():
    sequences = pair_sequences()
    rewards = [
        0.1 * sum(s.values[i] - s.reference_logprobs[i] for i in rows_with_loss(s))
        for s in sequences
    ]
    margins = [c - r for c, r in zip(rewards[::2], rewards[1::2], strict=True)]
    (micro,) = map(double, pack(sequences, 10**6, aggregation="seq_mean_token_mean", together=2))
    _, found = DPOLoss()(micro.values_R, torch.zeros_like(micro.values_R), micro)
    means = {name: (value * micro.weights_R).sum().item() for name, value in found.items()}
    assert means["reward/margin"] == pytest.approx(sum(margins) / 4, rel=1e-5)
    assert means["reward/accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 4, rel=1e-5)
    assert means["reward/chosen"] == pytest.approx(sum(rewards[::2]) / 4, rel=1e-5)
    assert means["reward/rejected"] == pytest.approx(sum(rewards[1::2]) / 4, rel=1e-5)
    assert 0 < means["reward/accuracy"] < 1


def test_what_is_no_pair_is_refused():
    sequences = pair_sequences()
    sequences[2].loss_mask = [False] * len(sequences[2].token_ids)
    for wrong in (sequences[:4], sequences[4:7]):
        (micro,) = pack(wrong, 1000)
        with pytest.raises(ValueError, match="not made of pairs"):
            DPOLoss()(micro.values_R, micro.values_R, micro)
    with pytest.raises(ValueError, match=r"label_smoothing=0.1 is not read by kind='ipo'"):
        DPOLoss(kind="ipo", label_smoothing=0.1)


# ---- distillation


def distill_case(num_rows=12, k=4, vocabulary=20):
    """Logits of student and teacher, and a micro-batch with the teacher's k likeliest tokens."""
    torch.manual_seed(0)
    student, teacher = 2 * torch.randn(2, num_rows, vocabulary, dtype=torch.float64)
    values, ids = teacher.log_softmax(-1).topk(k, -1)
    unknown = torch.zeros(1, k)
    sequence = TrainingSequence(
        token_ids=[1] * (num_rows + 1),
        loss_mask=[True] * (num_rows + 1),
        teacher_ids=torch.cat([unknown.long(), ids]),
        teacher_logprobs=torch.cat([unknown, values]),
    )
    (micro,) = pack([sequence], 100)
    return student, double(micro)


def expected_divergence(loss, student, teacher):
    """`student` and `teacher`: k logprobs each."""
    p = [math.exp(x) for x in teacher]
    q = [math.exp(x) for x in student]
    p.append(1 - sum(p))
    q.append(1 - sum(q))

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    def mixed(share):
        return [share * x + (1 - share) * y for x, y in zip(p, q, strict=True)]

    return {
        "forward": lambda: kl(p, q),
        "reverse": lambda: kl(q, p),
        "skewed": lambda: kl(p, mixed(loss.skew)),
        "js": lambda: (kl(p, mixed(0.5)) + kl(q, mixed(0.5))) / 2,
    }[loss.kind]()


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed", "js"])
def test_distillation_compares_completed_distributions(kind):
    loss = DistillLoss(kind=kind, skew=0.3) if kind == "skewed" else DistillLoss(kind=kind)
    student, micro = distill_case()
    picked = student.log_softmax(-1).gather(1, micro.teacher_ids_RK).requires_grad_()
    loss_R, found = loss(picked, torch.zeros(len(picked)), micro)
    loss_R.sum().backward()
    for r, (q, p) in enumerate(
        zip(picked.tolist(), micro.teacher_logprobs_RK.tolist(), strict=True)
    ):
        assert loss_R[r].item() == pytest.approx(expected_divergence(loss, q, p), rel=1e-6)
        for column in range(len(q)):
            around = []
            for step in (STEP, -STEP):
                moved = list(q)
                moved[column] += step
                around.append(expected_divergence(loss, moved, p))
            slope = (around[0] - around[1]) / (2 * STEP)
            assert picked.grad[r, column].item() == pytest.approx(slope, rel=1e-4, abs=1e-8)
        tail = 1 - sum(map(math.exp, p))
        assert found["loss/teacher_tail"][r].item() == pytest.approx(tail)


def test_with_all_tokens_distillation_is_the_whole_divergence():
    """The teacher lists the whole vocabulary: nothing is left for the tail, and nothing breaks."""
    student, micro = distill_case(k=20)
    picked = student.log_softmax(-1).gather(1, micro.teacher_ids_RK).float().requires_grad_()
    for kind in ("forward", "reverse", "skewed", "js"):
        loss_R, _ = DistillLoss(kind=kind)(picked, torch.zeros(len(picked)), micro)
        (gradient,) = torch.autograd.grad(loss_R.sum(), picked)
        assert gradient.isfinite().all()
        if kind == "forward":
            p = micro.teacher_logprobs_RK
            exact = (p.exp() * (p - picked.double())).sum(-1)
            assert loss_R.tolist() == pytest.approx(exact.tolist(), abs=1e-4)


@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.5, 0.9, 1 - 1e-4])
def test_the_tail_keeps_its_digits(mass):
    logprobs = torch.tensor([[math.log(mass * 0.75), math.log(mass * 0.25)]], dtype=torch.float64)
    completed = complete(logprobs)
    assert completed.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    assert completed[0, -1].item() == pytest.approx(math.log1p(-mass), rel=1e-9)
    assert complete(logprobs.float())[0, -1].item() == pytest.approx(math.log1p(-mass), rel=1e-3)


def test_distillation_refuses_what_it_does_not_read():
    with pytest.raises(ValueError, match=r"skew=0\.3 is not read by kind='js', only by skewed"):
        DistillLoss(kind="js", skew=0.3)
    with pytest.raises(ValueError, match="kind='kl' is not known; use one of forward, reverse"):
        DistillLoss(kind="kl")
