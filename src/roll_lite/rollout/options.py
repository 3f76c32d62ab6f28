"""How many samples are made of how many prompts, which are kept, and how old they may be."""

import math
from dataclasses import dataclass
from typing import Literal

from roll_lite.checks import above, at_least, check_choices, finite


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Flat, so that the Config of a recipe can inherit them."""

    samples_per_prompt: int = 8
    """Group size: samples of one prompt, which are compared with each other."""
    prompts_per_step: int = 32
    """Prompts of one round: groups that one collect returns."""
    samples_per_replica: int = 1024
    """Unfinished samples that a replica has at most; further groups wait for whoever has room."""
    extra_prompts: int = 0
    """Groups started beyond those asked for, so that nobody waits for the slowest. Without effect
    where generation goes on beside training: max_staleness says how many there are."""
    surplus: Literal["abort", "keep"] = "abort"
    """What becomes of groups that are not needed any more: keep them for the next step. Then
    no group is started beside training."""
    drop_equal: bool = False
    """Drop groups whose rewards are all equal: they teach nothing (DAPO's dynamic sampling)."""
    min_group_reward: float | None = None
    """Drop groups whose mean reward is below: too hard."""
    max_group_reward: float | None = None
    """Drop groups whose mean reward is above: too easy."""
    max_refills: int = 10
    """Dropped groups are replaced one for one, at most so many times prompts_per_step a step; then
    the step goes on with the groups that are left, a smaller batch at the same learning rate.
    Where none is left, the run stops."""
    deadline: float | None = None
    """Seconds after which a sample is aborted, from when an engine has it to the end of scoring;
    evaluations have none."""
    max_retries: int = 2
    """How often a request that an engine failed, or a step that raised, is tried again."""
    max_staleness: float = 0.0
    """Policy versions between a sample's first token and its use; 0 is synchronous. Groups under
    way, waiting to be used and trained on are at most (1 + max_staleness) * prompts_per_step."""

    def __post_init__(self):
        at_least(1, self, "samples_per_prompt", "prompts_per_step", "samples_per_replica")
        at_least(0, self, "extra_prompts", "max_refills", "max_retries", "max_staleness")
        check_choices(self)
        if self.deadline is not None:
            above(0, self, "deadline")
        if self.drop_equal and self.samples_per_prompt == 1:
            raise ValueError("drop_equal drops every group of samples_per_prompt=1; use 2 or more")
        if self.surplus == "keep" and self.extra_prompts == 0:
            raise ValueError(
                "surplus='keep' with extra_prompts=0: there is never one too many; set "
                "extra_prompts, or leave surplus away"
            )
        if self.surplus == "keep" and self.max_staleness < 1:
            raise ValueError(
                f"surplus='keep' with max_staleness={self.max_staleness}: what is kept is used "
                "under the next policy version; set max_staleness to 1 or more"
            )
        finite(self, "max_staleness", "min_group_reward", "max_group_reward")
        low, high = self.min_group_reward, self.max_group_reward
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_group_reward={low} must not exceed max_group_reward={high}")

    @property
    def min_samples(self) -> int:
        """A group with fewer left is dropped: one alone has nothing to compare with."""
        return min(2, self.samples_per_prompt)

    @property
    def max_in_flight(self) -> int:
        """Groups that are not used up yet, when generation goes on beside training."""
        return int((1 + self.max_staleness) * self.prompts_per_step)

    @property
    def max_version_gap(self) -> int:
        return math.ceil(self.max_staleness)
