"""Attention of many new tokens per sequence to its pages, causal, with what came before cached."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


def paged_prefill(
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table_BP: Tensor,
    cu_seqlens: Tensor,
    starts_B: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Packed queries, whose keys are in the pages (page, slot, K, D) already.

    Sequence b has its queries at cu_seqlens[b]..cu_seqlens[b + 1]; the first stands at starts_B[b].
    """
    _, H, D = q_THD.shape
    page_size, K = k_pages.shape[1:3]
    out = torch.empty_like(q_THD)
    block_q = 64
    _attend_chunk[(triton.cdiv(max_seqlen, block_q), H, len(starts_B))](
        q_THD, k_pages, v_pages, page_table_BP, cu_seqlens, starts_B, out,
        D**-0.5 * LOG2E, H, page_table_BP.stride(0),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        GROUP=H // K, D=D, PAGE=page_size, BLOCK_Q=block_q, BLOCK_K=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _attend_chunk(
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
