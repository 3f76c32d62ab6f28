"""The parts of a decoder block. Shape suffixes: T tokens, H hidden, K kv heads, G group, D head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roll_lite.models.attention import Attend
from roll_lite.models.config import ModelConfig
from roll_lite.models.linear import linear
from roll_lite.models.rotary import Projected
from roll_lite.models.tensor import TensorShard


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with one fused projection, stored (K, G+2, D, H).

    Row k of the weight holds the G query heads of kv head k, then its key and its value, so that
    a shard of dimension 0 is a whole set of heads for tensor parallelism and generation alike.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        K, G, D = config.num_kv_heads, config.group_size, config.head_dim
        self.qkv = nn.Parameter(torch.empty(K, G + 2, D, config.hidden_size))
        self.qkv_bias = nn.Parameter(torch.empty(K, G + 2, D)) if config.qkv_bias else None
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.out = nn.Parameter(torch.empty(config.hidden_size, K * G * D))

    def forward(self, x_TH: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, layer: int):
        bias = None if self.qkv_bias is None else self.qkv_bias.flatten()
        qkv = linear(x_TH, self.qkv.flatten(0, 2), bias).unflatten(-1, self.qkv.shape[:3])
        out_THD = attend(layer, Projected(qkv, *rotary, self.q_norm, self.k_norm))
        return linear(out_THD.flatten(1), self.out)


class SwiGLU(nn.Module):
    """gate_up is stored (2, F, H): a shard of dimension 1 holds matching gate and up rows."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, config.intermediate_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, config.intermediate_size))

    def forward(self, x_TH: Tensor) -> Tensor:
        return linear(silu_mul(linear(x_TH, self.gate_up.flatten(0, 1))), self.down)


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the two halves of the last dimension."""
    if gate_up_TF.is_cuda and not torch.is_grad_enabled():
        from roll_lite.kernels.pointwise import silu_mul as fused

        return fused(gate_up_TF)
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_norm(x_TH: Tensor, delta_TH: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """x + delta, and the norm of it; x may be overwritten where no gradient needs it."""
    if x_TH.is_cuda and not torch.is_grad_enabled():
        from roll_lite.kernels.pointwise import add_norm as fused

        return x_TH, fused(x_TH, delta_TH, norm.weight, norm.eps)
    x_TH = x_TH + delta_TH
    return x_TH, norm(x_TH)


class Block(nn.Module):
    """Pre-norm residual block. `mlp` is any module from (T, H) to (T, H), dense or sparse.

    What a block adds to the residual stream is returned beside it, and added by the next one
    together with its norm. A `shard` adds up what tensor-parallel ranks computed.
    """

    def __init__(
        self, config: ModelConfig, layer: int, mlp: nn.Module, shard: TensorShard | None = None
    ):
        super().__init__()
        self.layer = layer
        self.shard = shard
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x_TH: Tensor,
        delta_TH: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        if delta_TH is None:
            normed_TH = self.attention_norm(x_TH)
        else:
            x_TH, normed_TH = add_norm(x_TH, delta_TH, self.attention_norm)
        delta_TH = self._whole(self.attention(normed_TH, rotary, attend, self.layer))
        x_TH, normed_TH = add_norm(x_TH, delta_TH, self.mlp_norm)
        return x_TH, self._whole(self.mlp(normed_TH))

    def _whole(self, partial_TH: Tensor) -> Tensor:
        return partial_TH if self.shard is None else self.shard.add_up(partial_TH)
