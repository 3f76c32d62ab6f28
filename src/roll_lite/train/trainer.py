"""The train role: owns the fp32 masters and the optimizer; one call of `step` is one update."""

import time
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from roll_lite.models.hf import load_model, save_state, stored_dtype
from roll_lite.models.parallel import shard
from roll_lite.train.losses import Loss
from roll_lite.train.packing import MicroBatch


class Trainer:
    def __init__(
        self,
        folder: str | Path,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        compute_dtype: torch.dtype,
        loss: Loss,
        lr: float,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        temperature: float = 1.0,
    ):
        """`temperature` is the one that samples are drawn with, so logprobs mean the same."""
        self.folder, self.device, self.loss = folder, device, loss
        self.lr, self.warmup_steps = lr, warmup_steps
        self.max_grad_norm, self.temperature = max_grad_norm, temperature
        self.num_steps = 0
        model = load_model(folder, device=device, dtype=torch.float32)
        self.config = model.config
        self.model = shard(model, mesh, compute_dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, weight_decay=weight_decay, fused=True
        )

    def step(self, batch: list[MicroBatch]) -> dict[str, float]:
        """Add up the gradient of all micro-batches and update once."""
        start = time.perf_counter()
        totals: dict[str, Tensor] = {}
        for micro in batch:
            micro = micro.to(self.device)
            self._accumulate(totals, self._backward(micro), micro.weights_R)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        grad_norm = grad_norm.full_tensor().item()
        lr = self.lr * min(1.0, (self.num_steps + 1) / (self.warmup_steps + 1))
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        is_finite = grad_norm < float("inf")
        if is_finite:  # an update by inf or nan would destroy the policy: skip it and say so
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return {name: total.item() for name, total in totals.items()} | {
            "loss/grad_norm": grad_norm,
            "loss/lr": lr,
            "loss/skipped_steps": float(not is_finite),
            "time/train": time.perf_counter() - start,
        }

    def _backward(self, micro: MicroBatch) -> dict[str, Tensor]:
        logprobs_R, entropy_R = self._forward(micro)
        loss_R, measurements = self.loss(logprobs_R, entropy_R, micro)
        (loss_R * micro.weights_R).sum().backward()
        return {"loss/loss": loss_R.detach(), **measurements}

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        if micro.max_seqlen > self.config.max_positions:
            raise ValueError(
                f"a sequence of {micro.max_seqlen} tokens exceeds the model's "
                f"{self.config.max_positions} positions"
            )
        return self.model(
            micro.token_ids_T,
            micro.positions_T,
            micro.attention,
            micro.rows_R,
            micro.targets_R,
            self.temperature,
        )

    @torch.no_grad()
    def logprobs(self, batch: list[MicroBatch]) -> list[Tensor]:
        """Logprobs of each micro-batch's targets under the present policy."""
        logprobs = [self._forward(micro.to(self.device))[0] for micro in batch]
        self.model.reshard()  # no backward pass comes to free the gathered root parameters
        return logprobs

    @staticmethod
    def _accumulate(totals: dict[str, Tensor], rows: dict[str, Tensor], weights: Tensor) -> None:
        for name, value_R in rows.items():
            if name.endswith("_max"):
                largest = torch.cat([value_R, value_R.new_zeros(1)]).max()
                totals[name] = torch.maximum(totals.get(name, largest), largest)
            else:
                totals[name] = totals.get(name, 0.0) + (value_R * weights).sum()

    def state(self) -> dict[str, Tensor]:
        """Whole fp32 parameters by name; on one rank they are the live ones."""
        return {name: p.detach().full_tensor() for name, p in self.model.named_parameters()}

    def save(self, folder: str | Path) -> Path:
        """Write a Hugging Face folder in the dtype of the one that training started from."""
        dtype = stored_dtype(self.folder)
        state = {name: tensor.to(dtype) for name, tensor in self.state().items()}
        return save_state(folder, state, self.config, like=self.folder)


def combine(updates: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of several updates as one: times and skips add up, `_max` is a maximum."""
    result = {}
    for name in updates[0]:
        values = [metrics[name] for metrics in updates]
        if name.startswith("time/") or name == "loss/skipped_steps":
            result[name] = sum(values)
        else:
            result[name] = max(values) if name.endswith("_max") else fmean(values)
    return result
