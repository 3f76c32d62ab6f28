"""Paged attention in plain torch: for a CPU, for fp32, and as the reference of the kernels.

Each query goes by itself (or in a tile of neighbours, where that gives the same bits), keys come in
blocks of one size, and blocks are merged by the sums of their weights. Prefill and decoding are the
same sums in the same order, whatever else is computed beside them: a query's result depends on its
own keys alone, to the last bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KEYS = 64
TILE = 8  # queries at neighbouring positions, the first a multiple of it; they share their keys
_is_same: dict[tuple, bool] = {}


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys at the same positions of one or more sequences, and the queries that see them."""

    queries: slice
    is_first: bool
    page_ids: Tensor
    """Of one sequence after the other."""
    mask: Tensor
    """(queries, 1, 1, keys), 0 or -inf."""
    is_tiled: bool
    """Queries are whole tiles, and all of one sequence."""


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """What of attention is the same for all layers.

    Tiles of a sequence stand together, then come all other queries, those that see most first: who
    sees a block of keys is always a slice.
    """

    order_T: Tensor
    """Which query stands at each place."""
    places_T: Tensor
    """Where each query stands."""
    blocks: list[KeyBlock]

    @staticmethod
    def of_chunks(
        starts_B: Tensor, lengths_B: Tensor, page_table_BP: Tensor, cache: Tensor
    ) -> "KeyBlocks":
        """Sequence b has `lengths_B[b]` queries, the first at position `starts_B[b]`.

        `cache` is any tensor (..., page, slot, kv head, D). Where a sequence's last page has slots
        left, they must hold zeros or anything else finite.
        """
        owner_T = torch.arange(len(starts_B), device=starts_B.device).repeat_interleave(lengths_B)
        row_T = torch.arange(len(owner_T), device=starts_B.device)
        position_T = starts_B[owner_T] + row_T - (lengths_B.cumsum(0) - lengths_B)[owner_T]
        first_B = -(-starts_B // TILE) * TILE
        end_B = (starts_B + lengths_B) // TILE * TILE
        is_in_tile_T = (position_T >= first_B[owner_T]) & (position_T < end_B[owner_T])
        rank_T = position_T.masked_fill(is_in_tile_T, torch.iinfo(torch.int64).max)
        order_T = rank_T.argsort(descending=True, stable=True)
        owner_T, position_T = owner_T[order_T], position_T[order_T]
        blocks = []
        for queries, page_table in _alike(end_B - first_B, owner_T, page_table_BP):
            blocks += _blocks(position_T[queries], queries.start, page_table, cache)
        places_T = torch.empty_like(order_T)
        places_T[order_T] = row_T
        return KeyBlocks(order_T, places_T, blocks)


def _alike(
    in_tiles_B: Tensor, owner_T: Tensor, page_table_BP: Tensor
) -> list[tuple[slice, Tensor]]:
    """Queries to go together: those in tiles, one sequence with its pages at a time; all others."""
    parts, end = [], 0
    for b, count in enumerate(in_tiles_B.tolist()):
        if count > 0:
            begin, end = end, end + count
            parts.append((slice(begin, end), page_table_BP[b][None]))
    if end < len(owner_T):
        parts.append((slice(end, len(owner_T)), page_table_BP[owner_T[end:]]))
    return parts


def _blocks(position_N: Tensor, start: int, page_table: Tensor, cache: Tensor) -> list[KeyBlock]:
    """The blocks of keys that queries see; `page_table` has a row for each of them, or for all.

    Positions ascend where the table is shared, and descend where it is not.
    """
    page_size = cache.shape[-3]
    size = page_size * max(1, KEYS // page_size)
    is_shared = len(page_table) == 1
    last_S = position_N.amax(0, keepdim=True) if is_shared else position_N
    blocks = []
    for first in range(0, int(position_N.max()) + 1, size):
        count = int((position_N >= first).sum())
        begin = len(position_N) - count if is_shared else 0
        members = slice(begin, begin + count)
        key = torch.arange(first, first + size, device=position_N.device)
        # Pages past a sequence's end may hold anything: its last page stands in for them.
        page_SP = torch.minimum(key[::page_size], last_S[:count, None]) // page_size
        is_hidden = (key > position_N[members, None])[:, None, None]
        mask = torch.zeros(is_hidden.shape, dtype=cache.dtype, device=position_N.device)
        blocks.append(
            KeyBlock(
                queries=slice(start + begin, start + begin + count),
                is_first=first == 0,
                page_ids=page_table[:count].gather(1, page_SP).flatten(),
                mask=mask.masked_fill_(is_hidden, -torch.inf),
                is_tiled=is_shared and count % TILE == 0,
            )
        )
    return blocks


def block_attention(q_THD: Tensor, k_pages: Tensor, v_pages: Tensor, keys: KeyBlocks) -> Tensor:
    """(T, H, D) queries against pages (page, slot, K, D)."""
    # (T, K, G, D): heads of a group share keys, as if they were so many queries.
    q = q_THD.index_select(0, keys.order_T).unflatten(1, (k_pages.shape[2], -1))
    out = torch.empty_like(q, dtype=torch.float32)
    lse = out.new_empty(q.shape[:3])
    for block in keys.blocks:
        k, v = (_gather(x, block) for x in (k_pages, v_pages))
        attend = _attend_tiles if block.is_tiled and _are_the_same_bits(q) else _attend
        seen_out, seen_lse = attend(q[block.queries], k, v, block.mask)
        block_out, block_lse = out[block.queries], lse[block.queries]
        if block.is_first:
            block_out.copy_(seen_out)
            block_lse.copy_(seen_lse)
            continue
        # Not logaddexp: how it rounds depends on where in a tensor a number stands.
        total = (block_lse - seen_lse).abs_().neg_().exp_().log1p_()
        total += torch.maximum(block_lse, seen_lse)
        block_out *= block_lse.sub_(total).exp_()[..., None]
        block_out += seen_out * seen_lse.sub_(total).exp_()[..., None]
        block_lse.copy_(total)
    return out.index_select(0, keys.places_T).flatten(1, 2).to(q_THD.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys, and the log of its weights' sum."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
    q, k, v = q.float(), k.float(), v.float()
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _attend_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with the queries of a tile side by side, as if they were heads of a group."""
    num_heads = q.shape[2]
    q = q.unflatten(0, (-1, TILE)).transpose(1, 2).flatten(2, 3)
    mask = mask.view(len(q), 1, TILE, 1, -1).expand(-1, -1, -1, num_heads, -1).flatten(2, 3)
    found = _attend(q, k[: len(q)], v[: len(q)], mask)
    out, lse = (x.unflatten(2, (TILE, -1)).transpose(1, 2).flatten(0, 1) for x in found)
    return out, lse


def _are_the_same_bits(q: Tensor) -> bool:
    """Whether tiles give what single queries do; one try tells, as kernels go by shapes alone."""
    key = q.dtype, q.device.type, q.shape[1:], torch.get_num_threads()
    if key not in _is_same:
        generator = torch.Generator().manual_seed(0)
        num_kv_heads, num_heads, head_dim = q.shape[1:]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(q)

        queries = normal(2 * TILE, num_kv_heads, num_heads, head_dim)
        k, v = (normal(1, num_kv_heads, KEYS, head_dim).expand(2 * TILE, -1, -1, -1) for _ in "kv")
        is_hidden = torch.arange(KEYS) > torch.arange(2 * TILE)[:, None] + KEYS // 2
        mask = q.new_zeros(2 * TILE, 1, 1, KEYS)
        mask.masked_fill_(is_hidden[:, None, None].to(q.device), -torch.inf)
        pairs = zip(*(f(queries, k, v, mask) for f in (_attend, _attend_tiles)), strict=True)
        _is_same[key] = all(torch.equal(*pair) for pair in pairs)
    return _is_same[key]


def _gather(pages: Tensor, block: KeyBlock) -> Tensor:
    """(queries, K, keys, D)"""
    num_queries, _, _, size = block.mask.shape
    found = pages.index_select(0, block.page_ids).view(-1, size, *pages.shape[2:])
    return found.transpose(1, 2).expand(num_queries, -1, -1, -1)
