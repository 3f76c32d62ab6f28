"""Whole experts on each rank: tokens travel to the ranks that hold their experts, and back.

A token travels once to a rank, however many of its experts are there, and one weighted sum comes
back. Ranks first tell each other how many tokens they send, which the host reads once.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Mix = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(tokens (R, H), their experts (R, K), the weights of these, and how many of all R * K experts are
on this rank) -> what the experts of this rank add to each token."""


def mix_over_ranks(
    mix: Mix,
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """What the experts of all ranks add to each of this rank's tokens; `num_experts` are on each.

    All ranks of the group call it together, also with few tokens or none.
    """
    size, ids_TK = group.size(), ids_TK.long()  # kernels choose experts in int32
    pairs_TP = torch.zeros(len(x_TH), size, dtype=torch.int64, device=x_TH.device)
    pairs_TP.scatter_add_(1, ids_TK // num_experts, torch.ones_like(ids_TK))
    is_sent_TP = pairs_TP > 0
    sent_P2 = torch.stack([is_sent_TP.sum(0), pairs_TP.sum(0)], 1)
    received_P2 = torch.empty_like(sent_P2)
    dist.all_to_all_single(received_P2, sent_P2, group=group)
    sent, received, num_pairs = torch.cat([sent_P2[:, :1], received_P2], 1).T.tolist()
    # Tokens in order, by the rank that they go to
    order = (~is_sent_TP.T.flatten()).to(torch.uint8).argsort(stable=True)[: sum(sent)]
    tokens_S = order % max(1, len(x_TH))

    def exchange(values: Tensor) -> Tensor:
        return _Exchange.apply(values, sent, received, group)

    arrived = [exchange(values[tokens_S]) for values in (x_TH, ids_TK, weights_TK)]
    arrived_RH = mix(*arrived, sum(num_pairs))
    added_SH = _Exchange.apply(arrived_RH, received, sent, group)
    y_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for added, tokens in zip(added_SH.split(sent), tokens_S.split(sent), strict=True):
        y_TH = y_TH.index_add(0, tokens, added.float())  # each once, so the order is fixed
    return y_TH.to(x_TH.dtype)


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; their gradients come back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.counts, ctx.group = (sent, received), group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.counts
        return _all_to_all(grad, received, sent, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
