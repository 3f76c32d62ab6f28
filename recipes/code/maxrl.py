"""MaxRL (Tajwar et al. 2026, arXiv 2602.02710): the reward minus the group's mean, over that mean.

With rewards of 0 and 1 the mean estimates the chance p of success. GRPO divides by its deviation,
sqrt(p (1 - p)); divided by p itself, the gradient is that of log p, the likelihood of the right
answers, as far as the samples of a group can tell: hard prompts count more.

python recipes/rlvr.py --code recipes/code/maxrl.py --advantage maxrl --data reverse:5
"""

import roll_lite as rl


def maxrl(rewards_S, groups_S) -> rl.PerSample:
    """(r - mean) / mean in the group; 0 in a group whose mean is not above 0."""
    mean_S = rl.mean_by_group(rewards_S, groups_S)
    return ((rewards_S - mean_S) / mean_S).where(mean_S > 0, 0.0)


ADVANTAGES = {"maxrl": maxrl}
