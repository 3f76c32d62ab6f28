"""Advantage estimators: rewards in, advantages out, everything in float64.

S counts samples; `groups_S` says which group each belongs to. R counts rows (tokens that carry
loss) of all samples end to end; `sequence_R` says which sample each belongs to.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

EQUAL = 1e-12  # rewards of a smaller variance are the same number, but for rounding
EPSILON = 1e-6


def grpo(rewards_S: Tensor, groups_S: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """Reward minus the group's mean, over its (sample) standard deviation.

    Equal rewards, or a group of one, give 0. Without the division this is Dr. GRPO.
    """
    centred_S, variance_S, _ = _moments_by_group(rewards_S, groups_S)
    scale_S = variance_S.sqrt() + EPSILON if divide_by_std else 1.0
    return torch.where(variance_S < EQUAL, 0.0, centred_S / scale_S)


def rloo(rewards_S: Tensor, groups_S: Tensor) -> Tensor:
    """Reward minus the mean of the group's other rewards; a group of one gives 0."""
    centred_S, _, count_S = _moments_by_group(rewards_S, groups_S)
    return centred_S * count_S / (count_S - 1).clamp(min=1)


def lite_ppo(rewards_S: Tensor, groups_S: Tensor) -> Tensor:
    """Reward minus the group's mean, over the standard deviation of the whole batch."""
    centred_S, _, _ = _moments_by_group(rewards_S, groups_S)
    _, variance_S, _ = _moments_by_group(rewards_S, torch.zeros_like(groups_S))
    return torch.where(variance_S < EQUAL, 0.0, centred_S / (variance_S.sqrt() + EPSILON))


def gigpo(
    step_rewards: Sequence[Sequence[float]],
    observations: Sequence[Sequence[Hashable]],
    groups_S: Tensor,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    divide_by_std: bool = True,
) -> list[list[float]]:
    """Per sample and step: the episode's advantage in its group, plus the step's among its peers.

    Peers are the steps of the group that began with the same observation; they are compared by
    their discounted returns. The episode's reward is the sum of its steps' rewards.
    """
    lengths = [len(rewards) for rewards in step_rewards]
    sample_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rewards_N = torch.tensor([r for rewards in step_rewards for r in rewards], dtype=torch.float64)
    totals_S = rewards_N.new_zeros(len(lengths)).index_add(0, sample_N, rewards_N)
    keys = zip(
        groups_S[sample_N].tolist(),
        [key for sample in observations for key in sample],
        strict=True,
    )
    numbers: dict[Hashable, int] = {}
    peers_N = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
    returns_N = discounted_returns(rewards_N, sample_N, gamma)
    episode_S = grpo(totals_S, groups_S, divide_by_std=divide_by_std)
    step_N = grpo(returns_N, peers_N, divide_by_std=divide_by_std)
    advantages_N = episode_S[sample_N] + step_weight * step_N
    return [part.tolist() for part in advantages_N.split(lengths)]


def gae(
    rewards_R: Tensor,
    values_R: Tensor,
    sequence_R: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (advantage plus value). Nothing is worth anything after the last row.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1}
    """
    has_next_R = torch.cat([sequence_R[1:] == sequence_R[:-1], sequence_R.new_zeros(1).bool()])
    next_R = torch.where(has_next_R[: len(values_R)], values_R.roll(-1), 0.0)
    delta_R = rewards_R + gamma * next_R - values_R
    advantages_R = discounted_returns(delta_R, sequence_R, gamma * lam)
    return advantages_R, advantages_R + values_R


def discounted_returns(rewards_R: Tensor, sequence_R: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, from each sequence's last row backwards."""
    if not len(rewards_R):
        return rewards_R
    counts_S = torch.bincount(sequence_R)
    starts_S = counts_S.cumsum(0) - counts_S
    place_R = torch.arange(len(rewards_R)) - starts_S[sequence_R]
    # Sequences side by side: as many steps as the longest has rows. Zeros after an end stay zero.
    table_LS = rewards_R.new_zeros(int(counts_S.max()), len(counts_S))
    table_LS[place_R, sequence_R] = rewards_R
    for step in range(len(table_LS) - 2, -1, -1):
        table_LS[step] += gamma * table_LS[step + 1]
    return table_LS[place_R, sequence_R]


def opd(
    logprobs_R: Tensor, teachers: Sequence[Tensor], *, coef: float, weights: Sequence[float]
) -> Tensor:
    """On-policy distillation: -coef * sum_t w_t (log p_behaviour - log p_teacher_t)."""
    divergence_R = torch.zeros_like(logprobs_R)
    for weight, teacher_R in zip(weights, teachers, strict=True):
        divergence_R += weight * (logprobs_R - teacher_R)
    return -coef * divergence_R


def whiten(values: Tensor) -> Tensor:
    """Minus the mean, over the (sample) standard deviation; equal values give 0."""
    return grpo(values, torch.zeros(len(values), dtype=torch.int64))


def group_means(rewards_S: Tensor, groups_S: Tensor) -> Tensor:
    """(S,): the mean reward of each sample's group."""
    return rewards_S - _moments_by_group(rewards_S, groups_S)[0]


def _moments_by_group(rewards_S: Tensor, groups_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per sample: reward minus its group's mean, the group's variance (n - 1) and its size."""
    rewards_S = rewards_S.double()
    num_groups = int(groups_S.max()) + 1 if len(groups_S) else 0
    zeros_G = rewards_S.new_zeros(num_groups)
    count_S = zeros_G.index_add(0, groups_S, torch.ones_like(rewards_S))[groups_S]
    centred_S = rewards_S - zeros_G.index_add(0, groups_S, rewards_S)[groups_S] / count_S
    squares_S = zeros_G.index_add(0, groups_S, centred_S.square())[groups_S]
    return centred_S, squares_S / (count_S - 1).clamp(min=1), count_S
