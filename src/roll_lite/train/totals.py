"""Measurements of a step: summed over micro-batches and ranks; those of several updates as one."""

from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

LOSS, ENTROPY, MISMATCH = "loss/loss", "loss/entropy", "mismatch/logprob_mean"
WEIGHT, OBSERVED = "weight", "weight_observed"


class Totals:
    """Accumulates measurements of rows: weighted means, `_max` maxima, and the loss as a sum.

    A mean is over rows that were sampled, or over observed ones if its name ends in `_observed`.
    """

    def __init__(self):
        self._values: dict[str, Tensor] = {}

    def add(
        self, rows: dict[str, Tensor], weights_R: Tensor, observed_R: Tensor | None = None
    ) -> None:
        """Measurements are 0 on the rows that they are not of."""
        is_observed_R = torch.zeros_like(weights_R) if observed_R is None else observed_R.float()
        rows = rows | {WEIGHT: 1 - is_observed_R, OBSERVED: is_observed_R}
        for name, value_R in rows.items():
            if name.endswith("_max"):
                largest = torch.cat([value_R, value_R.new_zeros(1)]).max()
                self._values[name] = torch.maximum(self._values.get(name, largest), largest)
            else:
                self._values[name] = self._values.get(name, 0.0) + (value_R * weights_R).sum()

    def over_ranks(self, group: dist.ProcessGroup) -> dict[str, float]:
        metrics = {}
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            is_max = operation == dist.ReduceOp.MAX
            names = [name for name in self._values if name.endswith("_max") == is_max]
            if names:
                values = torch.stack([self._values[name].float() for name in names])
                dist.all_reduce(values, operation, group=group)
                metrics |= dict(zip(names, values.tolist(), strict=True))
        totals = {False: metrics.pop(WEIGHT), True: metrics.pop(OBSERVED) or 1.0}
        return {
            name: value
            if name == LOSS or name.endswith("_max")
            else value / totals[name.endswith("_observed")]
            for name, value in metrics.items()
        }


def combine(updates: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of several updates of a step as one: times, tokens and skips are summed, `_max`
    is the maximum, a mismatch that of the first update, and others are averaged. Empty without
    updates."""
    result = {}
    for name in updates[0] if updates else ():
        values = [metrics[name] for metrics in updates]
        if name.startswith("mismatch/"):
            result[name] = values[0]
        elif name.startswith("time/") or name in ("loss/skipped_steps", "train/tokens"):
            result[name] = sum(values)
        else:
            result[name] = max(values) if name.endswith("_max") else fmean(values)
    return result


def critic_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """A critic's metrics under names of their own, with the explained variance."""
    renamed = {f"critic/{name.partition('/')[2]}": value for name, value in metrics.items()}
    renamed["time/critic"] = renamed.pop("critic/train")
    variance = renamed["critic/return_square"] - renamed["critic/return"] ** 2
    if variance > 1e-12:  # not all returns are equal
        renamed["critic/explained_variance"] = 1 - renamed["critic/value_error"] / variance
    return renamed
