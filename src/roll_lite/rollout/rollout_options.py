"""Options of the rollout: how many samples to generate, which to keep, how stale they may be."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from roll_lite.checks import UserError, above, at_least, check_choices, finite, read_only_if
from roll_lite.options import Argument
from roll_lite.types import SamplingParams, Truncation


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Which tokens are sampled, and where a reply ends."""

    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability. Losses read logprobs
    among what top_k, top_p and min_p leave."""
    min_p: float = 0.0
    """Sample among tokens at least this likely, relative to the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts at which a reply ends, as in --stop "</answer>" "Question:". Rewards read the reply
    without it; its tokens are trained on."""

    def __post_init__(self):
        _ = self.params(max_tokens=1)  # refuses wrong values

    def params(self, **more: Any) -> SamplingParams:
        """With `max_tokens`, `temperature` and `stop_ids`."""
        return SamplingParams(**vars(self), **more)

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Rollout: groups of samples, filters, staleness."""

    samples_per_prompt: int = 8
    """Samples per prompt: the group size."""
    prompts_per_step: int = 32
    """Prompts per step; each gives one group of samples."""
    max_staleness: float = 0.0
    """How far generation may be ahead of training. 0 is synchronous. Above 0, generation continues
    during training, and at most (1 + max_staleness) * prompts_per_step groups are being generated,
    ready or in training: so the staleness of samples (policy versions from their first token to
    their use) is at most max_staleness on average."""
    stale: Literal["keep", "drop"] = "keep"
    """What becomes of samples staler than max_staleness, which are mostly long ones: trained on
    (keep), or dropped and replaced (drop), so that fewer long samples are trained on than were
    generated."""
    drop_equal: bool = False
    """Drop groups from which the advantage has nothing to learn: with grpo and most others those
    whose rewards are all equal (DAPO's dynamic sampling). Rewards count as they were given, before
    a penalty of overlong replies, a KL in the reward or a teacher changes them."""
    min_group_reward: Argument[float | None] = None
    """Drop groups with a lower mean reward: the prompt is too hard."""
    max_group_reward: Argument[float | None] = None
    """Drop groups with a higher mean reward: the prompt is too easy."""
    max_refills: int = 10
    """Replace dropped groups, at most max_refills * prompts_per_step of them per step. Then the
    step uses the groups that are left, a smaller batch at the same learning rate; with none left,
    it is skipped. Five skipped steps in a row end the run."""
    extra_groups: int = 0
    """Groups to start beyond prompts_per_step, so that a step need not wait for the slowest; the
    surplus is aborted. Not with max_staleness above 0, which sets the number of groups."""
    extra_samples: Argument[int] = 0
    """Samples to start beyond samples_per_prompt. A group keeps the first samples_per_prompt that
    are done and aborts the rest at once. Which ones it keeps depends on timing, and long samples
    are aborted more often than short ones."""
    deadline: float | None = None
    """Seconds until an unfinished sample is aborted, from its admission to an engine to the end of
    scoring. Evaluation has no deadline."""
    max_retries: Argument[int] = 2
    """Retries of a request that an engine failed, and of a reward that raised; not of a plain
    function that reached its time limit, unless its process lacked a processor."""
    samples_per_replica: Argument[int] = 1024
    """Most unfinished samples per engine; further groups wait until an engine has room."""
    journal: bool = True
    """Keep finished samples in the run folder until the next checkpoint, so that after a crash only
    what was in flight is generated again."""

    recorded: Argument[str | None] = None
    """Folder of a run to take samples of while the policies are near (proof/whatif.py)."""
    max_kl: Argument[float] = 0.02
    """Take no more of them after a step with a higher KL a token from that policy to this one. At
    0.02 nats a typical token is 20% more or less likely, which is where ratios are clipped."""

    def __post_init__(self):
        at_least(1, self, "samples_per_prompt", "prompts_per_step", "samples_per_replica")
        at_least(
            0, self, "extra_groups", "extra_samples", "max_refills", "max_retries", "max_staleness"
        )
        above(0, self, "deadline")
        check_choices(self)
        read_only_if(self.max_staleness > 0, "max_staleness above 0", self, "stale")
        read_only_if(self.recorded is not None, "recorded", self, "max_kl")
        at_least(0, self, "max_kl")
        if self.drop_equal and self.samples_per_prompt == 1:
            raise UserError("drop_equal drops every group of samples_per_prompt=1; use 2 or more")
        finite(self, "max_staleness", "min_group_reward", "max_group_reward")
        low = self.min_group_reward
        high = self.max_group_reward
        if low is not None and high is not None and low > high:
            raise UserError(f"min_group_reward={low} must not exceed max_group_reward={high}")

    @property
    def max_in_flight(self) -> int:
        """Most groups that are being generated, ready or in training, in an asynchronous run."""
        return int((1 + self.max_staleness) * self.prompts_per_step)

    @property
    def max_samples_in_flight(self) -> int:
        """Most samples of training that are being generated, ready or in training."""
        num_groups = self.max_in_flight + self.extra_groups
        return num_groups * (self.samples_per_prompt + self.extra_samples)

    @property
    def max_version_gap(self) -> int:
        """Most policy versions from a sample's first token to its use, with stale="drop"."""
        return math.ceil(self.max_staleness)
