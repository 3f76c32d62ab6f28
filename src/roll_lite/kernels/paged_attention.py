"""Attention to the pages of the KV cache: one new token per sequence (decode), or many (prefill).

Decode cuts a sequence into splits of a fixed *size*, so that a result does not depend on the batch;
programs past a sequence's end return at once, so that one grid serves every length under a CUDA
graph. The split that finishes last merges all of them, always in the same order. Each key and value
is read once, at the speed of the memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512
BLOCK = 128
LOG2E = 1.4426950408889634


def paged_decode(
    q_BHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table_BP: Tensor,
    lengths_B: Tensor,
    max_length: int,
    finished_BK: Tensor,
) -> Tensor:
    """(B, H, D) queries against pages (page, slot, K, D); every length is at least 1.

    `finished_BK` counts finished splits: int32, zero before and after.
    """
    B, H, D = q_BHD.shape
    page_size, K = k_pages.shape[1:3]
    num_splits = triton.cdiv(max_length, SPLIT)
    group = H // K
    out = torch.empty_like(q_BHD)
    partial = torch.empty(B, H, num_splits, D, device=q_BHD.device, dtype=torch.float32)
    lse = torch.empty(B, H, num_splits, device=q_BHD.device, dtype=torch.float32)
    _decode[(num_splits, K, B)](
        q_BHD, k_pages, v_pages, page_table_BP, lengths_B, out, partial, lse, finished_BK,
        D**-0.5 * LOG2E, num_splits, H, page_table_BP.stride(0),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), D=D,
        PAGE=page_size, BLOCK=BLOCK, SPLIT=SPLIT, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _decode(
    q_ptr, k_ptr, v_ptr, page_table_ptr, length_ptr, out_ptr, partial_ptr, lse_ptr, finished_ptr,
    scale, num_splits, num_heads, table_stride, page_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    split, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + seq).to(tl.int32)
    start = split * SPLIT
    if start < length:
        g = tl.arange(0, GROUP_PAD)
        d = tl.arange(0, D)
        head = kv_head * GROUP + g
        in_group = g < GROUP
        q_offset = (seq * num_heads + head)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + q_offset, mask=in_group[:, None], other=0.0)
        m = tl.full([GROUP_PAD], -1e30, tl.float32)
        l = tl.zeros([GROUP_PAD], tl.float32)  # noqa: E741
        acc = tl.zeros([GROUP_PAD, D], tl.float32)
        end = tl.minimum(start + SPLIT, length)
        for n in range(start, end, BLOCK):
            position = n + tl.arange(0, BLOCK)
            ok = position < end
            page = tl.load(page_table_ptr + seq * table_stride + position // PAGE, mask=ok, other=0)
            slot = page.to(tl.int64) * page_stride + (position % PAGE) * slot_stride
            slot += kv_head * head_stride
            k = tl.load(k_ptr + slot[None, :] + d[:, None], mask=ok[None, :], other=0.0)
            s = tl.where(ok[None, :], tl.dot(q, k) * scale, -1e30)  # base 2
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=ok[:, None], other=0.0)
            l = l * rescale + tl.sum(p, 1)  # noqa: E741
            acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v)
            m = m_new
        acc = acc / l[:, None]
        used = (length + SPLIT - 1) // SPLIT
        if used == 1:
            tl.store(out_ptr + q_offset, acc.to(out_ptr.dtype.element_ty), mask=in_group[:, None])
        else:
            row = (seq * num_heads + head).to(tl.int64) * num_splits
            offset = (row + split)[:, None] * D + d[None, :]
            tl.store(partial_ptr + offset, acc, mask=in_group[:, None])
            tl.store(lse_ptr + row + split, m + tl.log2(l), mask=in_group)
            tl.debug_barrier()  # every thread has written its part before this program counts
            counter = finished_ptr + seq * tl.num_programs(1) + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
                tl.atomic_xchg(counter, 0)
                m = tl.full([GROUP_PAD], -1e30, tl.float32)
                l = tl.zeros([GROUP_PAD], tl.float32)  # noqa: E741
                acc = tl.zeros([GROUP_PAD, D], tl.float32)
                for i in range(used):
                    # Written by other programs, so not from this one's L1 cache.
                    lse = tl.load(lse_ptr + row + i, mask=in_group, other=0.0, cache_modifier=".cg")
                    part = tl.load(
                        partial_ptr + (row + i)[:, None] * D + d[None, :],
                        mask=in_group[:, None], other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    m_new = tl.maximum(m, lse)
                    rescale, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new)
                    acc = acc * rescale[:, None] + weight[:, None] * part
                    l = l * rescale + weight  # noqa: E741
                    m = m_new
                acc = acc / l[:, None]
                tl.store(
                    out_ptr + q_offset, acc.to(out_ptr.dtype.element_ty), mask=in_group[:, None]
                )


def paged_prefill(
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table_BP: Tensor,
    cu_seqlens: Tensor,
    starts_B: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Packed queries, causal; their keys are already in the pages (page, slot, K, D).

    Sequence b has the queries cu_seqlens[b]..cu_seqlens[b + 1], the first at position starts_B[b].
    """
    _, H, D = q_THD.shape
    page_size, K = k_pages.shape[1:3]
    out = torch.empty_like(q_THD)
    block_q = 64
    _prefill[(triton.cdiv(max_seqlen, block_q), H, len(starts_B))](
        q_THD, k_pages, v_pages, page_table_BP, cu_seqlens, starts_B, out,
        D**-0.5 * LOG2E, H, page_table_BP.stride(0),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        GROUP=H // K, D=D, PAGE=page_size, BLOCK_Q=block_q, BLOCK_K=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _prefill(
    q_ptr, k_ptr, v_ptr, page_table_ptr, cu_seqlens_ptr, start_ptr, out_ptr,
    scale, num_heads, table_stride, page_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    num_queries = (tl.load(cu_seqlens_ptr + seq + 1) - first).to(tl.int32)
    if block * BLOCK_Q < num_queries:
        start = tl.load(start_ptr + seq).to(tl.int32)
        row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        d = tl.arange(0, D)
        q_offset = ((first + row) * num_heads + head)[:, None] * D + d[None, :]
        is_query = (row < num_queries)[:, None]
        q = tl.load(q_ptr + q_offset, mask=is_query, other=0.0)
        q_position = start + row
        m = tl.full([BLOCK_Q], -1e30, tl.float32)
        l = tl.zeros([BLOCK_Q], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_Q, D], tl.float32)
        end = start + tl.minimum((block + 1) * BLOCK_Q, num_queries)
        for n in range(0, end, BLOCK_K):
            position = n + tl.arange(0, BLOCK_K)
            ok = position < end
            page = tl.load(page_table_ptr + seq * table_stride + position // PAGE, mask=ok, other=0)
            slot = page.to(tl.int64) * page_stride + (position % PAGE) * slot_stride
            slot += (head // GROUP) * head_stride
            k = tl.load(k_ptr + slot[None, :] + d[:, None], mask=ok[None, :], other=0.0)
            seen = position[None, :] <= q_position[:, None]
            s = tl.where(seen, tl.dot(q, k) * scale, -1e30)  # base 2
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=ok[:, None], other=0.0)
            l = l * rescale + tl.sum(p, 1)  # noqa: E741
            acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v)
            m = m_new
        tl.store(out_ptr + q_offset, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)
