"""Losses of single tokens: the policy losses, and those of supervised training and of the critic.

A policy loss of your own is a function named in LOSSES, of this file or of one given with
--code. It reads, for each row (a token that carries loss) of a packed micro-batch,

    logprobs_R      of the policy that is trained
    delta_R         logprobs_R minus the logprobs before the update: the log of the ratio
    advantages_R
    batch           everything else, such as the sequence of each row

and returns the loss of each row, alone or with named measurements of rows. Keyword-only parameters
are its options on the command line; what else the loop must know of it, LossFacts say above the
function. The trainer weighs the rows and adds them up; a measurement whose name ends in `_max` is
reduced by maximum (of values that are not negative), any other by the rows' weights.

A loss with @LossFacts(reads_observations=True) also gets rows for the tokens that the environment
wrote between the model's turns, where `batch.observed_R` is True. Their weights add up apart from
those of sampled rows; all their numbers but `logprobs_R` are 0, `delta_R` too. Corrections, KL,
entropy and measurements are of sampled rows alone, except for a measurement whose name ends in
`_observed`, which is of the others.

Some losses belong to a sample (papers say sequence) or a turn: each of its rows then has the whole
loss, and the aggregation seq_mean_token_mean makes the batch's loss the mean over samples.

Tensors come as arguments and are changed by their methods: the options are read without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn

from typing_extensions import Doc

from roll_lite.checks import Above, AtLeast, UserError, above, at_least, read_only_if
from roll_lite.options import Argument, FunctionOptions, facts_of, name_of, where
from roll_lite.train.kl import NO_KL, KLOptions
from roll_lite.train.sequences import AGGREGATIONS, check_aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from roll_lite.train.batch import MicroBatch

Measurements = dict[str, "Tensor"]
LossResult = tuple["Tensor", Measurements]
Loss = Callable[["Tensor", "Tensor", "MicroBatch"], LossResult]
"""From the policy's logprobs, their entropies and the micro-batch to the loss of each row."""

ClipLow = Annotated[float, Doc("Probability ratios are clipped below 1 - clip_low."), AtLeast(0)]
ClipHigh = Annotated[float, Doc("Probability ratios are clipped above 1 + clip_high."), AtLeast(0)]
DualClip = Annotated[
    float | None, Doc("Upper bound of the loss where A < 0, as a multiple of |A|."), Above(1)
]
RatioCap = Annotated[float, Doc("Importance weights are at most this."), Above(0)]
Tau = Annotated[float, Doc("Strength of the pull towards the policy that sampled."), Above(0)]


@dataclass(frozen=True, kw_only=True)
class LossFacts:
    """What the loop must know of a policy loss, said above it: @LossFacts(by_sequence=True)."""

    by_sequence: bool = False
    """It has one ratio and one advantage per sequence, all of whose rows come together."""
    aggregation: str = "token_mean"
    """How tokens are averaged, unless --aggregation says otherwise."""
    advantage_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Other defaults of the estimator's options, where the estimator has them."""
    reads_observations: bool = False
    """It wants rows for the tokens that the environment wrote, too: batch.observed_R."""

    def __call__(self, loss: Callable) -> Callable:
        loss.facts = self
        return loss


NO_FACTS = LossFacts()


def ppo(
    logprobs_R,
    delta_R,
    advantages_R,
    batch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: DualClip = None,
):
    """max(-ratio A, -clip(ratio) A): Schulman et al. 2017 (1707.06347).

    Dual clip: Ye et al. 2019 (1912.09729).
    """
    return _clipped(delta_R.exp(), advantages_R, clip_low, clip_high, dual_clip)


@LossFacts(by_sequence=True, aggregation="seq_mean_token_mean")
def gspo(
    logprobs_R, delta_R, advantages_R, batch,
    *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4,
):  # fmt: skip
    """PPO with one ratio per sequence, normalised by its length: Zheng et al. 2025 (2507.18071).

    Such a ratio stays close to 1, so the paper's clips are much tighter than PPO's.
    """
    ratio_R = _mean_over(delta_R, batch, batch.sample_R, batch.num_samples).exp()
    return _clipped(ratio_R, advantages_R, clip_low, clip_high)


