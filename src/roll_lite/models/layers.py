"""The parts of a decoder block. Shape suffixes: T tokens, H hidden, K kv heads, G group, D head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roll_lite.models.attention import Attend
from roll_lite.models.config import ModelConfig
from roll_lite.models.rotary import Projected


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
        qkv = F.linear(x_TH, self.qkv.flatten(0, 2), bias).unflatten(-1, self.qkv.shape[:3])
        out_THD = attend(layer, Projected(qkv, *rotary, self.q_norm, self.k_norm))
        return F.linear(out_THD.flatten(1), self.out)


class SwiGLU(nn.Module):
    """gate_up is stored (2, F, H): a shard of dimension 1 holds matching gate and up rows."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, config.intermediate_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, config.intermediate_size))

    def forward(self, x_TH: Tensor) -> Tensor:
        return F.linear(silu_mul(F.linear(x_TH, self.gate_up.flatten(0, 1))), self.down)


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the two halves of the last dimension."""
    if gate_up_TF.is_cuda and not torch.is_grad_enabled():
        from roll_lite.kernels.pointwise import silu_mul as fused

        return fused(gate_up_TF)
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate) * up


class Block(nn.Module):
    """Pre-norm residual block. `mlp` is any module from (T, H) to (T, H), dense or sparse."""

    def __init__(self, config: ModelConfig, layer: int, mlp: nn.Module):
        super().__init__()
        self.layer = layer
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(self, x_TH: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x_TH = x_TH + self.attention(self.attention_norm(x_TH), rotary, attend, self.layer)
        return x_TH + self.mlp(self.mlp_norm(x_TH))
