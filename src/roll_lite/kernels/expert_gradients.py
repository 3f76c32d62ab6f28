"""Experts in training: the products of kernels/experts.py with their gradients.

Saved are the inputs, the pairs by expert, and gate and up of each pair; silu(gate) * up is computed
again. The output of down is neither saved nor computed again: the gradient of a pair's weight is
grad_y . (down act) = (down^T grad_y) . act, and the gradient of act needs the first factor anyway.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from roll_lite.kernels.experts import (
    Block,
    PairLists,
    activate,
    depth_of,
    dot,
    expert_mlp,
    gate_up,
    list_pairs,
    multiply,
    sum_pairs,
    tiles_for,
)

ACT_BLOCK = Block(128, 64, 8, 3)


def grouped_mlp(
    x_TH: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    first_expert: int = 0,
) -> Tensor:
    """`expert_mlp` with gradients of x, of the routing weights, and of experts that are trained."""
    return _GroupedMlp.apply(x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK, first_expert)


class _GroupedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK, first_expert):
        E, _, inner, _ = gate_up_E2FH.shape
        P, ctx.first_expert = ids_TK.numel(), first_expert
        inputs = x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK
        if not P:
            ctx.save_for_backward(*inputs)
            return expert_mlp(*inputs)
        tiles = tiles_for(P, E)
        lists = list_pairs(ids_TK, E, first_expert, tiles.rows)
        act_PF, saved_P2F = x_TH.new_empty(P, inner), x_TH.new_empty(P, 2 * inner)
        gate_up(x_TH, gate_up_E2FH, lists, act_PF, saved_P2F, tiles.rows, tiles.gate_up)
        out_PH = multiply(act_PF, down_EHF.transpose(1, 2), lists, tiles.rows, tiles.down)
        ctx.save_for_backward(*inputs, saved_P2F, *lists)
        return sum_pairs(out_PH, ids_TK, weights_TK, first_expert, E)

    @staticmethod
    def backward(ctx, grad_TH):
        x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK, *saved = ctx.saved_tensors
        if not ids_TK.numel():
            tensors = x_TH, gate_up_E2FH, down_EHF, None, weights_TK, None
            return (*(t if t is None else torch.zeros_like(t) for t in tensors),)
        needs_x, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        saved_P2F, lists = saved[0], PairLists(*saved[1:])
        E, (P, K) = len(down_EHF), (ids_TK.numel(), ids_TK.shape[1])
        tiles, grad_TH = tiles_for(P, E), grad_TH.contiguous()
        # Places behind the lists hold anything; grouped_mm reads up to the last of `offs`.
        token_P = lists.pairs_P.clamp(0, P - 1) // K
        offs = lists.starts_E1[1:]
        grad_gate_up_P2F, act_PF, grad_weights_TK = _act_backward(
            grad_TH, down_EHF, saved_P2F, weights_TK, lists, tiles.rows, needs_down
        )
        grad_x_TH = grad_gate_up = grad_down = None
        if needs_down:
            grad_down = F.grouped_mm(grad_TH[token_P].T, act_PF, offs=offs)
        if needs_gate_up:
            grad_gate_up = F.grouped_mm(grad_gate_up_P2F.T, x_TH[token_P], offs=offs)
            grad_gate_up = grad_gate_up.view_as(gate_up_E2FH)
        if needs_x:
            parts_PH = multiply(
                grad_gate_up_P2F, gate_up_E2FH.flatten(1, 2), lists, tiles.rows, tiles.down
            )
            grad_x_TH = sum_pairs(parts_PH, ids_TK, None, ctx.first_expert, E)
        return grad_x_TH, grad_gate_up, grad_down, None, grad_weights_TK, None


def _act_backward(
    grad_TH: Tensor,
    down_EHF: Tensor,
    saved_P2F: Tensor,
    weights_TK: Tensor,
    lists: PairLists,
    rows: int,
    needs_act: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up; if needed, act times the pair's weight; gradients of weights."""
    (P, inner2), (_, H, inner) = saved_P2F.shape, down_EHF.shape
    block, depth = ACT_BLOCK, depth_of(ACT_BLOCK, grad_TH.dtype)
    num_blocks, num_tiles = triton.cdiv(inner, block.columns), lists.tiles_3N.shape[1]
    grad_gate_up_P2F = grad_TH.new_empty(P, inner2)
    act_PF = grad_TH.new_empty(P, inner) if needs_act else grad_gate_up_P2F
    sums_NP = weights_TK.new_zeros(num_blocks, P, dtype=torch.float32)  # of experts elsewhere too
    _act_backward_kernel[(num_blocks, num_tiles)](
        grad_TH, down_EHF, saved_P2F, weights_TK, lists.pairs_P, lists.tiles_3N,
        grad_gate_up_P2F, act_PF, sums_NP, H, inner, P, num_tiles,
        K=weights_TK.shape[1], NEEDS_ACT=needs_act, EVEN=H % depth == 0,
        ROWS=rows, COLUMNS=block.columns, DEPTH=depth,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
    return grad_gate_up_P2F, act_PF, sums_NP.sum(0).view_as(weights_TK).to(weights_TK.dtype)


@triton.jit(do_not_specialize=["P", "num_tiles"])
def _act_backward_kernel(
    grad_ptr, down_ptr, saved_ptr, weights_ptr, pairs_ptr, tiles_ptr,
    grad_gate_up_ptr, act_ptr, sums_ptr, H, F, P, num_tiles,
    K: tl.constexpr, NEEDS_ACT: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    start, end = tl.load(tiles_ptr + num_tiles + tile), tl.load(tiles_ptr + 2 * num_tiles + tile)
    if start < end:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        row, f = start + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        row_ok, f_ok = row[:, None] < end, f[None, :] < F
        pair = tl.load(pairs_ptr + row, mask=row < end, other=0)
        grad = dot(
            grad_ptr + (pair.to(tl.int64) // K)[:, None] * H, row_ok,
            down_ptr + expert * H * F + f[None, :], f_ok,
            H, F, EVEN, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        ok = row_ok & f_ok
        place = row.to(tl.int64)[:, None] * 2 * F + f[None, :]
        gate = tl.load(saved_ptr + place, mask=ok, other=0.0)
        up = tl.load(saved_ptr + place + F, mask=ok, other=0.0)
        weight = tl.load(weights_ptr + pair, mask=row < end, other=0.0).to(tl.float32)[:, None]
        act = activate(gate, up).to(tl.float32)
        dtype = grad_gate_up_ptr.dtype.element_ty
        tl.store(sums_ptr + tl.program_id(0) * P + pair, tl.sum(grad * act, 1), mask=row < end)
        if NEEDS_ACT:
            act_place = row.to(tl.int64)[:, None] * F + f[None, :]
            tl.store(act_ptr + act_place, (act * weight).to(dtype), mask=ok)
        grad, gate = grad * weight, gate.to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-gate))
        grad_gate = grad * up.to(tl.float32) * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(grad_gate_up_ptr + place, grad_gate.to(dtype), mask=ok)
        tl.store(grad_gate_up_ptr + place + F, (grad * gate * sigmoid).to(dtype), mask=ok)
