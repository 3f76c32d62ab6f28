"""Every option of the way from rewards to advantages, and what of it runs along with training."""

from dataclasses import dataclass

from roll_lite.checks import above, at_least, one_of, only_read_by
from roll_lite.train.kl import KL_ESTIMATORS, KLController
from roll_lite.train.normalise import RunningMoments

BY_SAMPLE = ("grpo", "rloo", "lite_ppo")
BY_TOKEN = ("gae", "reinforce", "reinforce++")
KINDS = (*BY_SAMPLE, *BY_TOKEN, "gigpo", "opd")
WITH_REWARDS = (*BY_SAMPLE, *BY_TOKEN)
READERS = {
    "divide_by_std": ("grpo", "gigpo"),
    "gamma": (*BY_TOKEN, "gigpo"),
    "lam": ("gae",),
    "baseline": ("reinforce",),
    "step_weight": ("gigpo",),
    "teacher_coef": ("opd",),
    "teacher_weights": ("opd",),
    "reward_norm": WITH_REWARDS,
    "reward_clip": WITH_REWARDS,
    "kl_coef": WITH_REWARDS,
    "kl_estimator": WITH_REWARDS,
    "kl_target": WITH_REWARDS,
    "kl_horizon": WITH_REWARDS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOptions:
    kind: str = "grpo"
    """grpo, rloo, lite_ppo, gae, reinforce, reinforce++, gigpo or opd."""
    divide_by_std: bool = True
    """Divide by the group's standard deviation (grpo, gigpo); off is Dr. GRPO."""
    gamma: float | None = None
    """Discount; None is 0.95 for gigpo and 1 for gae, reinforce and reinforce++."""
    lam: float = 0.95
    """Of gae."""
    baseline: str = "none"
    """Of reinforce, subtracted from returns: none, or the mean reward of the batch or group."""
    step_weight: float = 1.0
    """Of gigpo's step advantage, beside the episode's."""
    teacher_coef: float = 1.0
    """Of opd."""
    teacher_weights: tuple[float, ...] = ()
    """Of opd, one per teacher; empty weighs them equally, adding up to 1."""
    reward_norm: str = "none"
    """Rewards minus mean, over standard deviation: none, batch, group or running."""
    reward_clip: float | None = None
    """Rewards are clipped to this magnitude, after normalisation."""
    kl_coef: float = 0.0
    """KL to the reference in the reward: of each token, or of the sample (grpo, rloo, lite_ppo)."""
    kl_estimator: str = "k1"
    """k1, k2 or k3."""
    kl_target: float | None = None
    """Adapt kl_coef so that samples have about this KL."""
    kl_horizon: int = 10_000
    """Samples over which kl_coef adapts."""
    whiten: bool | None = None
    """Whiten advantages over the tokens of the batch; None does so for reinforce, reinforce++."""
    advantage_clip: float | None = None
    """Advantages are clipped to this magnitude, last."""

    def __post_init__(self):
        one_of(KINDS, self, "kind")
        only_read_by(READERS, self)
        one_of(("none", "batch", "group"), self, "baseline")
        one_of(("none", "batch", "group", "running"), self, "reward_norm")
        one_of(KL_ESTIMATORS, self, "kl_estimator")
        at_least(0, self, "kl_coef", "lam")
        at_least(1, self, "kl_horizon")
        for field in ("reward_clip", "advantage_clip", "kl_target"):
            if getattr(self, field) is not None:
                above(0, self, field)
        if not 0 <= self.discount <= 1 or not self.lam <= 1:
            raise ValueError(f"gamma={self.gamma} and lam={self.lam} must lie between 0 and 1")
        self._refuse_idle_kl_options()

    def _refuse_idle_kl_options(self) -> None:
        if self.kl_coef == 0 and (self.kl_estimator != "k1" or self.kl_target is not None):
            raise ValueError(
                f"kl_estimator={self.kl_estimator!r} and kl_target={self.kl_target} are not read "
                "with kl_coef=0; set kl_coef or leave them"
            )
        if self.kl_target is None and self.kl_horizon != 10_000:
            raise ValueError(
                f"kl_horizon={self.kl_horizon} is not read without kl_target; set it or leave this"
            )

    @property
    def discount(self) -> float:
        if self.gamma is not None:
            return self.gamma
        return 0.95 if self.kind == "gigpo" else 1.0

    @property
    def is_whitened(self) -> bool:
        return self.kind in ("reinforce", "reinforce++") if self.whiten is None else self.whiten

    @property
    def compares_samples(self) -> bool:
        """Whether a sample alone in its group has nothing to learn from."""
        return self.kind in BY_SAMPLE or "group" in (self.baseline, self.reward_norm)

    @property
    def needs_state(self) -> bool:
        return self.reward_norm == "running" or self.kl_target is not None


class AdvantageState:
    """What advantages carry from batch to batch; a checkpoint keeps `state_dict()`."""

    def __init__(self, options: AdvantageOptions):
        self.rewards = RunningMoments()
        self.kl = KLController(
            options.kl_coef, target=options.kl_target, horizon=options.kl_horizon
        )
        self.metrics: dict[str, float] = {}
        """Of the last batch: the KL of a token and its coefficient, where rewards include it."""

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {"rewards": self.rewards.state_dict(), "kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        self.rewards.load_state_dict(state["rewards"])
        self.kl.load_state_dict(state["kl"])
