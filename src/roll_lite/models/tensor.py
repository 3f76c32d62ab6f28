"""Tensor parallelism: which part of each parameter a rank holds, and how ranks add up.

The engine runs modules of local size with the explicit reductions below. The dimension along which
a parameter is cut is a whole set of heads, of MLP columns or of vocabulary entries.
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
}
"""By the end of a parameter's name; all others (norms) are held whole by every rank."""


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
        return self.add_up(torch.where(is_here_T[:, None], x_TH, 0.0))

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def side_by_side(self, x_RN: Tensor) -> Tensor:
        """All ranks' columns: (R, size * N)."""
        x_RN = x_RN.contiguous()
        parts = [torch.empty_like(x_RN) for _ in range(self.size)]
        dist.all_gather(parts, x_RN, group=self.group)
        return torch.cat(parts, 1)
