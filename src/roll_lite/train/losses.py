"""Losses of single tokens, as functions of packed rows. The trainer weighs and sums them.

A loss gets the policy's logprobs and entropies and the micro-batch, and returns the loss of each
row with named per-row measurements. A name that ends in `_max` is reduced by
maximum (of values that are not negative), any other by the rows' weights.

Some losses belong to a sequence, a turn or a pair: each of its rows then has the whole loss, and
aggregation seq_mean_token_mean makes the batch's loss the mean over sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_lite.checks import above
from roll_lite.train.packing import MicroBatch

EQUAL = 1e-12  # returns of a smaller variance are the same number, but for rounding
Measurements = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Measurements]]


def sft_loss(
    logprobs_R: Tensor, entropy_R: Tensor, batch: MicroBatch
) -> tuple[Tensor, Measurements]:
    """Cross-entropy of the targets."""
    return -logprobs_R, {"loss/entropy": entropy_R.detach()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """The critic's 0.5 (V - return)^2, pessimistic about steps of more than `clip` (PPO)."""

    clip: float | None = None

    def __post_init__(self):
        if self.clip is not None:
            above(0, self, "clip")

    def __call__(self, values_R: Tensor, batch: MicroBatch) -> tuple[Tensor, Measurements]:
        """Explained variance is 1 - value_error / (return_square - return^2) of a whole batch."""
        returns_R = required(batch, "returns_R")
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
        with torch.no_grad():
            measurements["loss/value_clip_fraction"] = (clipped_error_R > error_R).float()
        return torch.maximum(error_R, clipped_error_R) / 2, measurements


def critic_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """A critic's metrics under names of its own, with the share of variance that it explains."""
    renamed = {f"critic/{name.partition('/')[2]}": value for name, value in metrics.items()}
    renamed["time/critic"] = renamed.pop("critic/train")
    variance = renamed["critic/return_square"] - renamed["critic/return"] ** 2
    if variance > EQUAL:
        renamed["critic/explained_variance"] = 1 - renamed["critic/value_error"] / variance
    return renamed


def required(batch: MicroBatch, field: str) -> Tensor:
    """A field that the loss cannot do without."""
    value = getattr(batch, field)
    if value is None:
        raise ValueError(
            f"the loss needs {field}, which the batch does not have; "
            f"give every TrainingSequence its {field.rsplit('_', 1)[0]}"
        )
    return value


def sum_rows(values_R: Tensor, part_R: Tensor, num_parts: int) -> Tensor:
    """(parts,): sums over the rows of each sequence or segment."""
    return values_R.new_zeros(num_parts).index_add(0, part_R, values_R)
