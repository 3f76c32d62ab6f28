"""Fused pointwise parts of a block, and their gradients.

Sums over tokens (gradients of norm weights) have a fixed order: each program sums its tokens, then
the programs' sums are added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # programs that share the tokens where weights have gradients


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
    # silu is rounded before the product, as two steps in torch would.
    silu = (gate / (1 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * F + f, (silu * up).to(out_ptr.dtype.element_ty), mask=ok)


def add_norm(
    x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float, *, in_place: bool = True
) -> tuple[Tensor, Tensor]:
    """x + delta, written over x if `in_place`; and its RMS norm times the weight."""
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
    x = x.to(dtype)  # the sum is rounded, as two steps in torch would
    tl.store(sum_ptr + offset, x, mask=ok)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + tl.arange(0, BLOCK), mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + offset, (x * scale * weight).to(dtype), mask=ok)


def silu_mul_backward(gate_up_TF: Tensor, grad_TF: Tensor) -> Tensor:
    T, F2 = gate_up_TF.shape
    out = torch.empty_like(gate_up_TF)
    block = min(1024, triton.next_power_of_2(F2 // 2))
    if T:
        _silu_mul_backward[(T, triton.cdiv(F2 // 2, block))](
            gate_up_TF, grad_TF, out, F2 // 2, BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def _silu_mul_backward(gate_up_ptr, grad_ptr, out_ptr, F, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = f < F
    gate = tl.load(gate_up_ptr + token * 2 * F + f, mask=ok).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * F + F + f, mask=ok).to(tl.float32)
    grad = tl.load(grad_ptr + token * F + f, mask=ok).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    dtype = out_ptr.dtype.element_ty
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out_ptr + token * 2 * F + f, grad_gate.to(dtype), mask=ok)
    tl.store(out_ptr + token * 2 * F + F + f, (grad * gate * sigmoid).to(dtype), mask=ok)


def add_norm_backward(
    x_TH: Tensor, weight_H: Tensor, eps: float, grad_x_TH: Tensor, grad_normed_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum x, which are those of both summands, and of the weight."""
    T, H = x_TH.shape
    out = torch.empty_like(x_TH)
    programs = max(1, min(PROGRAMS, T))
    sums = torch.zeros(programs, H, dtype=torch.float32, device=x_TH.device)
    block = triton.next_power_of_2(H)
    _add_norm_backward[(programs,)](
        x_TH, weight_H, grad_x_TH, grad_normed_TH, out, sums, T, H, eps,
        BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return out, sums.sum(0).to(weight_H.dtype)


@triton.jit
def _add_norm_backward(
    x_ptr, weight_ptr, grad_x_ptr, grad_normed_ptr, out_ptr, sums_ptr, T, H, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    h = tl.arange(0, BLOCK)
    ok = h < H
    weight = tl.load(weight_ptr + h, mask=ok, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    stride = H + 0 * program.to(tl.int64)  # offsets may pass 32 bits
    for token in range(program, T, tl.num_programs(0)):
        offset = token * stride + h
        x = tl.load(x_ptr + offset, mask=ok, other=0.0).to(tl.float32)
        grad_normed = tl.load(grad_normed_ptr + offset, mask=ok, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
        unit = x * scale
        total += grad_normed * unit
        grad_unit = grad_normed * weight
        grad = scale * (grad_unit - unit * (tl.sum(grad_unit * unit, 0) / H))
        grad += tl.load(grad_x_ptr + offset, mask=ok, other=0.0).to(tl.float32)
        tl.store(out_ptr + offset, grad.to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(sums_ptr + program * H + h, total, mask=ok)
