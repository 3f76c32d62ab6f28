"""Mixture of experts without gradients: routing, and the products of the chosen experts.

A pair is a token and one of its K experts. Pairs are listed by expert, in their order; a tile is
up to `rows` pairs of one expert. Grids and buffers depend on shapes alone, so that a CUDA graph can
capture them. Nothing is added atomically: equal inputs give equal bits.

Shape suffixes: T tokens, K experts of a token, P = T * K pairs, E experts, H hidden, F inner width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 8192  # ids that one program of `list_pairs` reads


def route(logits_TE: Tensor, num: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Experts (int32) and weights: softmax over all in fp32, then the largest `num`, largest first.

    Of equal logits the lower index comes first. A row with NaN has valid experts and NaN weights.
    """
    T, E = logits_TE.shape
    ids_TK = torch.empty(T, num, dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty(T, num, dtype=logits_TE.dtype, device=logits_TE.device)
    if T:
        _route[(T,)](
            logits_TE, ids_TK, weights_TK, E, logits_TE.stride(0), RENORMALIZE=renormalize, K=num,
            K_PAD=triton.next_power_of_2(num), E_PAD=triton.next_power_of_2(E), num_warps=1,
        )  # fmt: skip
    return ids_TK, weights_TK


@triton.jit
def _route(
    logits_ptr, ids_ptr, weights_ptr, E, row_stride,
    RENORMALIZE: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    nothing = -float("inf")
    logits = tl.load(logits_ptr + row * row_stride + e, mask=e < E, other=nothing).to(tl.float32)
    probs = tl.exp(logits - tl.max(logits, 0))
    probs = probs / tl.sum(probs, 0)
    # -inf and NaN stay above padding and what was chosen, so that ids are valid and differ.
    rest = tl.where(e < E, tl.where(logits > -3e38, logits, -3e38), nothing)
    ids = tl.zeros([K_PAD], tl.int32)
    chosen = tl.zeros([K_PAD], tl.float32)
    for i in range(K):
        best = tl.argmax(rest, 0)  # the leftmost
        ids = tl.where(k == i, best, ids)
        chosen = tl.where(k == i, tl.sum(tl.where(e == best, probs, 0.0), 0), chosen)
        rest = tl.where(e == best, nothing, rest)
    if RENORMALIZE:
        chosen = chosen / tl.sum(chosen, 0)
    tl.store(ids_ptr + row * K + k, ids, mask=k < K)
    tl.store(weights_ptr + row * K + k, chosen.to(weights_ptr.dtype.element_ty), mask=k < K)


class PairLists(NamedTuple):
    pairs_P: Tensor
    """Pairs by expert, in order; behind `starts_E1[-1]` undefined."""
    starts_E1: Tensor
    """Where an expert's pairs begin, and the end of the last."""
    tiles_3N: Tensor
    """Expert, first place in `pairs_P` and end; unused tiles end before they begin."""
    shape: tuple[int, int]
    """Tokens, and experts of each."""


def list_pairs(
    ids_TK: Tensor, num_experts: int, first_expert: int, rows: int, num_pairs: int | None = None
) -> PairLists:
    """Pairs of the `num_experts` experts from `first_expert` on, in tiles of `rows`.

    `num_pairs` bounds their number, where not all of `ids_TK` are of these experts.
    """
    assert ids_TK.is_contiguous()
    P = ids_TK.numel()
    most = P if num_pairs is None else num_pairs
    num_tiles = most // rows + min(num_experts, most)
    shapes = (most,), (num_experts + 1,), (3, num_tiles)
    new = {"dtype": torch.int32, "device": ids_TK.device}
    lists = PairLists(*(torch.empty(shape, **new) for shape in shapes), tuple(ids_TK.shape))
    num_chunks = triton.cdiv(P, CHUNK)
    chunk = max(128, triton.next_power_of_2(min(P, CHUNK)))
    sizes = {"CHUNK": chunk, "E_PAD": max(32, triton.next_power_of_2(num_experts))}
    num_warps = max(4, min(16, chunk // 512))
    ends_CE = lists.starts_E1  # not read
    if num_chunks > 1:
        counts_CE = torch.empty(num_chunks, num_experts, **new)
        _count[(num_chunks,)](
            ids_TK, counts_CE, P, first_expert, num_experts, **sizes, num_warps=num_warps
        )
        ends_CE = counts_CE.cumsum(0, dtype=torch.int32)
    _list_pairs[(num_experts, num_chunks)](
        ids_TK, ends_CE, *lists[:3], P, first_expert, num_experts, num_tiles,
        ONE_CHUNK=num_chunks == 1, ROWS=rows, **sizes, num_warps=num_warps,
    )  # fmt: skip
    return lists


@triton.jit
def _load_ids(ids_ptr, pair, P, first_expert, E):
    """Experts counted from the first that is here, and which of them are here."""
    ids = tl.load(ids_ptr + pair, mask=pair < P, other=0).to(tl.int32) - first_expert
    return ids, (pair < P) & (ids >= 0) & (ids < E)


@triton.jit(do_not_specialize=["P", "first_expert"])
def _count(ids_ptr, counts_ptr, P, first_expert, E, CHUNK: tl.constexpr, E_PAD: tl.constexpr):
    chunk = tl.program_id(0)
    ids, here = _load_ids(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), P, first_expert, E)
    e = tl.arange(0, E_PAD)
    tl.store(counts_ptr + chunk * E + e, tl.histogram(ids, E_PAD, mask=here), mask=e < E)


@triton.jit(do_not_specialize=["P", "first_expert", "num_tiles"])
def _list_pairs(
    ids_ptr, ends_ptr, pairs_ptr, starts_ptr, tiles_ptr, P, first_expert, E, num_tiles,
    ONE_CHUNK: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """The pairs of one expert in one chunk; `ends_ptr` has the counts up to and with each chunk."""
    expert, chunk = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, E_PAD)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    ids, here = _load_ids(ids_ptr, pair, P, first_expert, E)
    mine = (here & (ids == expert)).to(tl.int32)
    rank = tl.cumsum(mine, 0)
    if ONE_CHUNK:
        counts = tl.histogram(ids, E_PAD, mask=here)
        before = 0
    else:
        last = (tl.num_programs(1) - 1) * E
        counts = tl.load(ends_ptr + last + e, mask=e < E, other=0)
        before = tl.load(ends_ptr + chunk * E + expert) - tl.sum(mine, 0)
    start = tl.sum(tl.where(e < expert, counts, 0), 0)
    tl.store(pairs_ptr + start + before + rank - 1, pair, mask=mine == 1)
    if chunk == 0:
        end = start + tl.sum(tl.where(e == expert, counts, 0), 0)
        tl.store(starts_ptr + expert, start)
        first_tile = tl.sum(tl.where(e < expert, (counts + ROWS - 1) // ROWS, 0), 0)
        next_tile = first_tile + (end - start + ROWS - 1) // ROWS
        if expert == E - 1:
            tl.store(starts_ptr + E, end)
            next_tile = num_tiles
        for i in range(0, next_tile - first_tile, 128):
            tile = i + tl.arange(0, 128)
            ok = first_tile + tile < next_tile
            place = tiles_ptr + first_tile + tile
            tl.store(place, expert + 0 * tile, mask=ok)
            tl.store(place + num_tiles, start + tile * ROWS, mask=ok)
            tl.store(place + 2 * num_tiles, tl.minimum(start + tile * ROWS + ROWS, end), mask=ok)


class Block(NamedTuple):
    """How programs of a product cut it: columns and depth of a step, warps, steps loaded ahead."""

    columns: int
    depth: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    rows: int
    gate_up: Block
    down: Block


# By the mean number of pairs of an expert, at most.
TILES = (
    (8, Tiles(16, Block(32, 128, 4, 4), Block(64, 128, 4, 3))),
    (20, Tiles(32, Block(32, 128, 4, 4), Block(64, 128, 4, 3))),
    (40, Tiles(64, Block(64, 64, 4, 4), Block(128, 64, 4, 4))),
    (128, Tiles(128, Block(64, 64, 8, 3), Block(128, 64, 8, 3))),
    (float("inf"), Tiles(128, Block(128, 64, 8, 4), Block(256, 64, 8, 4))),
)


def tiles_for(num_pairs: int, num_experts: int) -> Tiles:
    return next(tiles for most, tiles in TILES if num_pairs <= most * num_experts)


def expert_mlp(
    x_TH: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    first_expert: int = 0,
    tiles: Tiles | None = None,
) -> Tensor:
    """Sum over K of weight * down(silu(gate x) * up x); experts that are elsewhere add nothing.

    Products add in fp32. Rounded to x's dtype are gate, up, silu, its product with up, and the
    output of down; the weighted sum adds in fp32 in the order of K and is rounded once. A row's
    bits depend on other rows only through the choice of `tiles_for`.
    """
    E, _, F, _ = gate_up_E2FH.shape
    if not len(x_TH):
        return torch.empty_like(x_TH)
    tiles = tiles or tiles_for(ids_TK.numel(), E)
    lists = list_pairs(ids_TK, E, first_expert, tiles.rows)
    act_PF = x_TH.new_empty(ids_TK.numel(), F)
    gate_up(x_TH, gate_up_E2FH, lists, act_PF, None, tiles.rows, tiles.gate_up)
    out_PH = multiply(act_PF, down_EHF.transpose(1, 2), lists, tiles.rows, tiles.down)
    return sum_pairs(out_PH, ids_TK, weights_TK, first_expert, E)


def depth_of(block: Block, dtype: torch.dtype) -> int:
    return block.depth * 2 // dtype.itemsize  # as many bytes as in 16 bits


def gate_up(
    x_TH: Tensor,
    gate_up_E2FH: Tensor,
    lists: PairLists,
    act_PF: Tensor,
    saved_P2F: Tensor | None,
    rows: int,
    block: Block,
) -> None:
    """silu(gate) * up of the listed pairs into `act_PF`; gate and up into `saved_P2F` if given."""
    assert x_TH.is_contiguous() and gate_up_E2FH.is_contiguous()
    H, F = x_TH.shape[1], act_PF.shape[1]
    depth, num_tiles = depth_of(block, x_TH.dtype), lists.tiles_3N.shape[1]
    _gate_up[(triton.cdiv(F, block.columns), num_tiles)](
        x_TH, gate_up_E2FH, lists.pairs_P, lists.tiles_3N,
        act_PF, act_PF if saved_P2F is None else saved_P2F, H, F, num_tiles,
        K=lists.shape[1], SAVE=saved_P2F is not None, EVEN=H % depth == 0,
        ROWS=rows, COLUMNS=block.columns, DEPTH=depth,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up(
    x_ptr, weight_ptr, pairs_ptr, tiles_ptr, act_ptr, saved_ptr, H, F, num_tiles,
    K: tl.constexpr, SAVE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    start, end = tl.load(tiles_ptr + num_tiles + tile), tl.load(tiles_ptr + 2 * num_tiles + tile)
    if start < end:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        row, f = start + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        h = tl.arange(0, DEPTH)
        row_ok, f_ok = row[:, None] < end, f[None, :] < F
        token = tl.load(pairs_ptr + row, mask=row < end, other=0).to(tl.int64) // K
        x_ptrs = x_ptr + token[:, None] * H + h[None, :]
        gate_ptrs = weight_ptr + expert * 2 * F * H + f[None, :] * H + h[:, None]
        up_ptrs = gate_ptrs + F * H
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, H, DEPTH):
            x_mask, weight_mask = row_ok, f_ok
            if not EVEN:
                x_mask = row_ok & (h[None, :] < H - first)
                weight_mask = f_ok & (h[:, None] < H - first)
            # Weights first: addresses of x wait for the list.
            gate_weight = tl.load(gate_ptrs, mask=weight_mask, other=0.0)
            up_weight = tl.load(up_ptrs, mask=weight_mask, other=0.0)
            x = tl.load(x_ptrs, mask=x_mask, other=0.0)
            gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
            up = tl.dot(x, up_weight, up, input_precision="ieee")
            x_ptrs += DEPTH
            gate_ptrs += DEPTH
            up_ptrs += DEPTH
        dtype = act_ptr.dtype.element_ty
        gate, up = gate.to(dtype), up.to(dtype)
        ok = row_ok & f_ok
        place = row.to(tl.int64)[:, None] * F + f[None, :]
        if SAVE:
            saved = row.to(tl.int64)[:, None] * 2 * F + f[None, :]
            tl.store(saved_ptr + saved, gate, mask=ok)
            tl.store(saved_ptr + saved + F, up, mask=ok)
        tl.store(act_ptr + place, activate(gate, up), mask=ok)


@triton.jit
def activate(gate, up):
    """silu(gate) * up; silu is rounded before the product, as two steps in torch would."""
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(dtype)


def multiply(
    a: Tensor,
    weight_EDN: Tensor,
    lists: PairLists,
    rows: int,
    block: Block,
    of_tokens: bool = False,
) -> Tensor:
    """Rows in the order of the lists, times their expert's weight, to the places of their pairs.

    With `of_tokens`, the rows are those of the pairs' tokens and the products stay in that order.
    """
    assert a.is_contiguous()
    (T, K), (_, D, N) = lists.shape, weight_EDN.shape
    out_PN = a.new_empty(len(lists.pairs_P) if of_tokens else T * K, N)
    depth, num_tiles = depth_of(block, a.dtype), lists.tiles_3N.shape[1]
    _multiply[(triton.cdiv(N, block.columns), num_tiles)](
        a, weight_EDN, lists.pairs_P, lists.tiles_3N, out_PN, D, N, num_tiles,
        *weight_EDN.stride(), K=K if of_tokens else 0, EVEN=D % depth == 0,
        ROWS=rows, COLUMNS=block.columns, DEPTH=depth,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
    return out_PN


@triton.jit(do_not_specialize=["num_tiles"])
def _multiply(
    a_ptr, weight_ptr, pairs_ptr, tiles_ptr, out_ptr, D, N, num_tiles,
    expert_stride, d_stride, n_stride, K: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    start, end = tl.load(tiles_ptr + num_tiles + tile), tl.load(tiles_ptr + 2 * num_tiles + tile)
    if start < end:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        row, n = start + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        row_ok, n_ok = row[:, None] < end, n[None, :] < N
        pair = tl.load(pairs_ptr + row, mask=row < end, other=0).to(tl.int64)
        source, target = row.to(tl.int64), pair
        if K:
            source, target = pair // K, row.to(tl.int64)
        d = tl.arange(0, DEPTH)
        a_ptrs = a_ptr + source[:, None] * D + d[None, :]
        weight_ptrs = weight_ptr + expert * expert_stride
        weight_ptrs += d[:, None] * d_stride + n[None, :] * n_stride
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, D, DEPTH):
            a_mask, weight_mask = row_ok, n_ok
            if not EVEN:
                a_mask = row_ok & (d[None, :] < D - first)
                weight_mask = n_ok & (d[:, None] < D - first)
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            weight = tl.load(weight_ptrs, mask=weight_mask, other=0.0)
            product = tl.dot(a, weight, product, input_precision="ieee")
            a_ptrs += DEPTH
            weight_ptrs += DEPTH * d_stride
        place = target[:, None] * N + n[None, :]
        tl.store(out_ptr + place, product.to(out_ptr.dtype.element_ty), mask=row_ok & n_ok)


def sum_pairs(
    out_PH: Tensor, ids_TK: Tensor, weights_TK: Tensor | None, first_expert: int, num_experts: int
) -> Tensor:
    """The weighted sum over a token's pairs whose experts are here, in their order, in fp32."""
    assert weights_TK is None or weights_TK.is_contiguous()
    (T, K), H = ids_TK.shape, out_PH.shape[1]
    y_TH = out_PH.new_empty(T, H)
    block = min(1024, triton.next_power_of_2(H))
    _sum_pairs[(T, triton.cdiv(H, block))](
        out_PH, ids_TK, ids_TK if weights_TK is None else weights_TK, y_TH, H, first_expert,
        num_experts, WEIGHTED=weights_TK is not None, K=K, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y_TH


@triton.jit(do_not_specialize=["first_expert"])
def _sum_pairs(
    out_ptr, ids_ptr, weights_ptr, y_ptr, H, first_expert, E,
    WEIGHTED: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        expert = tl.load(ids_ptr + pair).to(tl.int32) - first_expert
        here = (expert >= 0) & (expert < E)
        part = tl.load(out_ptr + pair * H + h, mask=(h < H) & here, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights_ptr + pair, mask=here, other=0.0).to(tl.float32)
        total += part
    tl.store(y_ptr + token * H + h, total.to(y_ptr.dtype.element_ty), mask=h < H)
