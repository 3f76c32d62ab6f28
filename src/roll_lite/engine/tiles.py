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
class Tiles:
    """Queries in tiles of one sequence each."""

    rows_NQ: Tensor
    """Which query stands at each place; any, where the tile is not full."""
    is_query_NQ: Tensor
    positions_NQ: Tensor
    page_table_NP: Tensor
    reached: list[Tensor | slice]
    """For each block of keys: the tiles that reach it."""

    @staticmethod
    def of_chunks(
        starts_B: Tensor, lengths_B: Tensor, page_table_BP: Tensor, page_size: int
    ) -> "Tiles":
        """Sequence b has `lengths_B[b]` queries, the first at position `starts_B[b]`."""
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
        last_N = positions_NQ.amax(1)
        blocks = range(0, int(last_N.max()) + 1, block_size(page_size))
        shortest = int(last_N.min())
        return Tiles(
            rows_NQ=first_B[owner_N, None] + place_NQ,
            is_query_NQ=is_query_NQ,
            positions_NQ=positions_NQ,
            page_table_NP=page_table_BP[owner_N].long(),
            reached=[
                slice(None) if first <= shortest else (last_N >= first).nonzero()[:, 0]
                for first in blocks
            ],
        )


def block_size(page_size: int) -> int:
    """Keys of a block: whole pages."""
    return page_size * max(1, KEYS // page_size)


def tiled_attention(q_THD: Tensor, k_pages: Tensor, v_pages: Tensor, tiles: Tiles) -> Tensor:
    """(T, H, D) queries against pages (page, slot, K, D), in fp32."""
    page_size, K = k_pages.shape[1:3]
    # (N, Q, K, G, D) -> (N, K, Q * G, D): heads of a group share keys as further queries.
    q = q_THD.float()[tiles.rows_NQ].unflatten(2, (K, -1)).transpose(1, 2)
    G = q.shape[3]
    q = q.flatten(2, 3)
    positions_NQ = tiles.positions_NQ.repeat_interleave(G, 1)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    size = block_size(page_size)
    pages_per_block = size // page_size
    for i, reached in enumerate(tiles.reached):
        pages_NP = tiles.page_table_NP[reached, i * pages_per_block : (i + 1) * pages_per_block]
        k, v = (_gather(x, pages_NP, size) for x in (k_pages, v_pages))
        key = torch.arange(i * size, (i + 1) * size, device=q.device)
        is_seen = key <= positions_NQ[reached, :, None]
        block_out, block_lse = _attend(q[reached], k, v, is_seen[:, None])
        total = torch.logaddexp(lse[reached], block_lse)
        old, new = (lse[reached] - total).exp(), (block_lse - total).exp()
        out[reached] = out[reached] * old[..., None] + block_out * new[..., None]
        lse[reached] = total
    out = out.unflatten(2, (TILE, G)).transpose(1, 2).flatten(2, 3)
    return out[tiles.is_query_NQ].to(q_THD.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys, and the log of its weights' sum: -inf if none is seen."""
    mask = torch.zeros(is_seen.shape, device=q.device).masked_fill_(~is_seen, -torch.inf)
    if q.device.type == "cpu":
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(q, k, v, attn_mask=mask)  # which has 0 for both if none is seen
        return out, lse.masked_fill(~is_seen.any(-1), -torch.inf)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def _gather(pages: Tensor, page_ids_NP: Tensor, size: int) -> Tensor:
    """(N, K, size, D) in fp32; a table that ends within the block is filled up with zeros."""
    found = pages[page_ids_NP].flatten(1, 2).float()
    if found.shape[1] < size:
        found = F.pad(found, (0, 0, 0, 0, 0, size - found.shape[1]))
    return found.transpose(1, 2)
