"""Paged attention in plain torch: for a CPU, for fp32, and as the reference of the kernels.

Queries go in tiles of a few neighbours, keys in blocks of one size, and blocks are merged by the
sums of their weights. Prefill and decoding are the same sums in the same order, whatever else is
computed beside them: a query's result depends on its own keys alone, to the last bit.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 4
KEYS = 128


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys at the same positions of several sequences, and the tiles of queries that see them."""

    tiles: Tensor | slice
    page_ids: Tensor
    num_pages: int
    """Of each tile."""
    mask: Tensor
    """(tiles, 1, queries of a kv head, keys), 0 or -inf."""
    is_blind: Tensor
    """(tiles, 1, queries of a kv head): queries that see none of these keys."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries in tiles of one sequence each: what is the same for all layers."""

    rows_NQ: Tensor
    """Which query stands at each place; one again, where the tile is not full."""
    is_query_NQ: Tensor
    blocks: list[KeyBlock]

    @staticmethod
    def of_chunks(
        starts_B: Tensor, lengths_B: Tensor, page_table_BP: Tensor, cache: Tensor, num_heads: int
    ) -> "Tiles":
        """Sequence b has `lengths_B[b]` queries, the first at position `starts_B[b]`.

        `cache` is any tensor (..., page, slot, kv head, D).
        """
        device = lengths_B.device
        num_tiles_B = (lengths_B + TILE - 1) // TILE
        owner_N = torch.arange(len(lengths_B), device=device).repeat_interleave(num_tiles_B)
        tile_N = torch.arange(len(owner_N), device=device)
        tile_N -= (num_tiles_B.cumsum(0) - num_tiles_B)[owner_N]
        place_NQ = tile_N[:, None] * TILE + torch.arange(TILE, device=device)
        is_query_NQ = place_NQ < lengths_B[owner_N, None]
        place_NQ *= is_query_NQ  # places left over are the first query once more
        first_B = lengths_B.cumsum(0) - lengths_B
        positions_NQ = starts_B[owner_N, None] + place_NQ
        page_size, num_kv_heads = cache.shape[-3:-1]
        positions_NM = positions_NQ.repeat_interleave(num_heads // num_kv_heads, 1)
        return Tiles(
            rows_NQ=first_B[owner_N, None] + place_NQ,
            is_query_NQ=is_query_NQ,
            blocks=_key_blocks(positions_NM, page_table_BP[owner_N], page_size, cache.dtype),
        )


def _key_blocks(
    positions_NM: Tensor, page_table_NP: Tensor, page_size: int, dtype: torch.dtype
) -> list[KeyBlock]:
    size = _block_size(page_size)
    last_N = positions_NM.amax(1)
    shortest, longest = int(last_N.min()), int(last_N.max())
    blocks = []
    for first in range(0, longest + 1, size):
        tiles = slice(None) if first <= shortest else (last_N >= first).nonzero()[:, 0]
        pages = page_table_NP[tiles, first // page_size : (first + size) // page_size]
        key = torch.arange(first, first + size, device=pages.device)
        is_hidden = (key > positions_NM[tiles, :, None])[:, None]
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=pages.device)
        mask.masked_fill_(is_hidden, -torch.inf)
        is_blind = is_hidden.all(-1)
        blocks.append(KeyBlock(tiles, pages.flatten(), pages.shape[1], mask, is_blind))
    return blocks


def _block_size(page_size: int) -> int:
    """Keys of a block: whole pages."""
    return page_size * max(1, KEYS // page_size)


def tiled_attention(q_THD: Tensor, k_pages: Tensor, v_pages: Tensor, tiles: Tiles) -> Tensor:
    """(T, H, D) queries against pages (page, slot, K, D)."""
    page_size, K = k_pages.shape[1:3]
    # (N, Q, K, G, D) -> (N, K, Q * G, D): heads of a group share keys as further queries.
    q = q_THD[tiles.rows_NQ].unflatten(2, (K, -1)).transpose(1, 2)
    G = q.shape[3]
    q = q.flatten(2, 3)
    out = lse = None
    for block in tiles.blocks:
        k, v = (_gather(x, block, _block_size(page_size)) for x in (k_pages, v_pages))
        seen_out, seen_lse = _attend(q[block.tiles], k, v, block)
        if out is None:  # everyone sees the first key
            out, lse = seen_out.float(), seen_lse
            continue
        total = torch.logaddexp(lse[block.tiles], seen_lse)
        old, new = (lse[block.tiles] - total).exp(), (seen_lse - total).exp()
        out[block.tiles] = out[block.tiles] * old[..., None] + seen_out * new[..., None]
        lse[block.tiles] = total
    out = out.unflatten(2, (TILE, G)).transpose(1, 2).flatten(2, 3)
    return out[tiles.is_query_NQ].to(q_THD.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys, and the log of its weights' sum: -inf if none is seen."""
    if q.device.type == "cpu":
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(q, k, v, attn_mask=block.mask)  # 0 and 0 if none is seen
        return out, lse.masked_fill(block.is_blind, -torch.inf)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5 + block.mask
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def _gather(pages: Tensor, block: KeyBlock, size: int) -> Tensor:
    """(tiles, K, size, D); a table that ends within the block is filled up with zeros."""
    found = pages.index_select(0, block.page_ids).unflatten(0, (-1, block.num_pages)).flatten(1, 2)
    if found.shape[1] < size:
        found = F.pad(found, (0, 0, 0, 0, 0, size - found.shape[1]))
    return found.transpose(1, 2)
