"""KL divergence from the policy to a reference model: options, estimates, adaptive coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from roll_lite.checks import UserError, above, at_least, check_choices, read_only_if
from roll_lite.options import Argument

if TYPE_CHECKING:
    from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, kw_only=True)
class KLOptions:
    """KL penalty to a reference model."""

    kl_coef: float = 0.0
    """Weight of the KL to the reference; with 0 it is measured if `reference` is given."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL to the reference counts: added to the loss, or taken off the reward."""
    kl_estimator: Literal[KL_ESTIMATORS] | None = None
    """Estimate of the KL from sampled tokens; left open, k3 in the loss and k1 in the reward."""
    reference: str | None = None
    """Hugging Face folder of the reference; None is the starting model, if kl_coef is above 0. With
    a kl_coef of 0 the KL to this reference is only measured."""
    kl_target: Argument[float | None] = None
    """kl_in=reward: adapt kl_coef so that the KL of a sample stays near this value."""
    kl_horizon: Argument[int] = 10_000
    """kl_target: number of samples over which kl_coef adapts."""

    def __post_init__(self):
        check_choices(self)
        at_least(0, self, "kl_coef")
        at_least(1, self, "kl_horizon")
        above(0, self, "kl_target")
        read_only_if(self.kl_coef > 0, "kl_coef above 0", self, "kl_in", "kl_estimator")

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0 or self.reference is not None

    @property
    def open_defaults(self) -> dict[str, Any]:
        """What stands for options that are left open."""
        return {"kl_estimator": self.chosen_estimator} if self.kl_coef else {}

    @property
    def chosen_estimator(self) -> str:
        return self.kl_estimator or ("k3" if self.kl_in == "loss" else "k1")

    def is_in(self, place: Literal["loss", "reward"]) -> bool:
        return self.kl_coef > 0 and self.kl_in == place

    def estimate(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        return estimate_kl(logprobs, reference_logprobs, self.chosen_estimator)


NO_KL = KLOptions()


def estimate_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """KL(policy, reference) of tokens sampled from the policy (Schulman's k1, k2, k3).

    In a loss, the gradient of k1 does not depend on the reference; use k2 or k3 there.
    """
    delta = logprobs - reference_logprobs
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return delta.square() / 2
    if estimator == "k3":
        return (-delta).expm1() + delta
    raise UserError(f"estimator={estimator!r} is not known; use one of {', '.join(KL_ESTIMATORS)}")


class KLController:
    """The coefficient of a KL penalty: fixed, or adapted to a target (Ziegler et al. 2019).

    With a target, each update multiplies it by 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon.
    """

    def __init__(self, coef: float, *, target: float | None = None, horizon: int = 10_000):
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """`kl` is summed over the tokens of a sample and averaged over samples."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.target is not None:  # else it is an option, which may have changed
            self.coef = state["coef"]
