"""Pointwise parts of a block. On CUDA they are kernels, the same to train and to generate with."""

import torch
import torch.nn.functional as F
from torch import Tensor


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
    # F.silu rounds differently where the part of a thread ends: a row would depend on others.
    wide = gate.float()
    return (wide / wide.neg().exp_().add_(1)).to(gate.dtype).mul_(up)


def add_norm(x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and the RMS norm of it; x may be overwritten where no gradient needs it."""
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
        from roll_lite.kernels.backward import silu_mul_backward

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
        from roll_lite.kernels.backward import add_norm_backward

        grad_TH, grad_weight_H = add_norm_backward(
            *ctx.saved_tensors, ctx.eps, grad_x_TH.contiguous(), grad_normed_TH.contiguous()
        )
        return grad_TH, grad_TH, grad_weight_H, None
