"""Gradients of the fused pointwise parts, for training on CUDA.

Sums over tokens (gradients of norms' weights) are made in a fixed order: each program adds up its
tokens, and the programs' sums are added afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # that share the tokens where weights have gradients


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
    """Gradients of the sum x, which are those of both its parts, and of the weight."""
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


def rotate_backward(
    qkv_TKGD: Tensor | None,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    grad_q_THD: Tensor,
    grad_k_TKD: Tensor,
    grad_v_TKD: Tensor,
    *,
    shape: torch.Size,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the projection, and of the norms' weights where the model has them.

    The projection itself, whose `shape` is (T, K, G + 2, D), is needed only with norms.
    """
    T, K, rows, D = shape
    out = torch.empty(shape, dtype=grad_q_THD.dtype, device=grad_q_THD.device)
    has_norm = q_norm is not None
    programs = max(1, min(PROGRAMS, T * K) if has_norm else T * K)
    sums = torch.zeros(programs, 2, D, dtype=torch.float32, device=out.device) if has_norm else out
    _rotate_backward[(programs,)](
        qkv_TKGD, cos_TD, sin_TD, q_norm, k_norm, grad_q_THD, grad_k_TKD, grad_v_TKD, out, sums,
        eps, T, K, GROUP=rows - 2, ROWS_PAD=triton.next_power_of_2(rows), HALF=D // 2,
        HALF_PAD=triton.next_power_of_2(D // 2), HAS_NORM=has_norm,
        num_warps=1 if rows * D <= 512 else 2,
    )  # fmt: skip
    if not has_norm:
        return out, None, None
    return out, *sums.sum(0).to(q_norm.dtype)


@triton.jit
def _rotate_backward(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr,
    out_ptr, sums_ptr, eps, T, num_kv_heads,
    GROUP: tl.constexpr, ROWS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = tl.arange(0, ROWS_PAD)[:, None]
    d = tl.arange(0, HALF_PAD)[None, :]
    D: tl.constexpr = 2 * HALF
    is_query, is_key, is_value = row < GROUP, row == GROUP, row == GROUP + 1
    ok = d < HALF
    dtype = out_ptr.dtype.element_ty
    if HAS_NORM:
        weight_first = _of_rows(q_norm_ptr + d, k_norm_ptr + d, is_query, ok)
        weight_second = _of_rows(q_norm_ptr + HALF + d, k_norm_ptr + HALF + d, is_query, ok)
        total_first = tl.zeros((ROWS_PAD, HALF_PAD), tl.float32)
        total_second = tl.zeros((ROWS_PAD, HALF_PAD), tl.float32)
    one = 1 + 0 * program.to(tl.int64)  # offsets may pass 32 bits
    for number in range(program, T * num_kv_heads, tl.num_programs(0)):
        pair = number * one  # of a token and a kv head
        token = pair // num_kv_heads
        q_at = (pair * GROUP + row) * D + d
        kv_at = pair * D + d + 0 * row
        first = _load(grad_q_ptr, grad_k_ptr, q_at, kv_at, is_query & ok, is_key & ok)
        second = _load(
            grad_q_ptr, grad_k_ptr, q_at + HALF, kv_at + HALF, is_query & ok, is_key & ok
        )
        cos = tl.load(cos_ptr + token * HALF + d, mask=ok, other=0.0)
        sin = tl.load(sin_ptr + token * HALF + d, mask=ok, other=0.0)
        # The rotation's inverse is its transpose.
        first, second = first * cos + second * sin, second * cos - first * sin
        at = (pair * (GROUP + 2) + row) * D + d
        if HAS_NORM:
            seen = (is_query | is_key) & ok
            x_first = tl.load(qkv_ptr + at, mask=seen, other=0.0).to(tl.float32)
            x_second = tl.load(qkv_ptr + at + HALF, mask=seen, other=0.0).to(tl.float32)
            squares = tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1)
            scale = tl.rsqrt(squares / D + eps)[:, None]
            x_first *= scale
            x_second *= scale
            total_first += first * x_first
            total_second += second * x_second
            first *= weight_first
            second *= weight_second
            inner = (tl.sum(first * x_first, 1) + tl.sum(second * x_second, 1)) / D
            first = scale * (first - x_first * inner[:, None])
            second = scale * (second - x_second * inner[:, None])
        values = is_value & ok
        first += tl.load(grad_v_ptr + kv_at, mask=values, other=0.0).to(tl.float32)
        second += tl.load(grad_v_ptr + kv_at + HALF, mask=values, other=0.0).to(tl.float32)
        exists = (row < GROUP + 2) & ok
        tl.store(out_ptr + at, first.to(dtype), mask=exists)
        tl.store(out_ptr + at + HALF, second.to(dtype), mask=exists)
    if HAS_NORM:
        sums = sums_ptr + program * 2 * D + tl.arange(0, HALF_PAD)
        column = tl.arange(0, HALF_PAD) < HALF
        tl.store(sums, tl.sum(tl.where(is_query, total_first, 0.0), 0), mask=column)
        tl.store(sums + HALF, tl.sum(tl.where(is_query, total_second, 0.0), 0), mask=column)
        tl.store(sums + D, tl.sum(tl.where(is_key, total_first, 0.0), 0), mask=column)
        tl.store(sums + D + HALF, tl.sum(tl.where(is_key, total_second, 0.0), 0), mask=column)


@triton.jit
def _of_rows(q_ptr, k_ptr, is_query, ok):
    """The weights of queries' norm, and in the other rows of the key's."""
    of_query = tl.load(q_ptr, mask=ok, other=0.0).to(tl.float32)
    of_key = tl.load(k_ptr, mask=ok, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)


@triton.jit
def _load(q_ptr, k_ptr, q_at, k_at, is_query, is_key):
    of_query = tl.load(q_ptr + q_at, mask=is_query, other=0.0).to(tl.float32)
    return of_query + tl.load(k_ptr + k_at, mask=is_key, other=0.0).to(tl.float32)
