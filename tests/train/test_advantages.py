"""Advantage estimators against the papers' formulas in plain Python loops."""

import random
import statistics

import pytest
import torch
from support.training_data import flat, make_groups, standardised

from roll_lite.checks import UserError
from roll_lite.train import advantages as estimators
from roll_lite.train.sample_rows import with_advantages

REWARDS = [[0.0, 1.0, 0.0, 0.5, 1.0], [2.0, -1.0], [0.3, 0.3, 0.3], [7.0]]


def tensors(rewards):
    """rewards_S and groups_S of a list per group."""
    groups = [g for g, group in enumerate(rewards) for _ in group]
    return torch.tensor(flat(rewards), dtype=torch.float64), torch.tensor(groups)


# ---- by sample


def test_grpo_is_the_papers_formula():
    expected = flat(standardised(group) for group in REWARDS)
    assert estimators.grpo(*tensors(REWARDS)).tolist() == pytest.approx(expected, abs=1e-12)
    centred = flat([r - statistics.fmean(group) for r in group] for group in REWARDS)
    found = estimators.grpo(*tensors(REWARDS), divide_by_std=False)
    assert found.tolist() == pytest.approx(centred, abs=1e-12)


def test_rloo_leaves_one_out():
    expected = []
    for group in REWARDS:
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            expected.append(reward - statistics.fmean(others) if others else 0.0)
    assert estimators.rloo(*tensors(REWARDS)).tolist() == pytest.approx(expected, abs=1e-12)


def test_lite_ppo_divides_by_the_batch():
    std = statistics.stdev(flat(REWARDS)) + 1e-6
    expected = flat([(r - statistics.fmean(group)) / std for r in group] for group in REWARDS)
    assert estimators.lite_ppo(*tensors(REWARDS)).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "lite_ppo"])
@pytest.mark.parametrize("rewards", [[1.0], [0.0, 0.0, 0.0], [0.3] * 7])
def test_groups_without_a_difference_teach_nothing(kind, rewards):
    advantages = getattr(estimators, kind)(*tensors([rewards]))
    assert advantages.shape == (len(rewards),)
    assert advantages.tolist() == pytest.approx([0.0] * len(rewards), abs=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "lite_ppo"])
def test_the_order_of_samples_does_not_matter(kind):
    rewards_S, groups_S = tensors(REWARDS)
    order = torch.tensor(random.Random(0).sample(range(len(rewards_S)), len(rewards_S)))
    straight = getattr(estimators, kind)(rewards_S, groups_S)
    shuffled = getattr(estimators, kind)(rewards_S[order], groups_S[order])
    assert shuffled.tolist() == pytest.approx(straight[order].tolist(), abs=1e-12)


# ---- by token


def by_token_case():
    """Five sequences of 1 to 6 rows; sequence 2 has none."""
    counts = [3, 1, 0, 6, 4]
    generator = random.Random(1)
    rewards = [[generator.gauss(0, 1) for _ in range(n)] for n in counts]
    values = [[generator.gauss(0, 1) for _ in range(n)] for n in counts]
    sequence_R = torch.tensor([s for s, n in enumerate(counts) for _ in range(n)])
    return rewards, values, sequence_R


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (1.0, 0.0)])
def test_gae_is_the_sum_of_discounted_errors(gamma, lam):
    rewards, values, sequence_R = by_token_case()
    expected = []
    for reward, value in zip(rewards, values, strict=True):
        following = [*value[1:], 0.0]
        delta = [
            r + gamma * n - v
            for r, v, n in zip(reward, value, following[: len(reward)], strict=True)
        ]
        expected += [
            sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta)))
            for t in range(len(delta))
        ]
    advantages = estimators.gae(
        torch.tensor(flat(rewards)).double(),
        torch.tensor(flat(values)).double(),
        sequence_R,
        gamma=gamma,
        lam=lam,
    )
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_returns_are_discounted_within_the_sequence():
    rewards, _, sequence_R = by_token_case()
    expected = [
        sum(0.7 ** (k - t) * values[k] for k in range(t, len(values)))
        for values in rewards
        for t in range(len(values))
    ]
    found = estimators.discounted_returns(torch.tensor(flat(rewards)).double(), sequence_R, 0.7)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    empty = torch.zeros(0)
    assert len(estimators.discounted_returns(empty, empty.long(), 0.7)) == 0
    assert len(estimators.gae(empty, empty, empty.long())) == 0


def test_gigpo_compares_steps_that_saw_the_same():
    """Two groups of three and two episodes; observation "a" recurs in both, apart."""
    rewards = [[0.0, 1.0], [0.0, 0.0, 2.0], [1.0], [0.5, 0.0], [0.0, 3.0]]
    observations = [["a", "b"], ["a", "b", "a"], ["a"], ["a", "c"], ["a", "d"]]
    groups = [0, 0, 0, 1, 1]
    gamma, weight = 0.95, 0.5
    returns = [
        [sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]
        for r in rewards
    ]
    expected = []
    for i, episode in enumerate(rewards):
        totals = [sum(rewards[j]) for j in range(5) if groups[j] == groups[i]]
        episode_advantage = (sum(episode) - statistics.fmean(totals)) / (
            statistics.stdev(totals) + 1e-6
        )
        for t, key in enumerate(observations[i]):
            peers = [
                returns[j][k]
                for j in range(5)
                for k in range(len(rewards[j]))
                if groups[j] == groups[i] and observations[j][k] == key
            ]
            step = 0.0
            if len(peers) > 1 and statistics.stdev(peers) > 1e-6:
                step = returns[i][t] - statistics.fmean(peers)
                step /= statistics.stdev(peers) + 1e-6
            expected.append(episode_advantage + weight * step)
    found = estimators.gigpo(
        rewards, observations, torch.tensor(groups), gamma=gamma, step_weight=weight
    )
    assert [len(steps) for steps in found] == [2, 3, 1, 2, 2]
    assert flat(found) == pytest.approx(expected, abs=1e-9)


def test_a_wrong_signature_is_named(monkeypatch):
    def unknown(reward_S: torch.Tensor, groups_S: torch.Tensor) -> estimators.PerSample: ...

    def without_unit(rewards_S: torch.Tensor): ...

    monkeypatch.setitem(estimators.ADVANTAGES, "grpo", unknown)
    message = r"test_advantages.py line \d+: advantage grpo asks for reward_S; .* among rewards_S"
    with pytest.raises(UserError, match=message):
        estimators.AdvantageOptions()
    monkeypatch.setitem(estimators.ADVANTAGES, "grpo", without_unit)
    message = r"test_advantages.py line \d+: advantage grpo needs a return type, one of rl.PerSamp"
    with pytest.raises(UserError, match=message):
        estimators.AdvantageOptions()


def test_an_estimator_may_read_scores_alone(monkeypatch):
    def scores(scores_S: torch.Tensor, groups_S: torch.Tensor) -> estimators.PerSample:
        return scores_S

    monkeypatch.setitem(estimators.ADVANTAGES, "grpo", scores)
    options = estimators.AdvantageOptions(reward_clip=0.5)
    low, high = with_advantages(make_groups([[0.25, 1.0]]), options)
    assert (low.advantages[-1], high.advantages[-1]) == (0.25, 0.5)
