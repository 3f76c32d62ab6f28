"""Rotary position embedding, and what a block hands to attention."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roll_lite.models.config import RopeConfig


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
    """Holds no parameters, so it survives meta-device construction."""

    def __init__(self, rope: RopeConfig, head_dim: int):
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._on_device: dict[torch.device, Tensor] = {}

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin in fp32, each (T, D/2)."""
        device = positions_T.device
        if device not in self._on_device:
            self._on_device[device] = self._frequencies.to(device)
        angles = positions_T.float()[:, None] * self._on_device[device]
        return angles.cos(), angles.sin()


def rotate(x_TKGD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head, in fp32, rounding once.

    That is what the fused kernel of the engine does, so training and generation agree better.
    """
    cos, sin = cos_TD[:, None, None], sin_TD[:, None, None]
    first, second = x_TKGD.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_TKGD.dtype)


@dataclass(frozen=True, slots=True)
class Projected:
    """Queries, keys and values of a layer, before q/k norm and rotation.

    Backends may fuse these steps; `rotated` is what they mean.
    """

    qkv_TKGD: Tensor
    """(T, K, G + 2, D): the queries of each kv head, then its key, then its value."""
    cos_TD: Tensor
    sin_TD: Tensor
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, heads, D), k and v (T, K, D)."""
        G = self.qkv_TKGD.shape[2] - 2
        if self.q_norm is None:
            qk = rotate(self.qkv_TKGD[:, :, : G + 1], self.cos_TD, self.sin_TD)
            q, k = qk[:, :, :G], qk[:, :, G]
        else:
            q = rotate(self.q_norm(self.qkv_TKGD[:, :, :G]), self.cos_TD, self.sin_TD)
            k = self.k_norm(self.qkv_TKGD[:, :, G : G + 1])
            k = rotate(k, self.cos_TD, self.sin_TD)[:, :, 0]
        return q.flatten(1, 2), k, self.qkv_TKGD[:, :, G + 1]