def segment(
    logprobs_R, delta_R, advantages_R, batch, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2
):
    """PPO with one ratio per turn, normalised by its length."""
    ratio_R = _mean_over(delta_R, batch, batch.segment_R, batch.num_segments).exp()
    return _clipped(ratio_R, advantages_R, clip_low, clip_high)


def raft_plus_plus(
    logprobs_R, delta_R, advantages_R, batch, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2
):
    """PPO on samples with a positive advantage, all weighted alike: Xiong et al. 2025 (2504.11343).

    The paper's positives are the right answers: use advantage reinforce without whitening. Group
    advantages are 0 where a whole group is right, which leaves such groups out.
    """
    is_positive_R = (advantages_R > 0).to(delta_R.dtype)
    return _clipped(delta_R.exp(), is_positive_R, clip_low, clip_high)


def cispo(
    logprobs_R, delta_R, advantages_R, batch, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2
):
    """The clipped, detached ratio as a weight of A log p: MiniMax-M1 2025 (2506.13585)."""
    ratio_R = delta_R.detach().exp()
    low, high = 1 - clip_low, 1 + clip_high
    is_clipped_R = (ratio_R < low) | (ratio_R > high)
    loss_R = -ratio_R.clamp(low, high) * advantages_R * logprobs_R
    return loss_R, _ratios(ratio_R, is_clipped_R)


def tis(logprobs_R, delta_R, advantages_R, batch, *, ratio_cap: RatioCap = 1.0):
    """Truncated importance sampling, token by token: IMPALA, Espeholt et al. 2018 (1802.01561)."""
    ratio_R = delta_R.detach().exp()
    loss_R = -ratio_R.clamp(0.0, ratio_cap) * advantages_R * logprobs_R
    return loss_R, _ratios(ratio_R, ratio_R > ratio_cap)


@LossFacts(by_sequence=True, aggregation="seq_mean_token_sum")
def topr(logprobs_R, delta_R, advantages_R, batch):
    """Positives with weight 1, negatives with the sequence's ratio, at most 1.

    Le Roux et al. 2025 (2503.14286), equation 8; aggregation seq_mean_token_sum is the paper's sum.
    """
    delta_R = delta_R.detach()
    log_ratio_R = _sum_over_sample(delta_R, batch)
    is_negative_R = advantages_R < 0
    weight_R = log_ratio_R.clamp(max=0).exp().where(is_negative_R, 1.0)
    loss_R = -weight_R * advantages_R * logprobs_R
    return loss_R, _ratios(delta_R.exp(), is_negative_R & (log_ratio_R > 0))


@LossFacts(
    by_sequence=True,
    aggregation="seq_mean_token_mean",
    advantage_defaults={"divide_by_std": False},
)
def kimi(logprobs_R, delta_R, advantages_R, batch, *, tau: Tau = 0.1):
    """(A - tau log ratio)^2 / (2 tau) of the sequence: Kimi k1.5 2025 (2501.12599), equation 3.

    Its gradient is the paper's, -(A grad log p - tau / 2 grad (log ratio)^2), where A is the reward
    minus the group's mean.
    """
    error_R = advantages_R - tau * _sum_over_sample(delta_R, batch)
    ratio_R = delta_R.detach().exp()
    return error_R.square() / (2 * tau), {"policy/ratio": ratio_R, "policy/ratio_max": ratio_R}


def reinforce(logprobs_R, delta_R, advantages_R, batch):
    """The plain policy gradient, -A log p."""
    ratio_R = delta_R.detach().exp()
    return -advantages_R * logprobs_R, _ratios(ratio_R, ratio_R.new_zeros(len(ratio_R)))


