"""From the fused qkv projection to rotated queries, and keys and values in the KV cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from roll_lite.kernels.pointwise import PROGRAMS


def rotate_into_cache(
    qkv_TKGD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    slots_T: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
) -> Tensor:
    """Norm (if the model does) and rotate; write k and v to their slots; return queries (T, H, D).

    `qkv_TKGD` is (T, K, G + 2, D): the queries of a kv head, its key, its value. cos and sin are
    (T, D/2). Slots are numbered over all pages (page, slot, K, D).
    """
    T, K, rows, D = qkv_TKGD.shape
    q_THD = torch.empty(T, K * (rows - 2), D, dtype=qkv_TKGD.dtype, device=qkv_TKGD.device)
    _rotate_into_cache[(T, K)](
        qkv_TKGD, cos_TD, sin_TD, q_norm, k_norm, slots_T, q_THD, k_pages, v_pages,
        eps, K, qkv_TKGD.stride(0), k_pages.stride(1), k_pages.stride(2),
        GROUP=rows - 2, ROWS_PAD=triton.next_power_of_2(rows), HALF=D // 2,
        HAS_NORM=q_norm is not None, num_warps=1 if rows * D <= 512 else 2,
    )  # fmt: skip
    return q_THD


@triton.jit
def _rotate_into_cache(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, slot_ptr, q_ptr, k_ptr, v_ptr,
    eps, num_kv_heads, token_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, ROWS_PAD: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, ROWS_PAD)
    d = tl.arange(0, HALF)
    D: tl.constexpr = 2 * HALF
    offset = token * token_stride + (kv_head * (GROUP + 2) + row)[:, None] * D + d[None, :]
    exists = (row < GROUP + 2)[:, None]
    first = tl.load(qkv_ptr + offset, mask=exists, other=0.0)
    second = tl.load(qkv_ptr + offset + HALF, mask=exists, other=0.0)
    dtype = first.dtype

    # The value row is stored as it is.
    slot = tl.load(slot_ptr + token).to(tl.int64) * slot_stride + kv_head * head_stride
    is_value = (row == GROUP + 1)[:, None] & (d >= 0)[None, :]
    tl.store(v_ptr + slot + d[None, :] + 0 * row[:, None], first, mask=is_value)
    tl.store(v_ptr + slot + HALF + d[None, :] + 0 * row[:, None], second, mask=is_value)

    first, second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D
        scale = tl.rsqrt(mean_square + eps)[:, None]
        is_query = (row < GROUP)[:, None]
        first *= scale * tl.where(
            is_query, tl.load(q_norm_ptr + d)[None, :], tl.load(k_norm_ptr + d)[None, :]
        ).to(tl.float32)
        second *= scale * tl.where(
            is_query,
            tl.load(q_norm_ptr + HALF + d)[None, :],
            tl.load(k_norm_ptr + HALF + d)[None, :],
        ).to(tl.float32)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + d).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * HALF + d).to(tl.float32)[None, :]
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)

    q_offset = ((token * num_kv_heads + kv_head) * GROUP + row)[:, None] * D + d[None, :]
    is_query = (row < GROUP)[:, None] & (d >= 0)[None, :]
    tl.store(q_ptr + q_offset, rotated_first, mask=is_query)
    tl.store(q_ptr + q_offset + HALF, rotated_second, mask=is_query)
    is_key = (row == GROUP)[:, None] & (d >= 0)[None, :]
    tl.store(k_ptr + slot + d[None, :] + 0 * row[:, None], rotated_first, mask=is_key)
    tl.store(k_ptr + slot + HALF + d[None, :] + 0 * row[:, None], rotated_second, mask=is_key)


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
    """Gradients of the projection, and of the norm weights if the model has them.

    The projection, whose `shape` is (T, K, G + 2, D), is needed only with norms.
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
        weight_first = _norm_weights(q_norm_ptr + d, k_norm_ptr + d, is_query, ok)
        weight_second = _norm_weights(q_norm_ptr + HALF + d, k_norm_ptr + HALF + d, is_query, ok)
        total_first = tl.zeros((ROWS_PAD, HALF_PAD), tl.float32)
        total_second = tl.zeros((ROWS_PAD, HALF_PAD), tl.float32)
    one = 1 + 0 * program.to(tl.int64)  # offsets may pass 32 bits
    for number in range(program, T * num_kv_heads, tl.num_programs(0)):
        pair = number * one  # a token and a kv head
        token = pair // num_kv_heads
        q_at = (pair * GROUP + row) * D + d
        kv_at = pair * D + d + 0 * row
        first = _load_rows(grad_q_ptr, grad_k_ptr, q_at, kv_at, is_query & ok, is_key & ok)
        second = _load_rows(
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
def _norm_weights(q_ptr, k_ptr, is_query, ok):
    """The weights of the query norm in query rows, and of the key norm in all other rows."""
    q_weights = tl.load(q_ptr, mask=ok, other=0.0).to(tl.float32)
    k_weights = tl.load(k_ptr, mask=ok, other=0.0).to(tl.float32)
    return tl.where(is_query, q_weights, k_weights)


@triton.jit
def _load_rows(q_ptr, k_ptr, q_at, k_at, is_query, is_key):
    """Query rows from one tensor and key rows from another; 0 in all other rows."""
    queries = tl.load(q_ptr + q_at, mask=is_query, other=0.0).to(tl.float32)
    return queries + tl.load(k_ptr + k_at, mask=is_key, other=0.0).to(tl.float32)
