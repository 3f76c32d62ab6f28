"""The algorithm of a recipe as flat options, which its Config inherits; they check themselves."""

from dataclasses import dataclass

from roll_lite.checks import above, at_least, filled_from, one_of, read_only_if
from roll_lite.models.config import ModelConfig, read_config
from roll_lite.train.advantage_options import KINDS as ADVANTAGES
from roll_lite.train.advantage_options import AdvantageOptions
from roll_lite.train.aggregation import check_aggregation
from roll_lite.train.losses import ValueLoss
from roll_lite.train.policy_loss import KINDS as LOSSES
from roll_lite.train.policy_loss import PolicyLoss

OF_SEQUENCES = ("gspo", "topr", "kimi")


@dataclass(kw_only=True)
class Algorithm:
    advantage: str = "grpo"
    """grpo, rloo, lite_ppo, reinforce, reinforce++, or gae, which has a critic."""
    divide_by_std: bool = True
    """grpo: divide advantages by the group's standard deviation; off is Dr. GRPO."""
    gamma: float | None = None
    """reinforce, reinforce++, gae: discount from token to token; None is 1."""
    lam: float = 0.95
    """gae: 1 is the return minus the value, less trusts the critic more."""
    baseline: str = "none"
    """reinforce: subtract none, or the mean reward of the batch or group."""
    reward_norm: str = "none"
    """Rewards minus mean, over standard deviation: none, batch, group or running."""
    reward_clip: float | None = None
    """Rewards are clipped to this magnitude, after normalisation."""
    whiten: bool | None = None
    """Whiten advantages over the batch's tokens; None does so for reinforce and reinforce++."""
    advantage_clip: float | None = None
    """Advantages are clipped to this magnitude, last."""
    critic_lr: float = 1e-3
    """gae: learning rate of the critic, which starts as the model with a value head of zeros."""
    value_clip: float | None = None
    """gae: a value gains nothing by moving further than this in one round (PPO)."""
    critic_warmup_steps: int = 0
    """gae: rounds at the start that train the critic alone."""
    loss: str = "ppo"
    """ppo, gspo, segment, cispo, tis, topr, raft++, kimi or reinforce."""
    clip_low: float = 0.2
    """Probability ratios are clipped below 1 - clip_low (gspo wants about 3e-4)."""
    clip_high: float = 0.2
    """Probability ratios are clipped above 1 + clip_high (gspo wants about 4e-4)."""
    dual_clip: float | None = None
    """ppo: where the advantage is negative, the loss is at most this times its magnitude."""
    ratio_cap: float = 1.0
    """tis: importance weights are at most this."""
    tau: float = 0.1
    """kimi: strength of the pull towards the policy that sampled."""
    aggregation: str | None = None
    """token_mean, seq_mean_token_mean, seq_mean_token_sum or seq_mean_token_sum_const; None is the
    second for gspo, topr and kimi, whose tokens share their sequence's loss, and else the first."""
    constant: float | None = None
    """seq_mean_token_sum_const: what sums are divided by, such as the longest reply (Dr. GRPO)."""
    denominator: str = "behaviour"
    """Of ratios: behaviour (logprobs of the engine) or old (of the trainer, before the updates)."""
    correction: str = "none"
    """denominator=old: weigh by old / behaviour, of each token or of the sequence."""
    correction_cap: float = 2.0
    """Weights of the correction are at most this."""
    rejection: str = "none"
    """denominator=old: leave out the token or sequence whose old / behaviour is not in the band."""
    rejection_low: float = 0.5
    """Where the band begins."""
    rejection_high: float = 2.0
    """Where the band ends."""
    entropy_coef: float = 0.0
    """Of the entropy bonus."""
    kl_coef: float = 0.0
    """Of the KL to the reference; 0 loads none."""
    kl_in: str = "loss"
    """What the KL is part of: loss or reward."""
    kl_estimator: str | None = None
    """k1, k2 or k3; None is k3 in the loss and k1 in the reward."""
    kl_target: float | None = None
    """kl_in=reward: adapt kl_coef so that samples have about this KL."""
    kl_horizon: int = 10_000
    """kl_target: samples over which kl_coef adapts."""
    reference: str | None = None
    """Hugging Face folder that KL is measured to; None is the starting model."""

    def __post_init__(self):
        one_of(ADVANTAGES, self, "advantage")
        one_of(LOSSES, self, "loss")
        one_of(("loss", "reward"), self, "kl_in")
        at_least(0, self, "kl_coef", "critic_lr", "critic_warmup_steps")
        if self.value_clip is not None:
            above(0, self, "value_clip")
        critic = ("critic_lr", "value_clip", "critic_warmup_steps")
        read_only_if(self.needs_critic, "advantage='gae'", self, *critic)
        read_only_if(self.needs_reference, "kl_coef above 0", self, "kl_in", "reference")
        is_in_reward = self.kl_in == "reward"
        read_only_if(is_in_reward, "kl_in='reward'", self, "kl_target", "kl_horizon")
        check_aggregation(self.chosen_aggregation, self.constant)
        # Each refuses what the chosen kind does not read.
        _ = self.advantage_options, self.policy_loss

    @property
    def chosen_aggregation(self) -> str:
        of_loss = "seq_mean_token_mean" if self.loss in OF_SEQUENCES else "token_mean"
        return self.aggregation or of_loss

    @property
    def advantage_options(self) -> AdvantageOptions:
        return filled_from(
            AdvantageOptions, self, kind=self.advantage, **self._kl_options("reward", "k1")
        )

    @property
    def policy_loss(self) -> PolicyLoss:
        return filled_from(PolicyLoss, self, kind=self.loss, **self._kl_options("loss", "k3"))

    @property
    def value_loss(self) -> ValueLoss:
        return ValueLoss(clip=self.value_clip)

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def reference_configs(self) -> dict[str, ModelConfig]:
        """Of a reference that is another model than the policy, by the name of its role."""
        return {"reference": read_config(self.reference)} if self.reference else {}

    def _kl_options(self, where: str, estimator: str) -> dict[str, float | str]:
        """Those of the place that the KL is part of; none of it in the other place."""
        if self.kl_in != where:
            return {"kl_coef": 0.0, "kl_estimator": estimator}
        return {"kl_coef": self.kl_coef, "kl_estimator": self.kl_estimator or estimator}
