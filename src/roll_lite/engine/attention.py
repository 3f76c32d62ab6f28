"""Attention through the paged cache. The cache is one tensor (layer, k or v, page, slot, K, D).

Backends: `triton` (CUDA, 16 bits) reads the pages where they are; `flash_attn` calls that package;
`torch` is plain torch (CPU, fp32, and the reference of the others).
"""

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_lite.engine.torch_attention import KeyBlocks, block_attention
from roll_lite.models.attention import Projected


@dataclass(frozen=True, slots=True)
class PrefillPlaces:
    """Chunks of several sequences, packed, each after what its pages hold already."""

    cache: Tensor
    slots_T: Tensor
    """Where the tokens' keys and values go, counted over all pages."""
    page_table_BP: Tensor
    """Page ids of each sequence; rows are filled up with any page."""
    starts_B: Tensor
    """Position of each chunk's first token."""
    cu_seqlens: Tensor
    """int32, (chunks + 1,): where each chunk starts in the packed tokens, then the total."""
    max_seqlen: int
    """Tokens of the longest chunk."""
    max_length: int
    """Position after the last token of any chunk."""


@dataclass(frozen=True, slots=True)
class DecodePlaces:
    """One new token per sequence."""

    cache: Tensor
    slots_B: Tensor
    page_table_BP: Tensor
    lengths_B: Tensor
    """Keys of each sequence, the new one included."""
    max_length: int
    """No sequence is longer."""
    finished_BK: Tensor
    """Zeros for the triton kernel to count with."""


class TorchPrefill:
    def __init__(self, where: PrefillPlaces):
        self.where = where
        _clear_begun_pages(where.cache, where.slots_T)
        lengths_B = where.cu_seqlens.diff()
        self.keys = KeyBlocks.of_chunks(where.starts_B, lengths_B, where.page_table_BP, where.cache)

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        return _attend_blocks(self.where.cache[layer], self.where.slots_T, self.keys, projected)


class TorchDecode:
    def __init__(self, where: DecodePlaces):
        self.where = where
        _clear_begun_pages(where.cache, where.slots_B)
        self.keys = KeyBlocks.of_chunks(
            where.lengths_B - 1,
            torch.ones_like(where.lengths_B),
            where.page_table_BP,
            where.cache,
        )

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        return _attend_blocks(self.where.cache[layer], self.where.slots_B, self.keys, projected)


def _clear_begun_pages(cache: Tensor, slots_T: Tensor) -> None:
    """Zero the pages whose first slot is written now, in all layers.

    A block of keys is read to its end, past the end of a sequence, where an earlier owner of the
    page may have left nan; and 0 times nan is nan.
    """
    page_size = cache.shape[3]
    cache[:, :, slots_T[slots_T % page_size == 0] // page_size] = 0


def _attend_blocks(
    layer_cache: Tensor, slots_T: Tensor, keys: KeyBlocks, projected: Projected
) -> Tensor:
    return block_attention(_write(projected, slots_T, *layer_cache), *layer_cache, keys)


def _write(projected: Projected, slots_T: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
    """Rotated queries; keys and values go to their slots."""
    q_THD, k_TKD, v_TKD = projected.rotated()
    k_pages.flatten(0, 1)[slots_T] = k_TKD
    v_pages.flatten(0, 1)[slots_T] = v_TKD
    return q_THD


@dataclass(frozen=True, slots=True)
class TritonPrefill:
    where: PrefillPlaces

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        from roll_lite.kernels.paged_attention import paged_prefill

        w = self.where
        k_pages, v_pages = w.cache[layer]
        return paged_prefill(
            _rotate_into_cache(projected, w.slots_T, k_pages, v_pages), k_pages, v_pages,
            w.page_table_BP, w.cu_seqlens, w.starts_B, w.max_seqlen,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonDecode:
    where: DecodePlaces

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        from roll_lite.kernels.paged_attention import paged_decode

        w = self.where
        k_pages, v_pages = w.cache[layer]
        return paged_decode(
            _rotate_into_cache(projected, w.slots_B, k_pages, v_pages), k_pages, v_pages,
            w.page_table_BP, w.lengths_B, w.max_length, w.finished_BK,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlashPrefill:
    where: PrefillPlaces

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        w = self.where
        k_pages, v_pages = w.cache[layer]
        keys = w.starts_B + w.cu_seqlens.diff()
        return flash_attn_varlen_func(
            _rotate_into_cache(projected, w.slots_T, k_pages, v_pages), k_pages, v_pages,
            w.cu_seqlens, torch.nn.functional.pad(keys.cumsum(0), (1, 0)).int(),
            w.max_seqlen, w.max_length, causal=True, block_table=w.page_table_BP,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlashDecode:
    where: DecodePlaces

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        from flash_attn import flash_attn_with_kvcache

        w = self.where
        k_pages, v_pages = w.cache[layer]
        q_BHD = _rotate_into_cache(projected, w.slots_B, k_pages, v_pages)
        out = flash_attn_with_kvcache(
            q_BHD[:, None], k_pages, v_pages, cache_seqlens=w.lengths_B.int(),
            block_table=w.page_table_BP, causal=True,
        )  # fmt: skip
        return out[:, 0]


def _rotate_into_cache(
    projected: Projected, slots_T: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Tensor:
    """The same in one kernel, for heads whose size is a power of two."""
    if not _is_power_of_two(k_pages.shape[-1]):
        return _write(projected, slots_T, k_pages, v_pages)
    from roll_lite.kernels.rotary import rotate_into_cache

    q_norm, k_norm, eps = None, None, 0.0
    if projected.q_norm is not None:
        q_norm, k_norm = projected.q_norm.weight, projected.k_norm.weight
        eps = projected.q_norm.eps
    return rotate_into_cache(
        projected.qkv_TKGD, projected.cos_TD, projected.sin_TD, q_norm, k_norm, eps,
        slots_T, k_pages, v_pages,
    )  # fmt: skip


BACKENDS = {
    "triton": (TritonPrefill, TritonDecode),
    "flash_attn": (FlashPrefill, FlashDecode),
    "torch": (TorchPrefill, TorchDecode),
}
PAGE_SIZE = {"triton": 16, "flash_attn": 256, "torch": 64}
"""flash-attn wants a multiple of 256; `torch` reads pages where they are if they are its blocks."""


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The kernels are for 16-bit heads, ours for sizes that are powers of two."""
    is_16_bit = device.type == "cuda" and dtype != torch.float32
    usable = {
        "triton": is_16_bit and head_dim >= 16 and _is_power_of_two(head_dim),
        "flash_attn": is_16_bit and importlib.util.find_spec("flash_attn") is not None,
        "torch": True,
    }
    if wanted == "auto":
        return next(name for name in usable if usable[name])
    if not usable.get(wanted):
        raise ValueError(
            f"backend={wanted!r} is not usable here (device {device.type}, {dtype}, heads of "
            f"{head_dim}); usable: auto, {', '.join(name for name in usable if usable[name])}"
        )
    return wanted
