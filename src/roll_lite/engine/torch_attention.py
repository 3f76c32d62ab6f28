"""Paged attention in plain torch: for CPU, for fp32, and as the reference for the kernels.

Queries are computed one by one (or in tiles of neighbours, where that gives the same bits), keys in
blocks of a fixed size, and blocks are merged by their log-sum-exp. Prefill and decode do the same
sums in the same order in any batch: a query's result depends only on its own keys, to the last bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

KEYS = 64  # keys of a block, where pages are not larger
TILE = 8  # queries at neighbouring positions, starting at a multiple of TILE; they share keys
GATHERED_BLOCKS = 1024  # blocks that are copied out of their pages at a time
_is_same: dict[tuple, bool] = {}


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A block of keys of one sequence, and the queries that see it."""

    queries: slice
    is_first: bool
    page_ids: Tensor
    mask: Tensor
    """(queries, 1, 1, keys), 0 or -inf."""
    is_tiled: bool
    """The queries are whole tiles."""


@dataclass(frozen=True, slots=True)
class OwnBlocks:
    """All blocks of keys that single queries of many sequences see, one query per block."""

    owner_N: Tensor
    """Place of each block's query in the sorted order."""
    mask: Tensor
    """(blocks, 1, 1, keys), 0 or -inf."""
    pages: Tensor | slice
    """Ids (blocks, pages), or a slice of the cache that contains the blocks; results of pages in
    the slice that are no block of these are not used."""
    merges: list[tuple[slice, Tensor]]
    """For first blocks, second blocks and so on: places of queries, and the block of each."""


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """The part of attention that is the same for all layers.

    Queries are sorted: first the tiles of each sequence, then all other queries, those with most
    keys first. So the queries that see a block of keys are always a slice.
    """

    order_T: Tensor
    """The query at each place."""
    places_T: Tensor
    """The place of each query."""
    shared: list[SharedBlock]
    own: OwnBlocks | None

    @staticmethod
    def of_chunks(
        starts_B: Tensor, lengths_B: Tensor, page_table_BP: Tensor, cache: Tensor
    ) -> "KeyBlocks":
        """Sequence b has `lengths_B[b]` queries, the first at position `starts_B[b]`.

        `cache` is any tensor (..., page, slot, kv head, D). Unused slots of a sequence's last page
        must hold finite numbers.
        """
        owner_T = torch.arange(len(starts_B), device=starts_B.device).repeat_interleave(lengths_B)
        row_T = torch.arange(len(owner_T), device=starts_B.device)
        position_T = starts_B[owner_T] + row_T - (lengths_B.cumsum(0) - lengths_B)[owner_T]
        first_B = -(-starts_B // TILE) * TILE
        end_B = (starts_B + lengths_B) // TILE * TILE
        is_in_tile_T = (position_T >= first_B[owner_T]) & (position_T < end_B[owner_T])
        rank_T = position_T.masked_fill(is_in_tile_T, torch.iinfo(torch.int64).max)
        order_T = rank_T.argsort(descending=True, stable=True)
        owner_T = owner_T[order_T]
        position_T = position_T[order_T]
        shared: list[SharedBlock] = []
        end = 0
        for b, count in enumerate((end_B - first_B).tolist()):
            if count > 0:
                tiles = position_T[end : end + count]
                shared += _shared_blocks(tiles, end, page_table_BP[b], cache)
                end += count
        own = None
        if end < len(owner_T):
            own = _own_blocks(position_T[end:], end, page_table_BP[owner_T[end:]], cache)
        places_T = torch.empty_like(order_T)
        places_T[order_T] = row_T
        return KeyBlocks(order_T, places_T, shared, own)


def _block_size(cache: Tensor) -> int:
    page_size = cache.shape[-3]
    return page_size * max(1, KEYS // page_size)


def _pages_and_mask(
    first_key_N: Tensor, position_N: Tensor, last_N: Tensor, cache: Tensor
) -> tuple[Tensor, Tensor]:
    """The pages of each block, and the mask for a query at a position.

    Pages beyond a sequence's end may hold anything, so its last page replaces them.
    """
    key_S = torch.arange(_block_size(cache), device=position_N.device)
    key_NS = first_key_N[:, None] + key_S
    page_size = cache.shape[-3]
    page_NP = torch.minimum(key_NS[:, ::page_size], last_N[:, None]) // page_size
    is_hidden_NS = key_NS > position_N[:, None]
    mask_NS = torch.zeros(is_hidden_NS.shape, dtype=cache.dtype, device=position_N.device)
    return page_NP, mask_NS.masked_fill_(is_hidden_NS, -torch.inf)[:, None, None]


def _shared_blocks(
    position_N: Tensor, start: int, page_table_P: Tensor, cache: Tensor
) -> Iterator[SharedBlock]:
    """Blocks of one sequence for its tiles, whose queries are at ascending positions."""
    size = _block_size(cache)
    for first in range(0, int(position_N[-1]) + 1, size):
        begin = int((position_N < first).sum())
        seen_N = position_N[begin:]
        first_N = torch.full_like(seen_N, first)
        page_NP, mask = _pages_and_mask(first_N, seen_N, position_N[-1:].expand_as(seen_N), cache)
        yield SharedBlock(
            queries=slice(start + begin, start + len(position_N)),
            is_first=first == 0,
            page_ids=page_table_P[page_NP[0]],
            mask=mask,
            is_tiled=len(seen_N) % TILE == 0,
        )


def _own_blocks(position_N: Tensor, start: int, page_table_NP: Tensor, cache: Tensor) -> OwnBlocks:
    """Blocks of single queries at descending positions, each with its row of the page table."""
    size = _block_size(cache)
    firsts = range(0, int(position_N[0]) + 1, size)
    counts = [int((position_N >= first).sum()) for first in firsts]
    owner_N = torch.cat([torch.arange(count, device=position_N.device) for count in counts])
    first_N = torch.tensor(firsts, device=position_N.device).repeat_interleave(
        torch.tensor(counts, device=position_N.device)
    )
    position_N = position_N[owner_N]
    page_NP, mask = _pages_and_mask(first_N, position_N, position_N, cache)
    page_NP = page_table_NP[owner_N[:, None], page_NP]
    block_N = torch.arange(len(owner_N), device=owner_N.device)
    places = [slice(start, start + count) for count in counts]
    owner_N = owner_N + start
    if pages := _contiguous(page_NP):
        block_N = page_NP[:, 0].long() - pages.start
        num_blocks = pages.stop - pages.start
        owner_N = owner_N.new_full((num_blocks,), start).index_copy_(0, block_N, owner_N)
        mask = mask.new_zeros(num_blocks, *mask.shape[1:]).index_copy_(0, block_N, mask)
    merges = list(zip(places, block_N.split(counts), strict=True))
    return OwnBlocks(owner_N, mask, pages or page_NP, merges)


def _contiguous(page_NP: Tensor) -> slice | None:
    """A slice of the cache to read in place, if it has each block once and little else."""
    first = int(page_NP.min())
    end = int(page_NP.max()) + 1
    if page_NP.shape[1] > 1 or end - first > 1.5 * len(page_NP):
        return None
    counts = torch.bincount(page_NP[:, 0] - first)
    return slice(first, end) if int(counts.max()) == 1 else None


def block_attention(q_THD: Tensor, k_pages: Tensor, v_pages: Tensor, keys: KeyBlocks) -> Tensor:
    """(T, H, D) queries against pages (page, slot, K, D)."""
    # (T, K, G, D): heads of a group share keys, as if they were queries.
    q = q_THD.index_select(0, keys.order_T).unflatten(1, (k_pages.shape[2], -1))
    out = torch.empty_like(q, dtype=torch.float32)
    lse = out.new_empty(q.shape[:3])

    def merge(places: slice, is_first: bool, seen_out: Tensor, seen_lse: Tensor) -> None:
        so_far_out = out[places]
        so_far_lse = lse[places]
        if is_first:
            so_far_out.copy_(seen_out)
            so_far_lse.copy_(seen_lse)
            return
        # Not logaddexp, whose rounding depends on the index of a number in its tensor.
        total = (so_far_lse - seen_lse).abs_().neg_().exp_().log1p_()
        total += torch.maximum(so_far_lse, seen_lse)
        so_far_out *= so_far_lse.sub_(total).exp_()[..., None]
        so_far_out += seen_out * (seen_lse - total).exp_()[..., None]
        so_far_lse.copy_(total)

    for block in keys.shared:
        k, v = (_gathered(x, block.page_ids[None]) for x in (k_pages, v_pages))
        attend = _attend_tiles if block.is_tiled and _are_the_same_bits(q, k) else _attend
        merge(block.queries, block.is_first, *attend(q[block.queries], k, v, block.mask))
    if keys.own:
        seen_out, seen_lse = _attend_own(q, k_pages, v_pages, keys.own)
        for i, (places, block_N) in enumerate(keys.own.merges):
            merge(places, i == 0, seen_out[block_N], seen_lse[block_N])
    return out.index_select(0, keys.places_T).flatten(1, 2).to(q_THD.dtype)


def _attend_own(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, own: OwnBlocks
) -> tuple[Tensor, Tensor]:
    if isinstance(own.pages, slice):
        k, v = (x[own.pages].transpose(1, 2) for x in (k_pages, v_pages))
        return _attend(q[own.owner_N], k, v, own.mask)
    found = []
    parts = (x.split(GATHERED_BLOCKS) for x in (own.owner_N, own.pages, own.mask))
    for owner_N, page_NP, mask in zip(*parts, strict=True):
        k, v = (_gathered(x, page_NP) for x in (k_pages, v_pages))
        found.append(_attend(q[owner_N], k, v, mask))
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys per query, or one for all queries; and its log-sum-exp."""
    k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
    q, k, v = q.float(), k.float(), v.float()
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _attend_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`_attend` to one block, with the queries of a tile treated like heads of a group."""
    num_heads = q.shape[2]
    q = q.unflatten(0, (-1, TILE)).transpose(1, 2).flatten(2, 3)
    mask = mask.view(len(q), 1, TILE, 1, -1).expand(-1, -1, -1, num_heads, -1).flatten(2, 3)
    out, lse = (
        x.unflatten(2, (TILE, -1)).transpose(1, 2).flatten(0, 1) for x in _attend(q, k, v, mask)
    )
    return out, lse


def _are_the_same_bits(q: Tensor, k: Tensor) -> bool:
    """Whether tiles give the same bits as single queries.

    A kernel's order of additions depends on shapes alone, so one trial decides. The trial's
    weighted values cancel, so that a different order shows even in 16 bits.
    """
    num_kv_heads, num_keys, head_dim = k.shape[1:]
    key = q.dtype, q.device.type, q.shape[1:], num_keys, torch.get_num_threads()
    if key not in _is_same:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(q)

        queries = normal(2 * TILE, *q.shape[1:])
        k, v = (normal(1, num_kv_heads, num_keys // 2, head_dim) for _ in "kv")
        rest = normal(1, num_kv_heads, num_keys % 2, head_dim)
        k = torch.cat([k, k, rest], 2)
        v = torch.cat([v, -v, 0 * rest], 2)
        mask = q.new_zeros(2 * TILE, 1, 1, num_keys)
        pairs = zip(*(f(queries, k, v, mask) for f in (_attend, _attend_tiles)), strict=True)
        _is_same[key] = all(torch.equal(*pair) for pair in pairs)
    return _is_same[key]


def _gathered(pages: Tensor, page_NP: Tensor) -> Tensor:
    """(blocks, K, keys, D)"""
    found = pages.index_select(0, page_NP.flatten())
    return found.view(len(page_NP), -1, *pages.shape[2:]).transpose(1, 2)
