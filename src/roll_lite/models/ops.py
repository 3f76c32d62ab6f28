"""The operations of a block: matrix products, fused pointwise parts and rotary embedding.

On CUDA the pointwise parts are Triton kernels, the same in training and in generation.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from roll_lite.models.config import RopeConfig

ROWS = 64  # rows of a block in `linear`
SMALL_BLOCKS = (16, 32)
LARGE_BLOCK = 512
_is_same: dict[tuple, bool] = {}


def linear(x_TH: Tensor, weight_NH: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """F.linear; on a CPU without gradients, batch-invariant.

    A CPU's result for a row may depend on the number of rows. In blocks of a fixed size it does
    not, so a sample's logprobs have the same bits in any batch, prefilled or decoded.
    """
    if x_TH.device.type != "cpu" or torch.is_grad_enabled():
        return F.linear(x_TH, weight_NH, bias_N)
    num_rows = len(x_TH)
    weight_HN = weight_NH.T
    sizes = _block_sizes(num_rows, weight_HN)
    padded = sum(sizes)
    if padded > num_rows:
        x_TH = F.pad(x_TH, (0, 0, 0, padded - num_rows))
    out = x_TH.new_empty(padded, len(weight_NH))
    for x, y in zip(x_TH.split(sizes), out.split(sizes), strict=True):
        torch.mm(x, weight_HN, out=y)
    out = out[:num_rows]
    return out if bias_N is None else out.add_(bias_N)


def _block_sizes(num_rows: int, weight_HN: Tensor) -> list[int]:
    """Blocks of ROWS rows; larger ones and a smaller last one where they give the same bits."""
    num_large = 0
    if num_rows >= LARGE_BLOCK and _are_the_same_bits(LARGE_BLOCK, weight_HN):
        num_large, num_rows = divmod(num_rows, LARGE_BLOCK)
    num_blocks, rest = divmod(num_rows, ROWS)
    sizes = [LARGE_BLOCK] * num_large + [ROWS] * num_blocks
    if rest:
        fits = (n for n in SMALL_BLOCKS if n >= rest and _are_the_same_bits(n, weight_HN))
        sizes.append(next(fits, ROWS))
    return sizes


def _are_the_same_bits(size: int, weight_HN: Tensor) -> bool:
    """Whether blocks of `size` rows give the same bits as blocks of ROWS.

    The order of a kernel's additions depends on shapes, not on values, so one trial decides. The
    trial's products cancel, so that a different order shows even in 16 bits.
    """
    key = size, weight_HN.dtype, weight_HN.shape, weight_HN.stride(), torch.get_num_threads()
    if key not in _is_same:
        generator = torch.Generator().manual_seed(0)
        half = len(weight_HN) // 2
        x_RH = torch.zeros(max(size, ROWS), len(weight_HN), dtype=weight_HN.dtype)
        x_RH[:, :half] = torch.randn(len(x_RH), half, generator=generator)
        x_RH[:, half : 2 * half] = x_RH[:, :half]
        column_H1 = torch.randn(len(weight_HN), 1, generator=generator)
        column_H1[half : 2 * half] = -column_H1[:half]
        tried_HN = torch.empty_like(weight_HN).copy_(column_H1)  # strides are kept
        expected, tried = (
            torch.cat([part @ tried_HN for part in x_RH.split(n)]) for n in (ROWS, size)
        )
        _is_same[key] = torch.equal(expected, tried)
    return _is_same[key]


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the two halves of the last dimension."""
    if gate_up_TF.is_cuda and torch.is_grad_enabled():
        return _SiluMul.apply(gate_up_TF)
    if gate_up_TF.is_cuda:
        from roll_lite.kernels.pointwise import silu_mul as kernel

        return kernel(gate_up_TF)
    gate, up = gate_up_TF.chunk(2, dim=-1)
    if torch.is_grad_enabled():
        return F.silu(gate) * up
    # F.silu rounds differently at the end of a thread's share: rows would depend on the batch.
    wide = gate.float()
    return (wide / wide.neg().exp_().add_(1)).to(gate.dtype).mul_(up)


def sigmoid(x: Tensor) -> Tensor:
    """On a CPU without gradients batch-invariant, unlike torch's."""
    if x.is_cuda or torch.is_grad_enabled():
        return x.sigmoid()
    return x.float().neg().exp_().add_(1).reciprocal_().to(x.dtype)


