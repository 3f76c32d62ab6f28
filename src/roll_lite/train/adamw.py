"""AdamW over shards, with moments that may be bf16."""

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from roll_lite.models.fsdp import local

MOMENTS = ("exp_avg", "exp_avg_sq")


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
