"""The parts of a decoder block. Shape suffixes: T tokens, H hidden, K kv heads, G group, D head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roll_lite.models.attention import Attend
from roll_lite.models.config import ModelConfig, RopeConfig


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, in the fp32 steps that models are trained with."""
    frequency = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":  # keep short waves, stretch long ones by `factor`, blend in between
        turns = rope.original_positions * frequency / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        return (1 - keep) * frequency / rope.factor + keep * frequency
    return frequency


class Rotary:
    """Rotary position embedding; holds no parameters, so it survives meta-device construction."""

    def __init__(self, rope: RopeConfig, head_dim: int):
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._on_device: dict[torch.device, Tensor] = {}

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (T, 1, 1, D/2), computed in fp32."""
        device = positions_T.device
        if device not in self._on_device:
            self._on_device[device] = self._frequencies.to(device)
        angles = positions_T.float()[:, None] * self._on_device[device]
        return angles.cos().to(dtype)[:, None, None], angles.sin().to(dtype)[:, None, None]


def rotate(x_TKGD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head."""
    first, second = x_TKGD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with one fused projection, stored (K, G+2, D, H).

    Row k of the weight holds the G query heads of kv head k, then its key and its value, so that
    a shard of dimension 0 is a whole set of heads for tensor parallelism and generation alike.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        K, G, D = config.num_kv_heads, config.group_size, config.head_dim
        self.group_size = G
        self.qkv = nn.Parameter(torch.empty(K, G + 2, D, config.hidden_size))
        self.qkv_bias = nn.Parameter(torch.empty(K, G + 2, D)) if config.qkv_bias else None
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.out = nn.Parameter(torch.empty(config.hidden_size, K * G * D))

    def forward(self, x_TH: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, layer: int):
        G = self.group_size
        bias = None if self.qkv_bias is None else self.qkv_bias.flatten()
        qkv = F.linear(x_TH, self.qkv.flatten(0, 2), bias)
        qkv_TKGD = qkv.unflatten(-1, self.qkv.shape[:3])
        if self.q_norm is None:
            qk = rotate(qkv_TKGD[:, :, : G + 1], *rotary)
            q, k = qk[:, :, :G], qk[:, :, G]
        else:
            q = rotate(self.q_norm(qkv_TKGD[:, :, :G]), *rotary)
            k = rotate(self.k_norm(qkv_TKGD[:, :, G : G + 1]), *rotary)[:, :, 0]
        out = attend(layer, q.flatten(1, 2), k, qkv_TKGD[:, :, G + 1])
        return F.linear(out.flatten(1), self.out)


class SwiGLU(nn.Module):
    """gate_up is stored (2, F, H): a shard of dimension 1 holds matching gate and up rows."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, config.intermediate_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, config.intermediate_size))

    def forward(self, x_TH: Tensor) -> Tensor:
        gate, up = F.linear(x_TH, self.gate_up.flatten(0, 1)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


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
