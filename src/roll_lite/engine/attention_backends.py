"""Attention through the paged KV cache, one tensor (layer, k or v, page, slot, K, D).

Backends: `triton` (CUDA, 16 bits) has its own kernels; `flash_attn` calls that package; `torch` is
plain torch (CPU, fp32, and the reference for the other two).
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roll_lite.checks import UserError
from roll_lite.engine.torch_attention import KeyBlocks, block_attention
from roll_lite.models.attention import Attend, Projected


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """Packed chunks of several sequences, each continuing what its pages already hold."""

    cache: Tensor
    slots_T: Tensor
    """Slots for the tokens' keys and values, numbered over all pages."""
    page_table_BP: Tensor
    """Page ids of each sequence; rows are padded with any page."""
    starts_B: Tensor
    """Position of each chunk's first token."""
    cu_seqlens: Tensor
    """int32, (chunks + 1,): where each chunk starts in the packed tokens, then the total."""
    max_seqlen: int
    """Tokens of the longest chunk."""
    max_length: int
    """Longest sequence, including what its pages hold."""


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """One new token per sequence."""

    cache: Tensor
    slots_T: Tensor
    page_table_BP: Tensor
    lengths_B: Tensor
    """Keys of each sequence, including the new one."""
    max_length: int
    """Upper bound of the lengths."""
    finished_BK: Tensor
    """Zeros; counters of the triton kernel."""


Metadata = PrefillMetadata | DecodeMetadata


def torch_prefill(meta: PrefillMetadata) -> Attend:
    return _torch_attention(meta, meta.starts_B, meta.cu_seqlens.diff())


def torch_decode(meta: DecodeMetadata) -> Attend:
    return _torch_attention(meta, meta.lengths_B - 1, torch.ones_like(meta.lengths_B))


def _torch_attention(meta: Metadata, starts_B: Tensor, lengths_B: Tensor) -> Attend:
    _clear_new_pages(meta.cache, meta.slots_T)
    keys = KeyBlocks.of_chunks(starts_B, lengths_B, meta.page_table_BP, meta.cache)

    def attend(layer: int, projected: Projected) -> Tensor:
        pages = meta.cache[layer]
        return block_attention(_write(projected, meta.slots_T, *pages), *pages, keys)

    return attend


def _clear_new_pages(cache: Tensor, slots_T: Tensor) -> None:
    """Zero the pages whose first slot is written now, in all layers.

    A block of keys is read beyond the end of a sequence, where an earlier owner of the page may
    have left nan; and 0 times nan is nan.
    """
    page_size = cache.shape[3]
    cache[:, :, slots_T[slots_T % page_size == 0] // page_size] = 0


def _write(projected: Projected, slots_T: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
    """Write keys and values to their slots; returns the rotated queries."""
    q_THD, k_TKD, v_TKD = projected.rotated()
    k_pages.flatten(0, 1)[slots_T] = k_TKD
    v_pages.flatten(0, 1)[slots_T] = v_TKD
    return q_THD


def triton_prefill(meta: PrefillMetadata) -> Attend:
    from roll_lite.kernels.paged_attention import paged_prefill

    options = meta.page_table_BP, meta.cu_seqlens, meta.starts_B, meta.max_seqlen
    return _kernel_attention(meta, paged_prefill, *options)


def triton_decode(meta: DecodeMetadata) -> Attend:
    from roll_lite.kernels.paged_attention import paged_decode

    options = meta.page_table_BP, meta.lengths_B, meta.max_length, meta.finished_BK
    return _kernel_attention(meta, paged_decode, *options)


def flash_prefill(meta: PrefillMetadata) -> Attend:
    from flash_attn import flash_attn_varlen_func

    lengths_B = meta.starts_B + meta.cu_seqlens.diff()
    cu_keys = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).int()
    kernel = partial(flash_attn_varlen_func, causal=True, block_table=meta.page_table_BP)
    sizes = meta.cu_seqlens, cu_keys, meta.max_seqlen, meta.max_length
    return _kernel_attention(meta, kernel, *sizes)


def flash_decode(meta: DecodeMetadata) -> Attend:
    from flash_attn import flash_attn_with_kvcache

    kernel = partial(
        flash_attn_with_kvcache,
        cache_seqlens=meta.lengths_B.int(),
        block_table=meta.page_table_BP,
        causal=True,
    )
    return _kernel_attention(meta, lambda q, k, v: kernel(q[:, None], k, v)[:, 0])


def _kernel_attention(meta: Metadata, kernel: Callable[..., Tensor], *options: Any) -> Attend:
    """`kernel(q, k_pages, v_pages, *options)` computes a layer's attention."""

    def attend(layer: int, projected: Projected) -> Tensor:
        pages = meta.cache[layer]
        return kernel(_rotate_into_cache(projected, meta.slots_T, *pages), *pages, *options)

    return attend


def _rotate_into_cache(
    projected: Projected, slots_T: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Tensor:
    """`_write` in one kernel, for head sizes that are powers of two."""
    if not _is_power_of_two(k_pages.shape[-1]):
        return _write(projected, slots_T, k_pages, v_pages)
    from roll_lite.kernels.rotary import rotate_into_cache

    return rotate_into_cache(
        projected.qkv_TKGD, projected.cos_TD, projected.sin_TD, *projected.norms,
        slots_T, k_pages, v_pages,
    )  # fmt: skip


BACKENDS = {
    "triton": (triton_prefill, triton_decode),
    "flash_attn": (flash_prefill, flash_decode),
    "torch": (torch_prefill, torch_decode),
}
PAGE_SIZE = {"triton": 16, "flash_attn": 256, "torch": 64}
"""flash-attn needs a multiple of 256; `torch` can read pages in place if they are its blocks."""


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Both kernels need 16 bits; triton also needs a head size that is a power of two."""
    is_16_bit = device.type == "cuda" and dtype != torch.float32
    usable = {
        "triton": is_16_bit and head_dim >= 16 and _is_power_of_two(head_dim),
        "flash_attn": is_16_bit and importlib.util.find_spec("flash_attn") is not None,
        "torch": True,
    }
    if wanted == "auto":
        return next(name for name in usable if usable[name])
    if not usable.get(wanted):
        raise UserError(
            f"backend={wanted!r} is not usable here (device {device.type}, {dtype}, heads of "
            f"{head_dim}); usable: auto, {', '.join(name for name in usable if usable[name])}"
        )
    return wanted
