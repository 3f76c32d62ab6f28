"""How far the policy is from a reference: per-token estimates, and a coefficient that adapts."""

from torch import Tensor

from roll_lite.checks import above, at_least

KL_ESTIMATORS = ("k1", "k2", "k3")


def estimate_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """KL(policy, reference) from tokens that the policy sampled (Schulman's k1, k2, k3)."""
    delta = logprobs - reference_logprobs
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return delta.square() / 2
    if estimator == "k3":
        return (-delta).expm1() + delta
    raise ValueError(f"estimator={estimator!r} is not known; use one of {', '.join(KL_ESTIMATORS)}")


class KLController:
    """The coefficient of a KL penalty: fixed, or led to a target (Ziegler et al. 2019).

    With a target, each update multiplies it by 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon.
    """

    def __init__(self, coef: float, *, target: float | None = None, horizon: int = 10_000):
        self.coef, self.target, self.horizon = coef, target, horizon
        at_least(0, self, "coef")
        at_least(1, self, "horizon")
        if target is not None:
            above(0, self, "target")

    def update(self, kl: float, num_samples: int) -> None:
        """`kl`: mean over the samples of the sum over a sample's tokens."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
