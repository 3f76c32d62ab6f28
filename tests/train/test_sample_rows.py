"""From groups to sequences, against plain Python loops, and the options around advantages."""

import json
import math
import random
import re
import statistics

import pytest
import torch
from support.training_data import flat, make_groups, make_sample, standardised

from roll_lite.train.advantages import ADVANTAGES, AdvantageOptions, PerSample
from roll_lite.train.kl import KLController, KLOptions, estimate_kl
from roll_lite.train.sample_rows import AdvantageState, ModelScores, Rows, with_advantages
from roll_lite.train.shaping import RunningMoments, normalise
from roll_lite.types import Group, TurnResult

REWARDS = [[0.0, 1.0, 0.0, 0.5, 1.0], [2.0, -1.0], [0.3, 0.3, 0.3], [7.0]]


def learned(sequence, values):
    """Those of a sequence's numbers that stand on tokens with loss."""
    return [v for v, m in zip(values, sequence.loss_mask, strict=True) if m]


def test_samples_keep_their_tokens_and_get_their_groups_advantage():
    samples = [make_sample(r, num_turns=2, index=i) for i, r in enumerate([0.0, 1.0])]
    low, high = with_advantages([Group(prompt=samples[0].prompt, samples=samples)])
    assert learned(low, low.advantages) == pytest.approx([-(0.5**0.5)] * 6, rel=1e-5)
    assert high.advantages == [-a for a in low.advantages]
    assert low.token_ids == [0, 1, 7, 8, 9, 5, 6, 7, 8, 9]
    assert [int(m) for m in low.loss_mask] == [0, 0, 1, 1, 1] * 2
    assert low.logprobs == pytest.approx([0, 0, -0.1, -0.2, -0.3] * 2)
    assert low.segments == [0] * 5 + [1] * 5
    assert low.id == "sample 0 of prompt p"
    assert low.values == low.returns == low.reference_logprobs == []


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.zeros(3), r"advantage='rloo' returned a Tensor of shape \(3,\) instead of \(2,\)"),
        ([0.0, 1.0], r"returned a list of shape \(\) instead of \(2,\), a number for each sample"),
        (
            torch.tensor([0.0, math.nan]),
            "advantage='rloo' gave nan to sample 1 of prompt p.*3 of 6",
        ),
    ],
)
def test_wrong_advantages_name_their_estimator(monkeypatch, found, message):
    def mine(rewards_S: torch.Tensor) -> PerSample:
        return found

    monkeypatch.setitem(ADVANTAGES, "rloo", mine)
    samples = [make_sample(1.0, index=i) for i in range(2)]
    with pytest.raises(ValueError, match=message):
        groups = [Group(prompt=samples[0].prompt, samples=samples)]
        with_advantages(groups, AdvantageOptions(advantage="rloo"))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_counts_against_the_sample_or_the_token(estimator):
    groups = make_groups([[0.0, 1.0], [0.5, 2.0]])
    samples = [sample for group in groups for sample in group.samples]
    generator = random.Random(0)
    reference = [[p + generator.gauss(0, 0.3) for p in sample.logprobs] for sample in samples]
    kls = []
    for sample, numbers in zip(samples, reference, strict=True):
        deltas = [
            p - q for p, q, m in zip(sample.logprobs, numbers, sample.loss_mask, strict=True) if m
        ]
        formula = {
            "k1": lambda d: d,
            "k2": lambda d: d * d / 2,
            "k3": lambda d: math.exp(-d) - 1 + d,
        }
        kls.append([formula[estimator](d) for d in deltas])
    values = [sample.score.value for sample in samples]
    scores = ModelScores(reference_logprobs=reference)
    kl = KLOptions(kl_coef=0.2, kl_in="reward", kl_estimator=estimator)

    options = AdvantageOptions(advantage="rloo")
    totals = [value - 0.2 * sum(numbers) for value, numbers in zip(values, kls, strict=True)]
    found = with_advantages(groups, options, scores, AdvantageState(kl))
    expected = [totals[0] - totals[1], totals[1] - totals[0]]
    expected += [totals[2] - totals[3], totals[3] - totals[2]]
    for sequence, advantage in zip(found, expected, strict=True):
        row = learned(sequence, sequence.advantages)
        assert row == pytest.approx([advantage] * len(row), abs=1e-9)
    assert found[1].reference_logprobs == reference[1]

    options = AdvantageOptions(advantage="reinforce++")
    returns = []
    for value, numbers in zip(values, kls, strict=True):
        rewards = [-0.2 * number for number in numbers]
        rewards[-1] += value
        returns += [sum(rewards[t:]) for t in range(len(rewards))]
    found = with_advantages(groups, options, scores, AdvantageState(kl))
    rows = flat(learned(s, s.advantages) for s in found)
    assert rows == pytest.approx(standardised(returns), abs=1e-9)