LOSSES: dict[str, Callable[..., LossResult]] = {
    "ppo": ppo,
    "gspo": gspo,
    "segment": segment,
    "raft++": raft_plus_plus,
    "cispo": cispo,
    "tis": tis,
    "topr": topr,
    "kimi": kimi,
    "reinforce": reinforce,
}


@dataclass(frozen=True, kw_only=True)
class LossOptions(FunctionOptions):
    """Policy loss: which function, how tokens are averaged, corrections for stale logprobs."""

    loss: str = "ppo"
    """Policy loss: how advantages change the policy."""
    aggregation: Literal[AGGREGATIONS] | None = None
    """How the loss of tokens is averaged; left open, as the loss says."""
    constant: float | None = None
    """seq_mean_token_sum_const: the divisor of sums, such as the longest reply (Dr. GRPO)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    denominator: Literal["behaviour", "old"] = "behaviour"
    """Denominator of ratios: the engine's logprobs (behaviour), or the trainer's own before the
    first update (old)."""
    correction: Literal["none", "token", "sequence"] = "none"
    """denominator=old: weigh the loss by old / behaviour of each token or sequence."""
    correction_cap: Argument[float] = 2.0
    """Largest weight of the correction."""
    rejection: Literal["none", "token", "sequence"] = "none"
    """denominator=old: leave out each token or sequence with old / behaviour below 0.5 or above 2,
    or what rejection_low and rejection_high are in the recipe."""
    rejection_low: Argument[float] = 0.5
    """Smallest old / behaviour that rejection leaves in."""
    rejection_high: Argument[float] = 2.0
    """Largest old / behaviour that rejection leaves in."""

    TABLE: ClassVar = LOSSES
    CHOICE: ClassVar = "loss"

    def __post_init__(self):
        self.check_function()
        check_aggregation(self.chosen_aggregation, self.constant)
        at_least(0, self, "entropy_coef", "rejection_low")
        above(0, self, "correction_cap")
        above(self.rejection_low, self, "rejection_high")
        is_old = self.denominator == "old"
        read_only_if(is_old, "denominator='old'", self, "correction", "rejection")

    @property
    def facts(self) -> LossFacts:
        return facts_of(self.chosen, NO_FACTS)

    @property
    def open_defaults(self) -> dict[str, Any]:
        """What the loss says of options that are left open."""
        return {"aggregation": self.facts.aggregation}

    @property
    def pack_options(self) -> dict[str, Any]:
        """How batches for this loss are packed. Where a token's loss depends on its whole sample,
        which may be several sequences, they stay together."""
        reads_samples = self.facts.by_sequence or "sequence" in (self.correction, self.rejection)
        return {
            "aggregation": self.chosen_aggregation,
            "constant": self.constant,
            "by_sample": reads_samples,
        }

    @property
    def chosen_aggregation(self) -> str:
        return self.aggregation or self.facts.aggregation


@dataclass(frozen=True)
class PolicyLoss:
    """The chosen policy loss with its corrections, KL and entropy, as the trainer calls it."""

    options: LossOptions = LossOptions()
    kl: KLOptions = NO_KL
    function: Callable[..., LossResult | Tensor] | None = None
    """One of your own, instead of that which the options name; it may return the loss alone."""

    def __call__(self, logprobs_R: Tensor, entropy_R: Tensor, batch: MicroBatch) -> LossResult:
        options = self.options
        is_old = options.denominator == "old"
        denominator_R = required(batch, "old_logprobs_R" if is_old else "logprobs_R")
        delta_R = sampled_only(logprobs_R - denominator_R, batch)
        entropy_R = sampled_only(entropy_R, batch)
        function = self.function or options.function
        found = function(logprobs_R, delta_R, required(batch, "advantages_R"), batch)
        is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
        loss_R, measurements = found if is_pair else (found, {})
        for name, rows in {"its loss": loss_R, **measurements}.items():
            if getattr(rows, "shape", None) != logprobs_R.shape:
                self._refuse(name, rows, len(logprobs_R))
        measurements["loss/entropy"] = entropy_R
        measurements |= _movement(delta_R)
        if is_old and batch.logprobs_R is not None:
            measurements |= _mismatch(denominator_R - batch.logprobs_R)
        elif not is_old:
            measurements |= _mismatch(delta_R)
        if options.correction != "none":
            log_weight_R = _off_policy(batch, options.correction)
            loss_R = loss_R * log_weight_R.clamp(max=math.log(options.correction_cap)).exp()
        if self.kl.is_in("loss"):
            reference_R = required(batch, "reference_logprobs_R")
            kl_R = self.kl.estimate(sampled_only(logprobs_R, batch), reference_R)
            loss_R = loss_R + self.kl.kl_coef * kl_R
            measurements["loss/kl"] = kl_R
        if options.entropy_coef:
            loss_R = loss_R - options.entropy_coef * entropy_R
        if options.rejection != "none":
            ratio_R = _off_policy(batch, options.rejection).exp()
            rejected_R = (ratio_R < options.rejection_low) | (ratio_R > options.rejection_high)
            rejected_R = sampled_only(rejected_R, batch)
            loss_R = loss_R.masked_fill(rejected_R, 0.0)
            measurements["loss/rejected"] = rejected_R.float()
        return loss_R, {n: _own_rows(n, v.detach(), batch) for n, v in measurements.items()}

    def _refuse(self, name: str, rows: Any, num_rows: int) -> NoReturn:
        own = self.function or self.options.chosen
        shape = getattr(rows, "shape", None)
        what = f"a {type(rows).__name__}" if shape is None else f"shape {tuple(shape)}"
        raise UserError(
            f"{where(own)}: {name_of(own)} returned {what} as {name}, not a tensor of shape "
            f"({num_rows},): return one number per row; the trainer averages"
        )


def sft_loss(logprobs_R: Tensor, entropy_R: Tensor, batch: MicroBatch) -> LossResult:
    """Cross-entropy of the targets."""
    return -logprobs_R, {"loss/entropy": entropy_R.detach()}


@dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """The critic of advantage gae."""

    critic_lr: float | None = None
    """Learning rate of the critic, which starts as the model with a value head of zeros; None
    chooses by the model's size."""
    value_clip: Argument[float | None] = None
    """A value gains nothing by moving further than this in one step (PPO)."""
    critic_warmup_steps: Argument[int] = 0
    """Steps at the start that train the critic alone."""

    def __post_init__(self):
        at_least(0, self, "critic_lr", "critic_warmup_steps")
        above(0, self, "value_clip")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """The critic's 0.5 (V - return)^2, pessimistic about changes of more than `clip` (PPO)."""

    clip: float | None = None

    def __post_init__(self):
        above(0, self, "clip")

    def __call__(self, values_R: Tensor, batch: MicroBatch) -> LossResult:
        """Explained variance is 1 - value_error / (return_square - return^2) of a whole batch."""
        returns_R = required(batch, "returns_R")
        values_R = sampled_only(values_R, batch)
        error_R = (values_R - returns_R).square()
        measurements = {
            "loss/value": values_R.detach(),
            "loss/value_error": error_R.detach(),
            "loss/return": returns_R,
            "loss/return_square": returns_R.square(),
        }
        if self.clip is None:
            return error_R / 2, measurements
        old_R = required(batch, "values_R")
        clipped_R = old_R + (values_R - old_R).clamp(-self.clip, self.clip)
        clipped_error_R = (clipped_R - returns_R).square()
        measurements["loss/value_clip_fraction"] = (clipped_error_R > error_R).float()
        return error_R.maximum(clipped_error_R) / 2, measurements


