"""Paged attention in plain torch: for a CPU, for fp32, and as the reference of the kernels.

Queries go in tiles of a few neighbours, keys in blocks of one size, and blocks are merged by the
sums of their weights. Prefill and decoding are the same sums in the same order, whatever else is
computed beside them: a query's result depends on its own keys alone, to the last bit.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 2
KEYS = 64
LONG = 8  # tiles of a sequence from which on it is worth a gathering of its keys for itself


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys at the same positions of one or more sequences, and the tiles that see them."""

    tiles: Tensor | slice
    is_first: bool
    page_ids: Tensor
    num_pages: int
    """Of each sequence."""
    mask: Tensor
    """(tiles, 1, queries of a kv head, keys), 0 or -inf."""
    is_blind: Tensor
    """(tiles, 1, queries of a kv head): queries that see none of these keys."""
    is_unused: Tensor | None
    """(sequences, keys, 1, 1): places past a sequence's end, where anything may lie."""


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
        num_kv_heads = cache.shape[-2]
        positions_NM = positions_NQ.repeat_interleave(num_heads // num_kv_heads, 1)
        blocks = []
        for tiles, pages in _alike(num_tiles_B, owner_N, page_table_BP):
            blocks += _key_blocks(positions_NM, tiles, pages, cache)
        return Tiles(first_B[owner_N, None] + place_NQ, is_query_NQ, blocks)


def _alike(
    num_tiles_B: Tensor, owner_N: Tensor, page_table_BP: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Tiles to go together: those of each long sequence, with its pages, and all others."""
    parts = []
    is_short_N = torch.ones_like(owner_N, dtype=torch.bool)
    end = 0
    for b, num_tiles in enumerate(num_tiles_B.tolist()):
        begin, end = end, end + num_tiles
        if num_tiles >= LONG:
            is_short_N[begin:end] = False
            parts.append((torch.arange(begin, end, device=owner_N.device), page_table_BP[b][None]))
    if len(short := is_short_N.nonzero()[:, 0]):
        parts.append((short, page_table_BP[owner_N[short]]))
    return parts


def _key_blocks(
    positions_NM: Tensor, tiles: Tensor, page_table: Tensor, cache: Tensor
) -> list[KeyBlock]:
    """The blocks of keys that some tiles see; `page_table` has a row for each tile or for all."""
    page_size = cache.shape[-3]
    size = _block_size(page_size)
    last = positions_NM[tiles].amax(1)
    blocks = []
    for first in range(0, int(last.max()) + 1, size):
        reach = last >= first
        members = tiles[reach]
        rows = page_table if len(page_table) == 1 else page_table[reach]
        pages = rows[:, first // page_size : (first + size) // page_size]
        key = torch.arange(first, first + size, device=tiles.device)
        is_hidden = (key > positions_NM[members, :, None])[:, None]
        mask = torch.zeros(is_hidden.shape, dtype=cache.dtype, device=tiles.device)
        mask.masked_fill_(is_hidden, -torch.inf)
        ends = last.max()[None] if len(page_table) == 1 else last[reach]
        is_unused = (key > ends[:, None])[:, :, None, None]
        blocks.append(
            KeyBlock(
                tiles=_as_slice(members),
                is_first=first == 0,
                page_ids=pages.flatten(),
                num_pages=pages.shape[1],
                mask=mask,
                is_blind=is_hidden.all(-1),
                is_unused=is_unused if is_unused.any() else None,
            )
        )
    return blocks


def _as_slice(indices: Tensor) -> Tensor | slice:
    """A slice, which copies nothing, where the ascending indices have no gaps."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices


def _block_size(page_size: int) -> int:
    """Keys of a block: whole pages."""
    return page_size * max(1, KEYS // page_size)


def tiled_attention(q_THD: Tensor, k_pages: Tensor, v_pages: Tensor, tiles: Tiles) -> Tensor:
    """(T, H, D) queries against pages (page, slot, K, D)."""
    K = k_pages.shape[2]
    # (N, Q, K, G, D) -> (N, K, Q * G, D): heads of a group share keys as further queries.
    q = q_THD[tiles.rows_NQ].unflatten(2, (K, -1)).transpose(1, 2)
    G = q.shape[3]
    q = q.flatten(2, 3)
    out = torch.empty_like(q, dtype=torch.float32)
    lse = out.new_empty(q.shape[:3])
    for block in tiles.blocks:
        k, v = (_gather(x, block) for x in (k_pages, v_pages))
        seen_out, seen_lse = _attend(q[block.tiles], k, v, block)
        if not block.is_first:  # everyone sees the first key
            lse_before = lse[block.tiles]
            # Not logaddexp: how it rounds depends on where in a tensor a number stands.
            total = torch.maximum(lse_before, seen_lse)
            total = total + (lse_before - seen_lse).abs_().neg_().exp_().log1p_()
            old, new = (lse_before - total).exp(), (seen_lse - total).exp()
            seen_out = out[block.tiles] * old[..., None] + seen_out * new[..., None]
            seen_lse = total
        out[block.tiles], lse[block.tiles] = seen_out, seen_lse
    out = out.unflatten(2, (TILE, G)).transpose(1, 2).flatten(2, 3)
    return out[tiles.is_query_NQ].to(q_THD.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys, and the log of its weights' sum: -inf if none is seen."""
    if q.device.type == "cpu":
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(q, k, v, attn_mask=block.mask)  # 0 and 0 if none is seen
        return out.float(), lse.masked_fill(block.is_blind, -torch.inf)
    q, k, v = q.float(), k.float(), v.float()
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5 + block.mask
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def _gather(pages: Tensor, block: KeyBlock) -> Tensor:
    """(tiles, K, keys, D); a table that ends within the block is filled up with zeros."""
    found = pages.index_select(0, block.page_ids).unflatten(0, (-1, block.num_pages)).flatten(1, 2)
    num_tiles, _, _, size = block.mask.shape
    if found.shape[1] < size:
        found = F.pad(found, (0, 0, 0, 0, 0, size - found.shape[1]))
    if block.is_unused is not None:  # 0 times nan is nan
        found.masked_fill_(block.is_unused, 0.0)
    return found.transpose(1, 2).expand(num_tiles, -1, -1, -1)
