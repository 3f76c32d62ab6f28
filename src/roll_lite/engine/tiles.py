"""Paged attention in plain torch: for a CPU, for fp32, and as the reference of the kernels.

Queries go in tiles of a few neighbours, keys in blocks of one size, and blocks are merged by the
sums of their weights. Prefill and decoding are the same sums in the same order, whatever else is
computed beside them: a query's result depends on its own keys alone, to the last bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 2
KEYS = 64
LONG = 8  # tiles of a sequence from which on it is worth a gathering of its keys for itself


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys at the same positions of one or more sequences, and the tiles that see them."""

    tiles: slice
    is_first: bool
    page_ids: Tensor
    """Of one sequence after the other."""
    mask: Tensor
    """(tiles, 1, queries of a kv head, keys), 0 or -inf."""
    is_blind: Tensor | None
    """(tiles, 1, queries of a kv head): queries that see none of these keys, if there are any."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries in tiles of one sequence each: what is the same for all layers.

    Tiles of a long sequence stand together, then come all others, those that see most first: who
    sees a block of keys is always a slice.
    """

    sources: Tensor
    """(tiles * K * TILE,): which of the (T, K) groups of queries stands at each place; one again,
    where the tile is not full."""
    places: Tensor
    """(T * K,): where each of them stands."""
    blocks: list[KeyBlock]

    @staticmethod
    def of_chunks(
        starts_B: Tensor, lengths_B: Tensor, page_table_BP: Tensor, cache: Tensor, num_heads: int
    ) -> "Tiles":
        """Sequence b has `lengths_B[b]` queries, the first at position `starts_B[b]`.

        `cache` is any tensor (..., page, slot, kv head, D). Where a sequence's last page has slots
        left, they must hold zeros or anything else finite.
        """
        device, num_kv_heads = lengths_B.device, cache.shape[-2]
        num_tiles_B = (lengths_B + TILE - 1) // TILE
        owner_N, tile_N = _in_order(starts_B, num_tiles_B)
        place_NQ = tile_N[:, None] * TILE + torch.arange(TILE, device=device)
        is_query_NQ = place_NQ < lengths_B[owner_N, None]
        place_NQ *= is_query_NQ  # places left over are the first query once more
        positions_NQ = starts_B[owner_N, None] + place_NQ
        positions_NM = positions_NQ.repeat_interleave(num_heads // num_kv_heads, 1)
        blocks = []
        for tiles, page_table in _alike(num_tiles_B, owner_N, page_table_BP):
            blocks += _key_blocks(positions_NM, tiles, page_table, cache)

        first_B = lengths_B.cumsum(0) - lengths_B
        rows_NQ = first_B[owner_N, None] + place_NQ
        head_K1 = torch.arange(num_kv_heads, device=device)[:, None]
        sources = (rows_NQ[:, None] * num_kv_heads + head_K1).flatten()
        queries = is_query_NQ[:, None].expand(-1, num_kv_heads, -1).flatten().nonzero()[:, 0]
        places = torch.empty_like(queries)
        places[sources[queries]] = queries
        return Tiles(sources, places, blocks)


def _in_order(starts_B: Tensor, num_tiles_B: Tensor) -> tuple[Tensor, Tensor]:
    """Each tile's sequence and its number there; of short sequences, those that see most first."""
    owner_N = torch.arange(len(starts_B), device=starts_B.device).repeat_interleave(num_tiles_B)
    tile_N = torch.arange(len(owner_N), device=starts_B.device)
    tile_N -= (num_tiles_B.cumsum(0) - num_tiles_B)[owner_N]
    position_N = starts_B[owner_N] + tile_N * TILE
    position_N[num_tiles_B[owner_N] >= LONG] = torch.iinfo(torch.int64).max
    order_N = position_N.argsort(descending=True, stable=True)
    return owner_N[order_N], tile_N[order_N]


def _alike(
    num_tiles_B: Tensor, owner_N: Tensor, page_table_BP: Tensor
) -> list[tuple[slice, Tensor]]:
    """Tiles to go together: those of each long sequence, with its pages, and all others."""
    parts, end = [], 0
    for b, num_tiles in enumerate(num_tiles_B.tolist()):
        if num_tiles >= LONG:
            begin, end = end, end + num_tiles
            parts.append((slice(begin, end), page_table_BP[b][None]))
    if end < len(owner_N):
        parts.append((slice(end, len(owner_N)), page_table_BP[owner_N[end:]]))
    return parts


def _key_blocks(
    positions_NM: Tensor, tiles: slice, page_table: Tensor, cache: Tensor
) -> list[KeyBlock]:
    """The blocks of keys that some tiles see; `page_table` has a row for each tile or for all."""
    page_size = cache.shape[-3]
    size = page_size * max(1, KEYS // page_size)
    last_N = positions_NM[tiles].amax(1)
    is_shared = len(page_table) == 1
    last_S = last_N.amax(0, keepdim=True) if is_shared else last_N
    blocks = []
    for first in range(0, int(last_N.max()) + 1, size):
        num_tiles = int((last_N >= first).sum())
        begin = tiles.stop - num_tiles if is_shared else tiles.start
        members = slice(begin, begin + num_tiles)
        key = torch.arange(first, first + size, device=last_N.device)
        # Pages past a sequence's end may hold anything: its last page stands in for them.
        page_SP = torch.minimum(key[::page_size], last_S[:num_tiles, None]) // page_size
        is_hidden = (key > positions_NM[members, :, None])[:, None]
        mask = torch.zeros(is_hidden.shape, dtype=cache.dtype, device=last_N.device)
        is_blind = is_hidden[..., 0]
        blocks.append(
            KeyBlock(
                tiles=members,
                is_first=first == 0,
                page_ids=page_table[:num_tiles].gather(1, page_SP).flatten(),
                mask=mask.masked_fill_(is_hidden, -torch.inf),
                is_blind=is_blind if is_blind.any() else None,
            )
        )
    return blocks


def tiled_attention(q_THD: Tensor, k_pages: Tensor, v_pages: Tensor, tiles: Tiles) -> Tensor:
    """(T, H, D) queries against pages (page, slot, K, D)."""
    T, H, D = q_THD.shape
    K = k_pages.shape[2]
    # (N, K, Q * G, D): heads of a group share keys as further queries.
    q = q_THD.reshape(T * K, -1).index_select(0, tiles.sources).view(-1, K, TILE * H // K, D)
    out = torch.empty_like(q, dtype=torch.float32)
    lse = out.new_empty(q.shape[:3])
    for block in tiles.blocks:
        k, v = (_gather(x, block) for x in (k_pages, v_pages))
        seen_out, seen_lse = _attend(q[block.tiles], k, v, block)
        block_out, block_lse = out[block.tiles], lse[block.tiles]
        if block.is_first:  # everyone sees the first key
            block_out.copy_(seen_out)
            block_lse.copy_(seen_lse)
            continue
        # Not logaddexp: how it rounds depends on where in a tensor a number stands.
        total = (block_lse - seen_lse).abs_().neg_().exp_().log1p_()
        total += torch.maximum(block_lse, seen_lse)
        block_out *= block_lse.sub_(total).exp_()[..., None]
        block_out += seen_out * seen_lse.sub_(total).exp_()[..., None]
        block_lse.copy_(total)
    return out.view(-1, H // K * D).index_select(0, tiles.places).view(T, H, D).to(q_THD.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys, and the log of its weights' sum: -inf if none is seen."""
    if q.device.type == "cpu":
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(q, k, v, attn_mask=block.mask)  # 0 and 0 if none is seen
        return out, lse if block.is_blind is None else lse.masked_fill(block.is_blind, -torch.inf)
    q, k, v = q.float(), k.float(), v.float()
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5 + block.mask
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def _gather(pages: Tensor, block: KeyBlock) -> Tensor:
    """(tiles, K, keys, D)"""
    num_tiles, _, _, size = block.mask.shape
    found = pages.index_select(0, block.page_ids).view(-1, size, *pages.shape[2:])
    return found.transpose(1, 2).expand(num_tiles, -1, -1, -1)
