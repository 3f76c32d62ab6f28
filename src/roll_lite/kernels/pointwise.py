"""Pointwise parts of a block, fused. Their gradients are in kernels/backward.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension."""
    T, F2 = gate_up_TF.shape
    out = torch.empty(T, F2 // 2, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    block = min(1024, triton.next_power_of_2(F2 // 2))
    _silu_mul[(T, triton.cdiv(F2 // 2, block))](gate_up_TF, out, F2 // 2, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, F, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = f < F
    gate = tl.load(gate_up_ptr + token * 2 * F + f, mask=ok).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * F + F + f, mask=ok).to(tl.float32)
    # silu is rounded before the product, as the same two steps in torch would.
    silu = (gate / (1 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * F + f, (silu * up).to(out_ptr.dtype.element_ty), mask=ok)


def add_norm(
    x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float, *, in_place: bool = True
) -> tuple[Tensor, Tensor]:
    """x + delta, over x if `in_place`; the RMS norm of the sum, times the weight."""
    T, H = x_TH.shape
    sum_TH = x_TH if in_place else torch.empty_like(x_TH)
    out = torch.empty_like(x_TH)
    block = triton.next_power_of_2(H)
    num_warps = min(16, max(1, block // 256))
    if T:
        _add_norm[(T,)](
            x_TH, delta_TH, weight_H, sum_TH, out, H, eps, BLOCK=block, num_warps=num_warps
        )
    return sum_TH, out


@triton.jit
def _add_norm(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, H, eps, BLOCK: tl.constexpr
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * H + tl.arange(0, BLOCK)
    ok = tl.arange(0, BLOCK) < H
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + offset, mask=ok, other=0.0).to(tl.float32)
    x += tl.load(delta_ptr + offset, mask=ok, other=0.0).to(tl.float32)
    x = x.to(dtype)  # the sum is rounded, as the same two steps in torch would
    tl.store(sum_ptr + offset, x, mask=ok)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + tl.arange(0, BLOCK), mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + offset, (x * scale * weight).to(dtype), mask=ok)
