"""Paged attention in plain torch: for a CPU, for fp32, and as the reference of the kernels.

Queries go in tiles of a few neighbours, keys in blocks of one size, and blocks are merged with the
usual running maximum. Prefill and decoding are the same sums in the same order, whatever else is
computed beside them: a query's result depends on its own keys alone, to the last bit.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 4
KEYS = 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries in tiles of one sequence each."""

    rows_NQ: Tensor
    """Which query stands at each place; any, where the tile is not full."""
    is_query_NQ: Tensor
    positions_NQ: Tensor
    page_table_NP: Tensor
    reached: list[Tensor]
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
        return Tiles(
            rows_NQ=first_B[owner_N, None] + place_NQ,
            is_query_NQ=is_query_NQ,
            positions_NQ=positions_NQ,
            page_table_NP=page_table_BP[owner_N].long(),
            reached=[(last_N >= first).nonzero()[:, 0] for first in blocks],
        )


def block_size(page_size: int) -> int:
    """Keys of a block: whole pages."""
    return page_size * max(1, KEYS // page_size)


def tiled_attention(q_THD: Tensor, k_pages: Tensor, v_pages: Tensor, tiles: Tiles) -> Tensor:
    """(T, H, D) queries against pages (page, slot, K, D), in fp32."""
    page_size, K, D = k_pages.shape[1:]
    num_tiles = len(tiles.rows_NQ)
    # (N, Q, K, G, D) -> (N, K, Q * G, D): heads of a group share keys as further queries.
    q = (q_THD.float() * D**-0.5)[tiles.rows_NQ].unflatten(2, (K, -1)).transpose(1, 2)
    G = q.shape[3]
    q = q.flatten(2, 3)
    m = q.new_full((num_tiles, K, TILE * G, 1), -torch.inf)
    total, acc = torch.zeros_like(m), torch.zeros_like(q)
    size = block_size(page_size)
    for i, reached in enumerate(tiles.reached):
        pages = tiles.page_table_NP[reached, i * size // page_size : (i + 1) * size // page_size]
        k, v = (_gather(x, pages, size) for x in (k_pages, v_pages))
        scores = q[reached] @ k.transpose(2, 3)
        key = torch.arange(i * size, (i + 1) * size, device=q.device)
        is_hidden = key > tiles.positions_NQ[reached].repeat_interleave(G, 1)[:, None, :, None]
        scores = scores.masked_fill_(is_hidden, -torch.inf)
        m_old = m[reached]
        m_new = torch.maximum(m_old, scores.amax(-1, keepdim=True))
        weights = (scores - m_new).exp_()
        rescale = (m_old - m_new).exp_()
        total[reached] = total[reached] * rescale + weights.sum(-1, keepdim=True)
        acc[reached] = acc[reached] * rescale + weights @ v
        m[reached] = m_new
    out = (acc / total).unflatten(2, (TILE, G)).transpose(1, 2).flatten(2, 3)
    return out[tiles.is_query_NQ].to(q_THD.dtype)


def _gather(pages: Tensor, page_ids_NP: Tensor, size: int) -> Tensor:
    """(N, K, size, D) in fp32; a table that ends within the block is filled up with zeros."""
    found = pages[page_ids_NP].flatten(1, 2).float()
    return F.pad(found, (0, 0, 0, 0, 0, size - found.shape[1])).transpose(1, 2)
