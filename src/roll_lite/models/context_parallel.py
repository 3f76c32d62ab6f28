"""Context parallelism: the tokens of a packed batch over several ranks, for long sequences.

Every rank reads its own tokens with all weights. Only attention needs those of other ranks: each
layer gathers the keys and values of all, and its backward pass sums their gradients back. That
moves the bytes that a ring would move, in one message; the keys of one layer are small beside a
rank's activations (64k tokens of Qwen3-0.6B: 256 MiB of 30 GiB on each of four ranks).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from roll_lite.models.attention import PackedAttention, Projected
from roll_lite.models.tensor_parallel import all_gather_single, reduce_scatter_single


@dataclass(frozen=True, slots=True)
class ContextShard:
    """One rank's share of the tokens that `size` ranks read together.

    Tokens are cut into `2 size` chunks of equal length, and rank r has the r-th from either end:
    causal attention within a long sequence then costs every rank the same.
    """

    rank: int
    size: int
    group: dist.ProcessGroup

    @staticmethod
    def of(group: dist.ProcessGroup) -> "ContextShard":
        return ContextShard(group.rank(), group.size(), group)

    def cut(
        self, token_ids_T: Tensor, positions_T: Tensor, cu_seqlens: Tensor, rows_R: Tensor
    ) -> "ContextPart":
        """This rank's tokens and rows of a packed batch, which every rank has."""
        chunk = -(-len(token_ids_T) // (2 * self.size))
        padding = 2 * self.size * chunk - len(token_ids_T)  # a sequence of its own, without rows
        mine = [self.rank, 2 * self.size - 1 - self.rank]

        def tokens(x_T: Tensor) -> Tensor:
            return F.pad(x_T, (0, padding)).view(-1, chunk)[mine].flatten()

        chunk_R = rows_R // chunk
        is_mine_R = (chunk_R == mine[0]) | (chunk_R == mine[1])
        first_R = torch.where(chunk_R == mine[0], mine[0] * chunk, (mine[1] - 1) * chunk)
        starts = cu_seqlens.tolist() + [len(token_ids_T) + padding] * (padding > 0)
        spans = [Span.of(starts, number * chunk, chunk, cu_seqlens.device) for number in mine]
        return ContextPart(
            token_ids_L=tokens(token_ids_T),
            positions_L=tokens(positions_T),
            places_L=tokens(torch.arange(len(token_ids_T), device=token_ids_T.device)),
            attention=ContextAttention(self, spans),
            chosen=is_mine_R.nonzero()[:, 0],
            rows=(rows_R - first_R)[is_mine_R],
        )

    def join_rows(self, x: Tensor, part: "ContextPart", num_rows: int) -> Tensor:
        """The rows of all ranks from those of each; a rank's gradients are those of its own."""
        rows = x.new_zeros(num_rows, *x.shape[1:]).index_copy(0, part.chosen, x)
        return _SumRows.apply(rows, self.group)

    def gather(self, x_L: Tensor) -> Tensor:
        """The tokens of all ranks, in the order of the packed batch."""
        x = _Gather.apply(x_L.contiguous(), self.group)
        chunks = x.view(2 * self.size, -1, *x.shape[1:])
        # Rank r has sent the chunks r and 2 size - 1 - r, one after the other.
        order = [*range(0, 2 * self.size, 2), *range(2 * self.size - 1, 0, -2)]
        return chunks[order].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class ContextPart:
    """What one rank reads of a packed batch."""

    token_ids_L: Tensor
    positions_L: Tensor
    places_L: Tensor
    """Of the tokens in the batch; 0 of padding."""
    attention: "ContextAttention"
    chosen: Tensor
    """Which rows of the batch are here."""
    rows: Tensor
    """Their places among this rank's tokens."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens as queries, and the keys that they see: from the start of their first
    sequence to their own end."""

    first_key: int
    end: int
    attention: PackedAttention

    @staticmethod
    def of(starts: list[int], first: int, length: int, device: torch.device) -> "Span":
        """`starts` is where each sequence of the packed batch starts, then the total."""
        end = first + length
        inner = [start for start in starts if first < start < end]
        first_key = max(start for start in starts if start <= first)
        queries, keys = ([begin, *inner, end] for begin in (first, first_key))
        return Span(
            first_key, end,
            PackedAttention(*_boundaries(queries, device), *_boundaries(keys, device)),
        )  # fmt: skip


def _boundaries(places: list[int], device: torch.device) -> tuple[Tensor, int]:
    """Places relative to the first, and the largest distance of neighbours."""
    relative = torch.tensor(places, dtype=torch.int32) - places[0]
    return relative.to(device), int(relative.diff().max())


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Attention of a rank's tokens to the keys of all ranks."""

    shard: ContextShard
    spans: list[Span]

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        q_LHD, k_LKD, v_LKD = projected.rotated()
        keys, values = self.shard.gather(torch.stack((k_LKD, v_LKD), 1)).unbind(1)
        return torch.cat(list(self._attend(q_LHD, keys, values)))

    def _attend(self, q_LHD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Iterator[Tensor]:
        for q, span in zip(q_LHD.chunk(2), self.spans, strict=True):
            seen = slice(span.first_key, span.end)
            yield span.attention.attend(q, k_TKD[seen], v_TKD[seen])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = x.new_empty(group.size() * len(x), *x.shape[1:])
        all_gather_single(parts, x, group=group)
        return parts

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        reduce_scatter_single(own, grad.contiguous(), group=ctx.group)
        return own, None


class _SumRows(torch.autograd.Function):
    """Every rank computes the loss of all rows, so the gradient needs no sum."""

    @staticmethod
    def forward(ctx, rows, group):
        rows = rows.clone()
        dist.all_reduce(rows, group=group)
        return rows

    @staticmethod
    def backward(ctx, grad):
        return grad, None