def required(batch: MicroBatch, field: str) -> Tensor:
    """A field of the batch; an error where the batch lacks it."""
    value = getattr(batch, field)
    if value is None:
        raise UserError(
            f"the loss needs {field}, which the batch does not have; "
            f"give every TrainingSequence its {field.rsplit('_', 1)[0]}"
        )
    return value


def sampled_only(values_R: Tensor, batch: MicroBatch) -> Tensor:
    """0 on the rows of tokens that the environment wrote."""
    return values_R if batch.observed_R is None else values_R.masked_fill(batch.observed_R, 0)


def _own_rows(name: str, values_R: Tensor, batch: MicroBatch) -> Tensor:
    """A measurement, 0 on the rows that it is not of."""
    if name.endswith("_observed") and batch.observed_R is not None:
        return values_R.masked_fill(~batch.observed_R, 0)
    return sampled_only(values_R, batch)


def sum_rows(values_R: Tensor, part_R: Tensor, num_parts: int) -> Tensor:
    """(parts,): sums over the rows of each sequence or segment."""
    return values_R.new_zeros(num_parts).index_add(0, part_R, values_R)


def _sum_over_sample(values_R: Tensor, batch: MicroBatch) -> Tensor:
    return sum_rows(values_R, batch.sample_R, batch.num_samples)[batch.sample_R]