@pytest.mark.parametrize("baseline", ["none", "batch", "group"])
def test_reinforce_discounts_and_takes_a_baseline(baseline):
    rewards = [[0.0, 1.0], [0.5, 2.0]]
    given = {"advantage": "reinforce", "gamma": 0.5, "baseline": baseline}
    options = AdvantageOptions.of(**given, whiten=False)
    found = with_advantages(make_groups(rewards), options)
    for i, sequence in enumerate(found):
        group = rewards[i // 2]
        subtracted = {
            "none": 0.0, "batch": statistics.fmean(flat(rewards)), "group": statistics.fmean(group),
        }[baseline]  # fmt: skip
        rows = learned(sequence, sequence.advantages)
        expected = [group[i % 2] * 0.5 ** (len(rows) - 1 - t) for t in range(len(rows))]
        assert rows == pytest.approx([e - subtracted for e in expected], abs=1e-9)
    whitened = with_advantages(make_groups(rewards), AdvantageOptions.of(**given))
    rows = flat(learned(s, s.advantages) for s in found)
    again = flat(learned(s, s.advantages) for s in whitened)
    assert again == pytest.approx(standardised(rows), abs=1e-9)


def test_gae_reads_only_the_values_of_learned_tokens():
    """Two turns: the value that follows the first turn's last token is the second turn's first."""
    sample = make_sample(1.0, num_turns=2)
    group = Group(prompt=sample.prompt, samples=[sample])
    values = [99.0, 99.0, 0.1, 0.2, 0.3, 99.0, 99.0, 0.4, 0.5, 0.6]
    options = AdvantageOptions.of(advantage="gae", gamma=0.9, lam=0.8)
    (sequence,) = with_advantages([group], options, ModelScores(values=[values]))
    kept = [v for v in values if v < 99]
    delta = [0.9 * n - v for v, n in zip(kept, [*kept[1:], 0.0], strict=True)]
    delta[-1] += 1.0
    expected = [sum(0.72 ** (k - t) * delta[k] for k in range(t, 6)) for t in range(6)]
    assert learned(sequence, sequence.advantages) == pytest.approx(expected, abs=1e-9)
    returns = [a + v for a, v in zip(expected, kept, strict=True)]
    assert learned(sequence, sequence.returns) == pytest.approx(returns, abs=1e-9)
    assert sequence.values == values

    other = [v if v < 99 else -1e6 for v in values]
    (again,) = with_advantages([group], options, ModelScores(values=[other]))
    assert again.advantages == sequence.advantages


def test_gigpo_gives_every_token_the_advantage_of_its_turn():
    samples = [make_sample(None, num_turns=2, index=i) for i in range(2)]
    for sample, rewards, keys in zip(samples, [[0, 1], [0, 0]], ["ab", "ac"], strict=True):
        for turn, reward, key in zip(sample.turns, rewards, keys, strict=True):
            turn.result, turn.state = TurnResult(reward=reward), key
    options = AdvantageOptions.of(advantage="gigpo", divide_by_std=False)
    first, second = with_advantages([Group(prompt=samples[0].prompt, samples=samples)], options)
    # Episodes differ by 1; so do the first steps, discounted; "b" and "c" have no peers.
    opening = 0.5 + 0.95 / 2
    assert learned(first, first.advantages) == pytest.approx([opening] * 3 + [0.5] * 3)
    assert learned(second, second.advantages) == pytest.approx([-opening] * 3 + [-0.5] * 3)


def test_opd_pulls_towards_the_teacher_and_needs_no_scores():
    groups = make_groups([[None, None]])
    teacher = [[-0.3] * len(s.token_ids) for s in groups[0].samples]
    options = AdvantageOptions(advantage="opd")
    for sequence in with_advantages(groups, options, ModelScores(teacher_logprobs=teacher)):
        for i, is_learned in enumerate(sequence.loss_mask):
            expected = -0.3 - sequence.logprobs[i] if is_learned else 0.0
            assert sequence.advantages[i] == pytest.approx(expected)


def test_a_teacher_is_added_after_whitening_and_before_the_clip():
    groups = make_groups(REWARDS)
    samples = [sample for group in groups for sample in group.samples]
    teacher = [None if i == 1 else [-0.3] * len(s.token_ids) for i, s in enumerate(samples)]
    options = AdvantageOptions(whiten=True)
    plain = with_advantages(groups, options)
    rows = Rows(groups, options, ModelScores(teacher_logprobs=teacher))
    taught = rows.sequences(options.estimate(rows), teacher_weight=0.5)
    for i, (before, after) in enumerate(zip(plain, taught, strict=True)):
        for t, is_learned in enumerate(before.loss_mask):
            gain = -0.3 - before.logprobs[t] if is_learned and i != 1 else 0.0
            assert after.advantages[t] == pytest.approx(before.advantages[t] + 0.5 * gain)
    clipped = AdvantageOptions(whiten=True, advantage_clip=0.1)
    rows = Rows(groups, clipped, ModelScores(teacher_logprobs=teacher))
    found = rows.sequences(clipped.estimate(rows), teacher_weight=100.0)
    assert max(abs(a) for s in found for a in s.advantages) == pytest.approx(0.1)


def test_advantages_of_ones_own_are_per_sample_turn_or_token():
    groups = make_groups(REWARDS)
    options = AdvantageOptions.of(advantage="grpo", divide_by_std=False)
    built_in = [sequence.advantages for sequence in with_advantages(groups, options)]
    rows = Rows(groups, options)
    scores = [[s.score.value for s in group.samples] for group in groups]
    per_sample = [score - statistics.fmean(group) for group in scores for score in group]
    assert [s.advantages for s in rows.sequences(per_sample)] == [
        pytest.approx(a) for a in built_in
    ]
    turns = [[a] * len(s.turns) for a, s in zip(per_sample, rows.samples, strict=True)]
    assert [s.advantages for s in rows.sequences(turns)] == [pytest.approx(a) for a in built_in]
    per_token = torch.tensor(per_sample, dtype=torch.float64)[rows.sequence_R]
    assert [s.advantages for s in rows.sequences(per_token)] == [pytest.approx(a) for a in built_in]
    with pytest.raises(ValueError, match=r"1 advantages for \d+ samples with \d+ tokens; give one"):
        rows.sequences([0.5])


def test_rewards_are_normalised_then_clipped_and_advantages_last():
    groups = make_groups(REWARDS)
    plain = AdvantageOptions(advantage="reinforce", whiten=False)
    options = AdvantageOptions(
        advantage="reinforce", whiten=False, reward_norm="batch", reward_clip=0.6
    )
    clipped = [min(0.6, max(-0.6, r)) for r in standardised(flat(REWARDS))]
    found = with_advantages(groups, options)
    assert [s.advantages[-1] for s in found] == pytest.approx(clipped, abs=1e-9)
    assert max(map(abs, clipped)) == 0.6 and len(set(clipped)) > 4

    limited = AdvantageOptions(advantage="reinforce", whiten=False, advantage_clip=0.4)
    raw = [s.advantages[-1] for s in with_advantages(groups, plain)]
    assert raw == flat(REWARDS)
    found = [s.advantages[-1] for s in with_advantages(groups, limited)]
    assert found == pytest.approx([min(0.4, max(-0.4, r)) for r in raw])


def test_normalisation_by_group_keeps_its_shape():
    rewards_S = torch.tensor(flat(REWARDS), dtype=torch.float64)
    groups_S = torch.tensor([g for g, group in enumerate(REWARDS) for _ in group])
    expected = flat(standardised(group) for group in REWARDS)
    assert normalise(rewards_S, groups_S, "group", RunningMoments()).tolist() == pytest.approx(
        expected, abs=1e-9
    )
    assert normalise(rewards_S, groups_S, "none", RunningMoments()) is rewards_S


def test_running_moments_are_those_of_everything_so_far():
    generator = random.Random(0)
    moments, seen = RunningMoments(), []
    for _ in range(5):
        batch = [generator.gauss(3, 2) for _ in range(generator.randint(1, 9))]
        seen += batch
        moments.update(torch.tensor(batch))
        resumed = RunningMoments()
        resumed.load_state_dict(json.loads(json.dumps(moments.state_dict())))
        moments = resumed
    found = moments.normalise(torch.tensor([4.0], dtype=torch.float64)).item()
    expected = (4 - statistics.fmean(seen)) / statistics.stdev(seen)
    assert found == pytest.approx(expected, rel=1e-5)


def test_running_normalisation_and_adaptive_kl_resume():
    groups = make_groups([[0.0, 1.0], [0.5, 2.0]])
    samples = [sample for group in groups for sample in group.samples]
    scores = ModelScores(reference_logprobs=[[-2.0] * len(s.token_ids) for s in samples])
    options = AdvantageOptions(advantage="reinforce++", reward_norm="running")
    kl = KLOptions(kl_in="reward", kl_coef=0.1, kl_target=1.0, kl_horizon=100)
    state = AdvantageState(kl)
    with_advantages(groups, options, scores, state)
    kls = [sum(p + 2.0 for p, m in zip(s.logprobs, s.loss_mask, strict=True) if m) for s in samples]
    assert statistics.fmean(kls) > 1.2  # so that the error is clipped to 0.2
    assert state.kl.coef == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
    assert state.rewards.count == 4
    per_token = sum(kls) / sum(sum(s.loss_mask) for s in samples)
    found = {name: state.metrics[name] for name in ("loss/kl", "loss/kl_coef")}
    assert found == pytest.approx({"loss/kl": per_token, "loss/kl_coef": 0.1})
    resumed = AdvantageState(kl)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    again = [with_advantages(groups, options, scores, s) for s in (state, resumed)]
    assert again[0] == again[1] and resumed.rewards.count == 8
    with pytest.raises(ValueError, match="needs the run's AdvantageState"):
        with_advantages(groups, options)


def test_the_kl_controller_leads_to_its_target():
    controller = KLController(0.1, target=6.0, horizon=1000)
    controller.update(3.0, 50)
    assert controller.coef == pytest.approx(0.1 * (1 - 0.2 * 50 / 1000))
    controller.update(6.6, 50)
    assert controller.coef == pytest.approx(0.1 * 0.99 * (1 + 0.1 * 0.05))
    fixed = KLController(0.1)
    fixed.update(100.0, 50)
    assert fixed.coef == 0.1


def test_kl_estimators_agree_with_the_exact_divergence():
    """k1 and k3 have the KL as their mean under the policy."""
    torch.manual_seed(0)
    p, q = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    exact = sum(pi.exp() * (pi - qi) for pi, qi in zip(p, q, strict=True)).item()
    for estimator in ("k1", "k3"):
        assert (p.exp() * estimate_kl(p, q, estimator)).sum().item() == pytest.approx(exact)
    assert (estimate_kl(p, q, "k3") >= 0).all()
    with pytest.raises(ValueError, match="estimator='k4' is not known; use one of k1, k2, k3"):
        estimate_kl(p, q, "k4")


def test_samples_without_any_token_to_learn_from():
    samples = [make_sample(r, index=i) for i, r in enumerate([0.0, 1.0, 2.0])]
    (sequence,) = samples[1].sequences
    sequence.lengths = [(len(sequence.token_ids), 0)]  # all of it was read
    group = Group(prompt=samples[0].prompt, samples=samples)
    for kind in ("grpo", "reinforce"):
        low, none, high = with_advantages([group], AdvantageOptions(advantage=kind, whiten=False))
        assert none.advantages == [0.0] * 5
        mean = 1.0 if kind == "grpo" else 0.0
        assert low.advantages[-1] == pytest.approx(0 - mean, abs=1e-5)
        assert high.advantages[-1] == pytest.approx(2 - mean, abs=1e-5)


def test_no_groups_are_no_sequences():
    assert with_advantages([]) == []


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_rewards_that_are_no_numbers_are_refused(reward):
    groups = make_groups([[0.0, 1.0], [1.0, reward]])
    with pytest.raises(ValueError, match="sample 1 of prompt p1 has score"):
        with_advantages(groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "ppo"}, "advantage='ppo' is not known; use one of grpo, rloo"),
        (
            {"advantage": "rloo", "divide_by_std": False},
            "divide_by_std=False is read by advantage grpo, gigpo; advantage='rloo' does not",
        ),
        ({"lam": 0.9}, "lam=0.9 is read by advantage gae; advantage='grpo' does not"),
        ({"lambda_": 0.9}, "lambda_=0.9 is not an option of advantage='grpo'"),
        (
            {"advantage": "opd", "reward_clip": 0.1},
            "reward_clip=0.1 is only read with an advantage",
        ),
        (
            {"advantage": "reinforce", "baseline": "median"},
            "baseline='median' is not known; use one of none, batch",
        ),
        ({"reward_norm": "mean"}, "reward_norm='mean' is not known; use one of none, batch"),
        ({"advantage": "gae", "gamma": 1.1}, "gamma=1.1 must be at most 1"),
        ({"advantage": "gae", "lam": -0.1}, "lam=-0.1 must be at least 0"),
        ({"advantage_clip": 0.0}, "advantage_clip=0.0 must be above 0"),
    ],
)
def test_wrong_and_unread_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdvantageOptions.of(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_estimator": "k3"}, "only read with kl_coef above 0"),
        ({"kl_coef": 0.1, "kl_estimator": "k4"}, "kl_estimator='k4' is not known; use one of k1"),
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.0}, "kl_target=0.0 must be above 0"),
    ],
)
def test_wrong_and_unread_options_of_the_kl_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KLOptions(**options)


