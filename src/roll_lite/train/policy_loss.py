"""Policy-gradient losses of all kinds, with their corrections and penalties.

ppo      Schulman et al. 2017 (1707.06347); dual clip: Ye et al. 2019 (1912.09729)
gspo     Zheng et al. 2025 (2507.18071); segment is the same for each turn
cispo    MiniMax-M1 2025 (2506.13585)
tis      the policy gradient of IMPALA, Espeholt et al. 2018 (1802.01561), token by token
topr     Le Roux et al. 2025 (2503.14286), equation 8
raft++   Xiong et al. 2025 (2504.11343)
kimi     Kimi k1.5 2025 (2501.12599), equation 3
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_lite.checks import above, at_least, one_of, only_read_by
from roll_lite.train.kl import KL_ESTIMATORS, estimate_kl
from roll_lite.train.losses import Measurements, required, sum_rows
from roll_lite.train.packing import MicroBatch

CLIPPED = ("ppo", "gspo", "segment", "raft++", "cispo")
KINDS = (*CLIPPED, "tis", "topr", "kimi", "reinforce")
READERS = {
    "clip_low": CLIPPED,
    "clip_high": CLIPPED,
    "dual_clip": ("ppo",),
    "ratio_cap": ("tis",),
    "tau": ("kimi",),
}
LEVELS = ("none", "token", "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Ratios are to `denominator`: the behaviour policy, or the trainer's own before the update."""

    kind: str = "ppo"
    """ppo, gspo, segment, cispo, tis, topr, raft++, kimi or reinforce."""
    clip_low: float = 0.2
    """Ratios are clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """Ratios are clipped above 1 + clip_high."""
    dual_clip: float | None = None
    """ppo: where the advantage is negative, the loss is at most this times its magnitude."""
    ratio_cap: float = 1.0
    """tis: importance weights are at most this."""
    tau: float = 0.1
    """kimi: strength of the pull towards the denominator."""
    denominator: str = "behaviour"
    """behaviour, or old: logprobs computed again by the trainer (old_logprobs)."""
    correction: str = "none"
    """With denominator old: weigh by min(old / behaviour, correction_cap) of token or sequence."""
    correction_cap: float = 2.0
    rejection: str = "none"
    """With denominator old: rows whose old / behaviour is outside the band add 0. Same levels."""
    rejection_low: float = 0.5
    rejection_high: float = 2.0
    kl_coef: float = 0.0
    """Of the KL to the reference; 0 needs no reference."""
    kl_estimator: str = "k3"
    """k1 (whose gradient ignores the reference), k2 or k3."""
    entropy_coef: float = 0.0
    """Of the entropy bonus."""

    def __post_init__(self):
        one_of(KINDS, self, "kind")
        only_read_by(READERS, self)
        one_of(("behaviour", "old"), self, "denominator")
        one_of(LEVELS, self, "correction", "rejection")
        one_of(KL_ESTIMATORS, self, "kl_estimator")
        at_least(0, self, "clip_low", "clip_high", "kl_coef", "entropy_coef", "rejection_low")
        above(0, self, "ratio_cap", "tau", "correction_cap")
        above(self.rejection_low, self, "rejection_high")
        if self.dual_clip is not None:
            above(1, self, "dual_clip")
        self._refuse_idle_options()

    def _refuse_idle_options(self) -> None:
        if self.denominator != "old" and (self.correction, self.rejection) != ("none", "none"):
            raise ValueError(
                f"correction={self.correction!r} and rejection={self.rejection!r} compare old with "
                f"behaviour logprobs; denominator={self.denominator!r} already is the behaviour "
                "policy: set denominator='old'"
            )
        if self.correction == "none" and self.correction_cap != 2.0:
            raise ValueError(
                f"correction_cap={self.correction_cap} is not read with correction='none'; "
                "set correction to token or sequence"
            )
        if self.rejection == "none" and (self.rejection_low, self.rejection_high) != (0.5, 2.0):
            raise ValueError(
                f"rejection_low={self.rejection_low} and rejection_high={self.rejection_high} are "
                "not read with rejection='none'; set rejection to token or sequence"
            )
        if self.kl_coef == 0 and self.kl_estimator != "k3":
            raise ValueError(
                f"kl_estimator={self.kl_estimator!r} is not read with kl_coef=0; set kl_coef"
            )

    def __call__(
        self, logprobs_R: Tensor, entropy_R: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Measurements]:
        is_old = self.denominator == "old"
        denominator_R = required(batch, "old_logprobs_R" if is_old else "logprobs_R")
        delta_R = logprobs_R - denominator_R
        loss_R, measurements = self._policy_loss(logprobs_R, delta_R, batch)
        measurements["loss/entropy"] = entropy_R
        if is_old and batch.logprobs_R is not None:
            measurements |= _mismatch(denominator_R - batch.logprobs_R)
        elif not is_old:
            measurements |= _mismatch(delta_R)
        if self.correction != "none":
            log_weight_R = self._off_policy(batch, self.correction)
            loss_R = loss_R * log_weight_R.clamp(max=math.log(self.correction_cap)).exp()
        if self.kl_coef:
            reference_R = required(batch, "reference_logprobs_R")
            kl_R = estimate_kl(logprobs_R, reference_R, self.kl_estimator)
            loss_R = loss_R + self.kl_coef * kl_R
            measurements["loss/kl"] = kl_R
        if self.entropy_coef:
            loss_R = loss_R - self.entropy_coef * entropy_R
        if self.rejection != "none":
            rejected_R = self._rejected(batch)
            loss_R = torch.where(rejected_R, 0.0, loss_R)
            measurements["loss/rejected"] = rejected_R.float()
        return loss_R, {name: value_R.detach() for name, value_R in measurements.items()}

    def _policy_loss(
        self, logprobs_R: Tensor, delta_R: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Measurements]:
        advantages_R = required(batch, "advantages_R")
        if self.kind == "kimi":
            return self._kimi(delta_R, advantages_R, batch), _ratio(delta_R.exp())
        if self.kind in ("gspo", "segment"):
            delta_R = self._mean_over_part(delta_R, batch)
        ratio_R = delta_R.exp()
        if self.kind in ("ppo", "gspo", "segment", "raft++"):
            loss_R, is_clipped_R = self._clipped(ratio_R, advantages_R)
        else:
            weight_R, is_clipped_R = self._weight(delta_R.detach(), advantages_R, batch)
            loss_R = -weight_R * advantages_R * logprobs_R
        return loss_R, _ratio(ratio_R) | {"loss/clip_fraction": is_clipped_R.float()}

    def _clipped(self, ratio_R: Tensor, advantages_R: Tensor) -> tuple[Tensor, Tensor]:
        """max(-ratio * A, -clip(ratio) * A). raft++ learns from positives only, all alike.

        The paper's positives are the right answers: advantage reinforce without whitening. Others
        leave out groups that are all right, as their advantages are 0.
        """
        if self.kind == "raft++":
            advantages_R = (advantages_R > 0).to(ratio_R.dtype)
        unclipped_R = -ratio_R * advantages_R
        clipped_R = -ratio_R.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages_R
        loss_R, is_clipped_R = torch.maximum(unclipped_R, clipped_R), clipped_R > unclipped_R
        if self.dual_clip is None:
            return loss_R, is_clipped_R
        bound_R = torch.where(advantages_R < 0, -self.dual_clip * advantages_R, math.inf)
        return torch.minimum(loss_R, bound_R), is_clipped_R | (bound_R < loss_R)

    def _weight(
        self, delta_R: Tensor, advantages_R: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        """The detached weight of A log p, and where a bound decided it."""
        if self.kind == "reinforce":
            return torch.ones_like(delta_R), torch.zeros_like(delta_R)
        if self.kind == "topr":  # of trajectories, so seq_mean_token_sum is the paper's sum
            log_ratio_R = _sum_over_sequence(delta_R, batch)
            is_negative_R = advantages_R < 0
            weight_R = torch.where(is_negative_R, log_ratio_R.clamp(max=0).exp(), 1.0)
            return weight_R, is_negative_R & (log_ratio_R > 0)
        ratio_R = delta_R.exp()
        low, high = 0.0, self.ratio_cap
        if self.kind == "cispo":
            low, high = 1 - self.clip_low, 1 + self.clip_high
        return ratio_R.clamp(low, high), (ratio_R < low) | (ratio_R > high)

    def _kimi(self, delta_R: Tensor, advantages_R: Tensor, batch: MicroBatch) -> Tensor:
        """(A - tau log ratio)^2 / (2 tau) of the sequence, whose gradient is the paper's:

        -(A grad log p - tau / 2 grad (log ratio)^2), with A the reward minus the group's mean.
        """
        error_R = advantages_R - self.tau * _sum_over_sequence(delta_R, batch)
        return error_R.square() / (2 * self.tau)

    def _mean_over_part(self, delta_R: Tensor, batch: MicroBatch) -> Tensor:
        """The log ratio of a row's sequence (gspo) or turn (segment), normalised by length."""
        part_R, num_parts = batch.sequence_R, batch.num_sequences
        if self.kind == "segment":
            part_R, num_parts = batch.segment_R, batch.num_segments
        counts = sum_rows(torch.ones_like(delta_R), part_R, num_parts)
        return (sum_rows(delta_R, part_R, num_parts) / counts.clamp(min=1))[part_R]

    def _off_policy(self, batch: MicroBatch, level: str) -> Tensor:
        """log(old / behaviour) of each row, or of its whole sequence."""
        delta_R = required(batch, "old_logprobs_R") - required(batch, "logprobs_R")
        return _sum_over_sequence(delta_R, batch) if level == "sequence" else delta_R

    def _rejected(self, batch: MicroBatch) -> Tensor:
        ratio_R = self._off_policy(batch, self.rejection).exp()
        return (ratio_R < self.rejection_low) | (ratio_R > self.rejection_high)


def _sum_over_sequence(values_R: Tensor, batch: MicroBatch) -> Tensor:
    return sum_rows(values_R, batch.sequence_R, batch.num_sequences)[batch.sequence_R]


def _ratio(ratio_R: Tensor) -> Measurements:
    return {"loss/ratio": ratio_R, "loss/ratio_max": ratio_R}


def _mismatch(delta_R: Tensor) -> Measurements:
    """How far the trainer's logprobs are from those that were sampled with."""
    return {
        "mismatch/logprob_mean": delta_R.abs(),
        "mismatch/logprob_max": delta_R.abs(),
        "mismatch/k3": delta_R.expm1() - delta_R,
        "mismatch/outside": ((delta_R < -math.log(2)) | (delta_R > math.log(2))).float(),
    }
