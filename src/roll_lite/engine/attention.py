"""Attention through the paged cache. The cache is one tensor (layer, k or v, page, slot, K, D)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from roll_lite.models.attention import PackedAttention


def write_cache(layer_cache: Tensor, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
    """Put keys and values of one layer at their slots, counted over all pages."""
    keys, values = layer_cache.flatten(1, 2)
    keys[slots_T] = k_TKD
    values[slots_T] = v_TKD


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Whole prompts, packed: each attends to itself, as in training, and is kept in the cache."""

    cache: Tensor
    slots_T: Tensor
    packed: PackedAttention

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        write_cache(self.cache[layer], self.slots_T, k_TKD, v_TKD)
        return self.packed(layer, q_THD, k_TKD, v_TKD)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """One new token per sequence against its pages, by SDPA over the gathered pages."""

    cache: Tensor
    slots_B: Tensor
    page_table_BP: Tensor
    """Page ids of each sequence; rows are filled up with any page."""
    is_key_BL: Tensor
    """Which of the P * page_size gathered slots hold tokens of the sequence."""

    def __call__(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        write_cache(self.cache[layer], self.slots_B, k_BKD, v_BKD)
        K = k_BKD.shape[1]
        k_BKLD, v_BKLD = (
            pages[self.page_table_BP].flatten(1, 2).transpose(1, 2) for pages in self.cache[layer]
        )
        # The G query heads of a kv head stand where queries stand, so keys are not repeated.
        q_BKGD = q_BHD.unflatten(1, (K, -1))
        mask = self.is_key_BL[:, None, None, :]
        return F.scaled_dot_product_attention(q_BKGD, k_BKLD, v_BKLD, attn_mask=mask).flatten(1, 2)


def decode_mask(lengths_B: Tensor, num_slots: int) -> Tensor:
    return torch.arange(num_slots, device=lengths_B.device) < lengths_B[:, None]