def test_kl_in_the_reward_needs_an_advantage_that_reads_rewards():
    groups = make_groups([[0.0, 1.0]])
    per_token = [[0.0] * len(s.token_ids) for s in groups[0].samples]
    scores = ModelScores(teacher_logprobs=per_token, reference_logprobs=per_token)
    state = AdvantageState(KLOptions(kl_coef=0.1, kl_in="reward"))
    with pytest.raises(ValueError, match="advantage='opd', which reads no rewards"):
        with_advantages(groups, AdvantageOptions(advantage="opd"), scores, state)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_missing_and_unread_scores_is_refused(kind):
    groups = make_groups([[0.0, 1.0]])
    per_token = [[0.0] * len(s.token_ids) for s in groups[0].samples]
    given = {
        "gae": {"values": per_token},
        "opd": {"teacher_logprobs": per_token},
    }.get(kind, {})
    options = AdvantageOptions(advantage=kind)
    with_advantages(groups, options, ModelScores(**given))
    for name in given:
        with pytest.raises(ValueError, match=f"advantage='{re.escape(kind)}' .* needs {name}"):
            with_advantages(groups, options, ModelScores(**(given | {name: None})))
        with pytest.raises(ValueError, match=rf"{name} .*0 lists for 2 sequences|{name} has"):
            with_advantages(groups, options, ModelScores(**(given | {name: []})))
    with pytest.raises(ValueError, match="does not read reference_logprobs"):
        with_advantages(groups, options, ModelScores(**given, reference_logprobs=per_token))
