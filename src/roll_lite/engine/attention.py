"""Attention through the paged cache. The cache is one tensor (layer, k or v, page, slot, K, D).

Backends of decoding: `sdpa` gathers the pages of all sequences and calls SDPA once (the CPU, and
the reference); `triton` reads the pages where they are.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from roll_lite.models.attention import PackedAttention
from roll_lite.models.rotary import Projected


def write_cache(layer_cache: Tensor, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
    """Put keys and values of one layer at their slots, counted over all pages."""
    keys, values = layer_cache.flatten(1, 2)
    keys[slots_T] = k_TKD
    values[slots_T] = v_TKD


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Chunks of several sequences, packed, each after what its pages hold already."""

    cache: Tensor
    slots_T: Tensor
    packed: PackedAttention
    page_table_BP: Tensor
    starts_B: Tensor
    """Position of each chunk's first token."""
    has_context: bool
    """Whether any chunk has something before it; if not, `sdpa` attends as in training."""
    backend: str

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        k_pages, v_pages = self.cache[layer]
        rest = (
            k_pages, v_pages, self.page_table_BP, self.packed.cu_seqlens, self.starts_B,
            self.packed.max_seqlen,
        )  # fmt: skip
        if self.backend == "triton":
            from roll_lite.kernels.prefill import paged_prefill

            return paged_prefill(fused_rotation(projected, self.slots_T, k_pages, v_pages), *rest)
        q_THD, k_TKD, v_TKD = projected.rotated()
        write_cache(self.cache[layer], self.slots_T, k_TKD, v_TKD)
        if self.has_context:
            return sdpa_prefill(q_THD, *rest)
        return self.packed.attend(q_THD, k_TKD, v_TKD)


def fused_rotation(
    projected: Projected, slots_T: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Tensor:
    """Rotated queries; keys and values go to their slots. One kernel."""
    from roll_lite.kernels.qkv import rotate_into_cache

    q_norm, k_norm, eps = None, None, 0.0
    if projected.q_norm is not None:
        q_norm, k_norm = projected.q_norm.weight, projected.k_norm.weight
        eps = projected.q_norm.eps
    return rotate_into_cache(
        projected.qkv_TKGD, projected.cos_TD, projected.sin_TD, q_norm, k_norm, eps,
        slots_T, k_pages, v_pages,
    )  # fmt: skip


def sdpa_prefill(
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table_BP: Tensor,
    cu_seqlens: Tensor,
    starts_B: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Queries padded to the longest chunk, against the gathered pages of all sequences."""
    K = k_pages.shape[2]
    column = torch.arange(max_seqlen, device=q_THD.device)
    is_query_BQ = column < cu_seqlens.diff()[:, None]
    q_BQHD = q_THD.new_zeros(*is_query_BQ.shape, *q_THD.shape[1:])
    q_BQHD[is_query_BQ] = q_THD
    # (B, Q, K, G, D) -> (B, K, G * Q, D): the heads of a group share keys as further queries.
    q = q_BQHD.unflatten(2, (K, -1)).permute(0, 2, 3, 1, 4)
    group_size = q.shape[2]
    k_BKLD, v_BKLD = (
        pages[page_table_BP].flatten(1, 2).transpose(1, 2) for pages in (k_pages, v_pages)
    )
    slot = torch.arange(k_BKLD.shape[2], device=q_THD.device)
    seen_BQL = slot <= (starts_B[:, None] + column)[:, :, None]
    mask = seen_BQL[:, None].repeat(1, 1, group_size, 1)
    out = F.scaled_dot_product_attention(q.flatten(2, 3), k_BKLD, v_BKLD, attn_mask=mask)
    out_BQHD = out.unflatten(2, (group_size, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out_BQHD[is_query_BQ]


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """One new token per sequence: what both backends need to know."""

    cache: Tensor
    slots_B: Tensor
    page_table_BP: Tensor
    """Page ids of each sequence; rows are filled up with any page."""
    lengths_B: Tensor
    """Keys of each sequence, the new one included."""
    max_length: int
    """No sequence is longer."""


class SdpaDecode(DecodeAttention):
    __slots__ = ()

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        q_BHD, k_BKD, v_BKD = projected.rotated()
        write_cache(self.cache[layer], self.slots_B, k_BKD, v_BKD)
        num_pages = -(-self.max_length // self.cache.shape[3])
        table = self.page_table_BP[:, :num_pages]
        k_BKLD, v_BKLD = (pages[table].flatten(1, 2).transpose(1, 2) for pages in self.cache[layer])
        # The G query heads of a kv head stand where queries stand, so keys are not repeated.
        q_BKGD = q_BHD.unflatten(1, (k_BKD.shape[1], -1))
        slot = torch.arange(k_BKLD.shape[2], device=table.device)
        mask = (slot < self.lengths_B[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q_BKGD, k_BKLD, v_BKLD, attn_mask=mask).flatten(1, 2)


class TritonDecode(DecodeAttention):
    __slots__ = ()

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        from roll_lite.kernels.decode import paged_decode

        k_pages, v_pages = self.cache[layer]
        q_BHD = fused_rotation(projected, self.slots_B, k_pages, v_pages)
        return paged_decode(
            q_BHD, k_pages, v_pages, self.page_table_BP, self.lengths_B, self.max_length
        )


BACKENDS: dict[str, type[DecodeAttention]] = {"sdpa": SdpaDecode, "triton": TritonDecode}


def choose_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The kernels are for 16-bit heads whose size is a power of two."""
    fits = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    return "triton" if device.type == "cuda" and dtype != torch.float32 and fits else "sdpa"