def add_norm(x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta and its RMS norm; without gradients x may be overwritten."""
    if x_TH.is_cuda and torch.is_grad_enabled():
        return _AddNorm.apply(x_TH, delta_TH, weight_H, eps)
    if x_TH.is_cuda:
        from roll_lite.kernels.pointwise import add_norm as kernel

        return kernel(x_TH, delta_TH, weight_H, eps)
    x_TH = x_TH + delta_TH
    return x_TH, F.rms_norm(x_TH, weight_H.shape, weight_H, eps)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_TF):
        from roll_lite.kernels.pointwise import silu_mul

        ctx.save_for_backward(gate_up_TF)
        return silu_mul(gate_up_TF)

    @staticmethod
    def backward(ctx, grad_TF):
        from roll_lite.kernels.pointwise import silu_mul_backward

        return silu_mul_backward(*ctx.saved_tensors, grad_TF.contiguous())


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, delta_TH, weight_H, eps):
        from roll_lite.kernels.pointwise import add_norm

        sum_TH, normed_TH = add_norm(x_TH, delta_TH, weight_H, eps, in_place=False)
        ctx.save_for_backward(sum_TH, weight_H)
        ctx.eps = eps
        return sum_TH, normed_TH

    @staticmethod
    def backward(ctx, grad_x_TH, grad_normed_TH):
        from roll_lite.kernels.pointwise import add_norm_backward

        grad_TH, grad_weight_H = add_norm_backward(
            *ctx.saved_tensors, ctx.eps, grad_x_TH.contiguous(), grad_normed_TH.contiguous()
        )
        return grad_TH, grad_TH, grad_weight_H, None


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, rounded in fp32 as in transformers."""
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
    """Cos and sin of positions. Not a module, so the meta device does not lose its numbers."""

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
    """Rotate the pairs (i, i + D/2) of every head in fp32, rounding once as the kernel does."""
    cos, sin = cos_TD[:, None, None], sin_TD[:, None, None]
    first, second = x_TKGD.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_TKGD.dtype)


def norm_and_rotate(
    qkv_TKGD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (T, heads, D), k and v (T, K, D), after the per-head norms of some models and rotation."""
    head_dim = qkv_TKGD.shape[-1]
    if qkv_TKGD.is_cuda and head_dim & (head_dim - 1) == 0:
        return _NormAndRotate.apply(qkv_TKGD, cos_TD, sin_TD, q_weight_D, k_weight_D, eps)
    G = qkv_TKGD.shape[2] - 2
    if q_weight_D is None:
        qk = rotate(qkv_TKGD[:, :, : G + 1], cos_TD, sin_TD)
        q = qk[:, :, :G]
        k = qk[:, :, G]
    else:
        q = F.rms_norm(qkv_TKGD[:, :, :G], q_weight_D.shape, q_weight_D, eps)
        q = rotate(q, cos_TD, sin_TD)
        k = F.rms_norm(qkv_TKGD[:, :, G : G + 1], k_weight_D.shape, k_weight_D, eps)
        k = rotate(k, cos_TD, sin_TD)[:, :, 0]
    return q.flatten(1, 2), k, qkv_TKGD[:, :, G + 1]


class _NormAndRotate(torch.autograd.Function):
    """By the engine's kernel, with one page that holds all tokens as its cache."""

    @staticmethod
    def forward(ctx, qkv_TKGD, cos_TD, sin_TD, q_norm, k_norm, eps):
        from roll_lite.kernels.rotary import rotate_into_cache

        T, K, _, D = qkv_TKGD.shape
        k_TKD, v_TKD = (qkv_TKGD.new_empty(T, K, D) for _ in range(2))
        slots_T = torch.arange(T, device=qkv_TKGD.device)
        q_THD = rotate_into_cache(
            qkv_TKGD, cos_TD, sin_TD, q_norm, k_norm, eps, slots_T, k_TKD[None], v_TKD[None]
        )
        ctx.save_for_backward(qkv_TKGD if q_norm is not None else None, cos_TD, sin_TD)
        ctx.norms = q_norm, k_norm, eps
        ctx.shape = qkv_TKGD.shape
        return q_THD, k_TKD, v_TKD

    @staticmethod
    def backward(ctx, grad_q_THD, grad_k_TKD, grad_v_TKD):
        from roll_lite.kernels.rotary import rotate_backward

        grads = (grad.contiguous() for grad in (grad_q_THD, grad_k_TKD, grad_v_TKD))
        grad_qkv, grad_q_norm, grad_k_norm = rotate_backward(
            *ctx.saved_tensors, *ctx.norms, *grads, shape=ctx.shape
        )
        return grad_qkv, None, None, grad_q_norm, grad_k_norm, None
