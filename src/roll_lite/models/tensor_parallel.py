"""Tensor parallelism: which part of each parameter a rank holds, and how partial results add up.

Engine and trainer run the same modules of local size, with the explicit collectives below; in
training these have gradients. Parameters are cut along heads, MLP columns or vocabulary entries.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from roll_lite.models.config import ModelConfig

CUT_DIMENSION = {
    "embedding": 0,
    "lm_head": 0,
    "attention.qkv": 0,
    "attention.qkv_bias": 0,
    "attention.out": 1,
    "mlp.gate_up": 1,
    "mlp.down": 1,
    "qkv_adapter.up": 0,
    "out_adapter.down": 1,
    "gate_up_adapter.up": 1,
    "down_adapter.down": 1,
}
"""By the end of a parameter's name; every rank holds all other parameters whole."""


def cut_dimension(name: str) -> int | None:
    return next((d for end, d in CUT_DIMENSION.items() if f".{name}".endswith(f".{end}")), None)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One rank's part of a model that `size` ranks compute together."""

    rank: int
    size: int
    group: dist.ProcessGroup

    @staticmethod
    def of(group: dist.ProcessGroup) -> "TensorShard":
        return TensorShard(group.rank(), group.size(), group)

    def local(self, config: ModelConfig) -> ModelConfig:
        """The sizes that this rank computes with."""
        sizes = {
            name: getattr(config, name)
            for name in ("vocab_size", "intermediate_size", "num_heads", "num_kv_heads")
        }
        for name, size in sizes.items():
            if size % self.size:
                fits = [n for n in range(1, self.size) if all(s % n == 0 for s in sizes.values())]
                raise ValueError(
                    f"tp={self.size} does not divide {name}={size}; use {', '.join(map(str, fits))}"
                )
        return replace(config, **{name: size // self.size for name, size in sizes.items()})

    def look_up(self, token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
        """Embed tokens, each on the rank that holds its row."""
        local_T = token_ids_T - self.rank * len(embedding_VH)
        is_here_T = (local_T >= 0) & (local_T < len(embedding_VH))
        x_TH = torch.nn.functional.embedding(local_T * is_here_T, embedding_VH)
        return self.all_reduce(torch.where(is_here_T[:, None], x_TH, 0.0))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place without gradients; backward is the identity, because
        what follows is the same on all ranks (Megatron's g)."""
        return _AllReduce.apply(x, self) if torch.is_grad_enabled() else self.sum_in_place(x)

    def spread(self, x: Tensor) -> Tensor:
        """The identity on its way into sharded modules; backward sums over ranks (Megatron's f)."""
        return _Spread.apply(x, self) if torch.is_grad_enabled() else x

    def sum_in_place(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, dimension: int = 1) -> Tensor:
        """All ranks' parts, concatenated in the order of ranks."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, dimension)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard):
        return shard.sum_in_place(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.shard.sum_in_place(grad.contiguous().clone()), None
