"""From the fused projection to rotated queries, and keys and values in the cache, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    """Normalise (where the model does) and rotate; write k and v at their slots; queries (T, H, D).

    `qkv_TKGD` is (T, K, G + 2, D) with the queries of a kv head, its key and its value; cos and sin
    are (T, D/2); a slot counts over all pages (page, slot, K, D).
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
