"""Pointwise parts of a block: kernels of ours to generate, compiled ones to train on CUDA."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the two halves of the last dimension."""
    if not gate_up_TF.is_cuda:
        return _silu_mul(gate_up_TF)
    if torch.is_grad_enabled():
        return compiled(_silu_mul)(gate_up_TF)
    from roll_lite.kernels.pointwise import silu_mul as kernel

    return kernel(gate_up_TF)


def add_norm(x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and the RMS norm of it; x may be overwritten where no gradient needs it."""
    if not x_TH.is_cuda:
        return _add_norm(x_TH, delta_TH, weight_H, eps)
    if torch.is_grad_enabled():
        return compiled(_add_norm)(x_TH, delta_TH, weight_H, eps)
    from roll_lite.kernels.pointwise import add_norm as kernel

    return x_TH, kernel(x_TH, delta_TH, weight_H, eps)


def _silu_mul(gate_up_TF: Tensor) -> Tensor:
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate) * up


def _add_norm(
    x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x_TH = x_TH + delta_TH
    return x_TH, F.rms_norm(x_TH, weight_H.shape, weight_H, eps)


@functools.cache
def compiled(function: Callable) -> Callable:
    """One kernel each way that rounds where the steps of the function would, as our kernels do."""
    return torch.compile(function, options={"emulate_precision_casts": True})
