"""How evenly a step's tokens are spread over experts, and the loss that spreads them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from roll_lite.checks import UserError
from roll_lite.cluster.places import Place
from roll_lite.models.mlp import Experts
from roll_lite.train.batch import MicroBatch


class Balance:
    """Counts the tokens of every expert of a model, and sets the slope of the balancing loss.

    The loss is that of Switch Transformers (Fedus et al., 2021): E * sum over experts of the share
    of tokens that an expert has, times its mean probability. It is taken over a micro-batch and
    averaged over sparse layers; micro-batches count by their tokens. With cp each rank's part is a
    micro-batch of its own.
    """

    def __init__(self, model: nn.Module, coefficient: float, place: Place):
        self._layers = [module for module in model.modules() if isinstance(module, Experts)]
        if coefficient and not self._layers:
            raise UserError(
                f"balance_coef={coefficient} is for mixtures of experts, and this model has none; "
                "leave it out"
            )
        self._coefficient = coefficient
        self._place = place
        self._slope = 0.0

    def start(self, batch: Sequence[MicroBatch]) -> None:
        """A step begins. A collective call where there is a loss."""
        for experts in self._layers:
            size = experts.config.num_experts
            experts.counts_E = torch.zeros(size, dtype=torch.int64, device=self._place.device)
        if self._coefficient:
            num_tokens = sum(len(micro.token_ids_T) for micro in batch if micro.num_sequences)
            total = torch.tensor(float(num_tokens), device=self._place.device)
            dist.all_reduce(total, group=self._place.mesh["dp"].get_group())
            # All tensor-parallel ranks add the whole gradient, and theirs are summed.
            shares = total.item() * len(self._layers) * self._place.tp
            self._slope = self._coefficient / shares

    @contextmanager
    def of(self, micro: MicroBatch) -> Iterator[None]:
        """Forward and backward of a micro-batch; an idle one does not count."""
        for experts in self._layers:
            experts.balance = self._slope if micro.num_sequences else None
        try:
            yield
        finally:
            for experts in self._layers:
                experts.balance = None

    def metrics(self) -> dict[str, float]:
        """A collective call."""
        if not self._layers:
            return {}
        counts_LE = torch.stack([experts.counts_E for experts in self._layers])
        dist.all_reduce(counts_LE, group=self._place.group)  # those of a tensor-parallel group too
        load_L = counts_LE.max(1).values / counts_LE.double().mean(1).clamp(min=1e-9)
        return {"train/expert_load": load_L.mean().item()}
