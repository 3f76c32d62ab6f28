"""Losses of single tokens, as functions of packed rows. The trainer weighs and sums them.

A loss gets the policy's logprobs and entropies and the micro-batch, and returns the loss of each
row with named per-row measurements. A name that ends in `_max` is reduced by
maximum (of values that are not negative), any other by the rows' weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from roll_lite.train.packing import MicroBatch

Measurements = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Measurements]]


def sft_loss(
    logprobs_R: Tensor, entropy_R: Tensor, batch: MicroBatch
) -> tuple[Tensor, Measurements]:
    """Cross-entropy of the targets."""
    return -logprobs_R, {"loss/entropy": entropy_R.detach()}


def ppo_loss(
    logprobs_R: Tensor,
    entropy_R: Tensor,
    batch: MicroBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, Measurements]:
    """max(-ratio * A, -clip(ratio, 1 - low, 1 + high) * A), ratio to the behaviour policy."""
    delta_R = logprobs_R - batch.logprobs_R
    ratio_R = delta_R.exp()
    unclipped_R = -ratio_R * batch.advantages_R
    clipped_R = -ratio_R.clamp(1 - clip_low, 1 + clip_high) * batch.advantages_R
    with torch.no_grad():
        measurements = {
            "loss/clip_fraction": (clipped_R > unclipped_R).float(),
            "loss/entropy": entropy_R,
            "mismatch/logprob_mean": delta_R.abs(),
            "mismatch/logprob_max": delta_R.abs(),
            "mismatch/k3": ratio_R - 1 - delta_R,
        }
    return torch.maximum(unclipped_R, clipped_R), measurements
