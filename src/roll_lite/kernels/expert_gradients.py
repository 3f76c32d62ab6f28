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

from roll_lite.checks import UserError
from roll_lite.kernels.experts import (
    PairLists,
    activate,
    expert_mlp,
    gate_up,
    list_pairs,
    multiply,
    sum_pairs,
    tiles_for,
)


def grouped_mlp(
    x_TH: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    first_expert: int = 0,
    num_pairs: int | None = None,
) -> Tensor:
    """`expert_mlp` with gradients of x, of the routing weights, and of experts that are trained.

    `num_pairs` is the most that are of these experts, and bounds what is saved.
    """
    (_, H, inner), multiple = down_EHF.shape, 16 // x_TH.dtype.itemsize
    if gate_up_E2FH.requires_grad and (H % multiple or inner % multiple):
        raise UserError(
            f"trained experts have hidden_size={H} and an inner width of {inner} on a rank, and "
            f"grouped products on a GPU need multiples of {multiple}; lower tp"
        )
    options = first_expert, num_pairs
    return _GroupedMlp.apply(x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK, *options)


class _GroupedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK, first_expert, num_pairs):
        E, _, inner, _ = gate_up_E2FH.shape
        P, ctx.first_expert = ids_TK.numel(), first_expert
        inputs = x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK
        if not P:
            ctx.save_for_backward(*inputs)
            return expert_mlp(*inputs)
        tiles = tiles_for(P, E)
        lists = list_pairs(ids_TK, E, first_expert, tiles.rows, num_pairs)
        num_listed = len(lists.pairs_P)
        act_PF, saved_P2F = (x_TH.new_empty(num_listed, size) for size in (inner, 2 * inner))
        gate_up(x_TH, gate_up_E2FH, lists, act_PF, saved_P2F, tiles.rows, tiles.gate_up)
        out_PH = multiply(act_PF, down_EHF.transpose(1, 2), lists, tiles.rows, tiles.down)
        ctx.save_for_backward(*inputs, saved_P2F, *lists[:3])
        return sum_pairs(out_PH, ids_TK, weights_TK, first_expert, E)

    @staticmethod
    def backward(ctx, grad_TH):
        x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK, *saved = ctx.saved_tensors
        if not ids_TK.numel():
            tensors = x_TH, gate_up_E2FH, down_EHF, None, weights_TK, None, None
            return (*(t if t is None else torch.zeros_like(t) for t in tensors),)
        needs_x, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        saved_P2F, lists = saved[0], PairLists(*saved[1:], tuple(ids_TK.shape))
        E, (P, K) = len(down_EHF), (ids_TK.numel(), ids_TK.shape[1])
        tiles, grad_TH = tiles_for(P, E), grad_TH.contiguous()
        # Places behind the lists hold anything; grouped_mm reads up to the last of `offs`.
        token_P = lists.pairs_P.clamp(0, P - 1) // K
        offs = lists.starts_E1[1:]
        grad_PF = multiply(grad_TH, down_EHF, lists, tiles.rows, tiles.down, of_tokens=True)
        grad_gate_up_P2F, act_PF, grad_weights_TK = _act_backward(
            grad_PF, saved_P2F, weights_TK, lists, needs_down
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
        return grad_x_TH, grad_gate_up, grad_down, None, grad_weights_TK, None, None


def _act_backward(
    grad_PF: Tensor, saved_P2F: Tensor, weights_TK: Tensor, lists: PairLists, needs_act: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up; act times the pair's weight, over `grad_PF`; gradients of weights.

    `grad_PF` is the gradient of act without the pair's weight.
    """
    (P, inner), E = grad_PF.shape, len(lists.starts_E1) - 1
    grad_saved_P2F = torch.empty_like(saved_P2F)
    grad_weights_TK = torch.zeros_like(weights_TK)  # where the expert is elsewhere
    _act_backward_kernel[(P,)](
        grad_PF, saved_P2F, weights_TK, lists.pairs_P, lists.starts_E1,
        grad_saved_P2F, grad_weights_TK, inner, E, NEEDS_ACT=needs_act,
        BLOCK=min(1024, triton.next_power_of_2(inner)), num_warps=4,
    )  # fmt: skip
    return grad_saved_P2F, grad_PF, grad_weights_TK


@triton.jit
def _act_backward_kernel(
    grad_ptr, saved_ptr, weights_ptr, pairs_ptr, starts_ptr,
    grad_saved_ptr, grad_weights_ptr, F, E, NEEDS_ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(starts_ptr + E):
        pair = tl.load(pairs_ptr + row)
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        dtype = grad_ptr.dtype.element_ty
        for first in range(0, F, BLOCK):
            f = first + tl.arange(0, BLOCK)
            ok = f < F
            gate_place = row * 2 * F + f
            rounded_gate = tl.load(saved_ptr + gate_place, mask=ok, other=0.0)
            rounded_up = tl.load(saved_ptr + gate_place + F, mask=ok, other=0.0)
            grad = tl.load(grad_ptr + row * F + f, mask=ok, other=0.0).to(tl.float32)
            act = activate(rounded_gate, rounded_up).to(tl.float32)
            total += grad * act
            if NEEDS_ACT:
                tl.store(grad_ptr + row * F + f, (act * weight).to(dtype), mask=ok)
            grad *= weight
            gate, up = rounded_gate.to(tl.float32), rounded_up.to(tl.float32)
            sigmoid = 1 / (1 + tl.exp(-gate))
            grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
            tl.store(grad_saved_ptr + gate_place, grad_gate.to(dtype), mask=ok)
            tl.store(grad_saved_ptr + gate_place + F, (grad * gate * sigmoid).to(dtype), mask=ok)
        grad_weight = tl.sum(total, 0).to(grad_weights_ptr.dtype.element_ty)
        tl.store(grad_weights_ptr + pair, grad_weight)
