"""How a model is optimised: options, learning-rate schedule, AdamW over shards."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from roll_lite.checks import above, at_least, check_choices, unread_with
from roll_lite.models.lora import TARGETS, lora_options
from roll_lite.train.offload import local

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Optimizer, memory and LoRA."""

    lr: float | None = None
    """Learning rate after warm-up; None chooses by the model's size, and prints it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up; linear and cosine end at 0."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to lr."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    tokens_per_microbatch: int = 16384
    """Tokens of one forward and backward pass: more is faster and takes more memory."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes instead of keeping."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of AdamW's moments."""
    lora_rank: int = 0
    """Train LoRA adapters of this rank instead of all weights; 0 is off."""
    lora_alpha: float = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = tuple(TARGETS)
    """Projections that get adapters."""

    def __post_init__(self):
        at_least(0, self, "warmup_steps", "lr", "lora_rank")
        at_least(1, self, "tokens_per_microbatch")
        above(0, self, "max_grad_norm")
        check_choices(self)
        if self.lora_rank == 0:
            unread_with("lora_rank=0", self, "lora_alpha", "lora_targets")
        _ = self.policy_options  # refuses unknown adapters

    def schedule_over(self, num_steps: int, lr: float | None = None) -> "Schedule":
        """The learning rates of a run of `num_steps` steps."""
        return Schedule(
            lr=self.lr if lr is None else lr,
            warmup_steps=self.warmup_steps,
            kind=self.schedule,
            num_steps=max(1, num_steps),
        )

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Keyword arguments of any Trainer."""
        return {
            "max_grad_norm": self.max_grad_norm,
            "checkpointing": self.checkpointing,
            "moments": self.moments,
        }

    @property
    def memory_options(self) -> dict[str, Any]:
        """Keyword arguments of `train_memory` in models/memory.py."""
        return {
            "checkpointing": self.checkpointing,
            "moments": self.moments,
            "lora_rank": self.lora_rank,
            "lora_targets": self.lora_targets,
        }

    @property
    def policy_options(self) -> dict[str, Any]:
        """Keyword arguments of the policy's Trainer, which may have adapters."""
        lora = lora_options(self.lora_rank, self.lora_alpha, self.lora_targets)
        return self.trainer_options | {"lora": lora}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning rate of each step: linear warm-up, then constant or decaying to 0."""

    lr: float
    warmup_steps: int = 0
    kind: Literal["constant", "linear", "cosine"] = "constant"
    num_steps: int | None = None
    """Steps of the whole run; linear and cosine need it."""

    def __post_init__(self):
        check_choices(self)
        if self.kind != "constant" and not self.num_steps:
            raise ValueError(f"schedule={self.kind!r} needs the number of steps of the run")

    def at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return self.lr
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        left = 1 - min(1.0, done)
        if self.kind == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        return self.lr * left


class AdamW:
    """AdamW (Loshchilov and Hutter) with its state by parameter name.

    bf16 moments take half the memory. An update changes a moment by less than bf16 resolves, so
    moments are rounded stochastically, which is right on average.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        moments_dtype: torch.dtype = torch.float32,
    ):
        self.parameters = parameters
        self.num_updates = 0
        self._options = {
            "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay,
            "amsgrad": False, "maximize": False, "fused": True,
        }  # fmt: skip
        self.moments: dict[str, dict[str, Tensor]] = {
            moment: {
                name: torch.zeros_like(local(parameter), dtype=moments_dtype)
                for name, parameter in parameters.items()
            }
            for moment in MOMENTS
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        names = [name for name, p in self.parameters.items() if local(p).numel()]
        is_exact = all(self.moments[MOMENTS[0]][name].dtype == torch.float32 for name in names)
        if is_exact:
            self._update(names, *([self.moments[m][name] for name in names] for m in MOMENTS), lr)
        for index, name in enumerate(() if is_exact else names):
            stored = [self.moments[moment][name] for moment in MOMENTS]
            exact = [tensor.float() for tensor in stored]
            self._update([name], *([tensor] for tensor in exact), lr)
            for k, (target, tensor) in enumerate(zip(stored, exact, strict=True)):
                seed = (self.num_updates * len(names) + index) * len(MOMENTS) + k
                target.copy_(round_stochastically(tensor, seed))
        self.num_updates += 1

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _update(self, names: list[str], first: list[Tensor], second: list[Tensor], lr: float):
        parameters = [local(self.parameters[name]) for name in names]
        grads = [local(self.parameters[name].grad) for name in names]
        counts = torch.full((len(names),), float(self.num_updates), device=parameters[0].device)
        steps = list(counts.unbind())  # adamw increments each
        adamw(parameters, grads, first, second, [], steps, lr=lr, **self._options)


def round_stochastically(x: Tensor, seed: int) -> Tensor:
    """fp32 to bf16, up or down at random so that the mean is unchanged."""
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randint(
        0, 2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    bits = (x.view(torch.int32) + noise) & -(2**16)
    return bits.view(torch.float32).to(torch.bfloat16)