def _mean_over(delta_R: Tensor, batch: MicroBatch, part_R: Tensor, num_parts: int) -> Tensor:
    """(R,): the mean over the sampled rows of each row's sequence or segment."""
    counts = sum_rows(sampled_only(delta_R.new_ones(len(delta_R)), batch), part_R, num_parts)
    return (sum_rows(delta_R, part_R, num_parts) / counts.clamp(min=1))[part_R]


def _clipped(
    ratio_R: Tensor,
    advantages_R: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossResult:
    """max(-ratio A, -clip(ratio) A); where A < 0, at most `dual_clip` times |A|."""
    unclipped_R = -ratio_R * advantages_R
    clipped_R = -ratio_R.clamp(1 - clip_low, 1 + clip_high) * advantages_R
    loss_R = unclipped_R.maximum(clipped_R)
    is_clipped_R = clipped_R > unclipped_R
    if dual_clip is not None:
        bound_R = (-dual_clip * advantages_R).where(advantages_R < 0, math.inf)
        is_clipped_R = is_clipped_R | (bound_R < loss_R)
        loss_R = loss_R.minimum(bound_R)
    return loss_R, _ratios(ratio_R, is_clipped_R)


def _off_policy(batch: MicroBatch, level: str) -> Tensor:
    """log(old / behaviour) of each row, or of its whole sequence."""
    delta_R = required(batch, "old_logprobs_R") - required(batch, "logprobs_R")
    if level == "sequence":
        delta_R = sampled_only(_sum_over_sample(delta_R, batch), batch)
    return delta_R


def _ratios(ratio_R: Tensor, is_clipped_R: Tensor) -> Measurements:
    return {
        "policy/ratio": ratio_R,
        "policy/ratio_max": ratio_R,
        "policy/clip_fraction": is_clipped_R.float(),
    }


def _movement(delta_R: Tensor) -> Measurements:
    """How far the policy is from the denominator of its ratios."""
    return {"policy/kl": delta_R.expm1() - delta_R, "policy/outside": _is_outside(delta_R)}


def _mismatch(delta_R: Tensor) -> Measurements:
    """How far the trainer's logprobs are from those of the engine that sampled; of the updates of a
    step `combine` keeps the first, before which the policy has not moved."""
    return {
        "mismatch/logprob_mean": delta_R.abs(),
        "mismatch/logprob_max": delta_R.abs(),
        "mismatch/k3": delta_R.expm1() - delta_R,
        "mismatch/outside": _is_outside(delta_R),
    }


def _is_outside(delta_R: Tensor) -> Tensor:
    """1 where a token is more than twice or less than half as likely."""
    return ((delta_R < -math.log(2)) | (delta_R > math.log(2))).float()
