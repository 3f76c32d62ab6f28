"""Rotary position embedding, and what a block hands to attention."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
        norms, eps = (None, None), 0.0
        if self.q_norm is not None:
            norms = self.q_norm.spread_weight, self.k_norm.spread_weight
            eps = self.q_norm.eps
        head_dim = self.qkv_TKGD.shape[-1]
        is_fused = self.qkv_TKGD.is_cuda and head_dim & (head_dim - 1) == 0
        run = _RotateHeads.apply if is_fused else rotate_heads
        return run(self.qkv_TKGD, self.cos_TD, self.sin_TD, *norms, eps)


class _RotateHeads(torch.autograd.Function):
    """`rotate_heads` by the kernel that the engine uses: its cache is a page of all tokens here."""

    @staticmethod
    def forward(ctx, qkv_TKGD, cos_TD, sin_TD, q_norm, k_norm, eps):
        from roll_lite.kernels.qkv import rotate_into_cache

        T, K, _, D = qkv_TKGD.shape
        k_TKD, v_TKD = (qkv_TKGD.new_empty(T, K, D) for _ in range(2))
        slots_T = torch.arange(T, device=qkv_TKGD.device)
        q_THD = rotate_into_cache(
            qkv_TKGD, cos_TD, sin_TD, q_norm, k_norm, eps, slots_T, k_TKD[None], v_TKD[None]
        )
        ctx.save_for_backward(qkv_TKGD if q_norm is not None else None, cos_TD, sin_TD)
        ctx.norms, ctx.eps, ctx.shape = (q_norm, k_norm), eps, qkv_TKGD.shape
        return q_THD, k_TKD, v_TKD

    @staticmethod
    def backward(ctx, grad_q_THD, grad_k_TKD, grad_v_TKD):
        from roll_lite.kernels.backward import rotate_backward

        grads = (grad.contiguous() for grad in (grad_q_THD, grad_k_TKD, grad_v_TKD))
        grad_qkv, grad_q_norm, grad_k_norm = rotate_backward(
            *ctx.saved_tensors, *ctx.norms, ctx.eps, *grads, shape=ctx.shape
        )
        return grad_qkv, None, None, grad_q_norm, grad_k_norm, None


def rotate_heads(
    qkv_TKGD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms of single heads where the model has them, then the rotation."""
    G = qkv_TKGD.shape[2] - 2
    if q_weight_D is None:
        qk = rotate(qkv_TKGD[:, :, : G + 1], cos_TD, sin_TD)
        q, k = qk[:, :, :G], qk[:, :, G]
    else:
        q = F.rms_norm(qkv_TKGD[:, :, :G], q_weight_D.shape, q_weight_D, eps)
        k = F.rms_norm(qkv_TKGD[:, :, G : G + 1], k_weight_D.shape, k_weight_D, eps)
        q, k = rotate(q, cos_TD, sin_TD), rotate(k, cos_TD, sin_TD)[:, :, 0]
    return q.flatten(1, 2), k, qkv_TKGD[:, :, G + 1]
