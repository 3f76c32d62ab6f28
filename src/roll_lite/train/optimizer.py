"""AdamW over local shards, with moments in fp32 or bf16, and learning-rate schedules."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning rate of each step: a linear rise, then constant, or a fall to 0."""

    lr: float
    warmup_steps: int = 0
    kind: Literal["constant", "linear", "cosine"] = "constant"
    num_steps: int | None = None
    """Of the whole run; needed by linear and cosine."""

    def __post_init__(self):
        if self.kind not in SCHEDULES:
            raise ValueError(
                f"schedule={self.kind!r} is not known; known are {', '.join(SCHEDULES)}"
            )
        if self.kind != "constant" and not self.num_steps:
            raise ValueError(f"schedule={self.kind!r} needs the number of steps of the run")

    def at(self, step: int) -> float:
        """Of the step number `step`, counted from 0."""
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
    """Decoupled weight decay (Loshchilov and Hutter). State is kept by parameter name.

    bf16 moments take half the memory. A moment changes by a small share of itself in each update,
    less than bf16 can tell apart, so it is rounded up or down at random, right on average.
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
                target.copy_(round_at_random(tensor, seed))
        self.num_updates += 1

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _update(self, names: list[str], first: list[Tensor], second: list[Tensor], lr: float):
        parameters = [local(self.parameters[name]) for name in names]
        grads = [local(self.parameters[name].grad) for name in names]
        steps = [torch.tensor(float(self.num_updates), device=parameters[0].device)] * len(names)
        steps = [step.clone() for step in steps]  # each is counted up
        adamw(parameters, grads, first, second, [], steps, lr=lr, **self._options)


def local(parameter: Tensor) -> Tensor:
    """This rank's part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def round_at_random(x: Tensor, seed: int) -> Tensor:
    """fp32 to bf16, up or down with the probability that makes the mean right."""
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randint(
        0, 2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    bits = (x.view(torch.int32) + noise) & -(2**16)
    return bits.view(torch.float32).to(torch.bfloat16)
