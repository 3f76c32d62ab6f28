"""Tensor parallelism: which part of each parameter a rank holds, and how partial results add up.

Engine and trainer run the same modules of local size, with the explicit collectives below; in
training these have gradients. Parameters are cut along heads, MLP columns or vocabulary entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from roll_lite.models.config import ModelConfig

# The first are the names since torch 2.13, which warns of the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CUT_DIMENSION = {
    "embedding": 0,
    "lm_head": 0,
    "attention.qkv": 0,
    "attention.qkv_bias": 0,
    "attention.out": 1,
    "mlp.gate_up": 1,
    "mlp.down": 1,
    "experts.gate_up": 2,
    "experts.down": 2,
    "experts.gate_up_adapter.up": 2,
    "experts.down_adapter.down": 2,
    "shared.gate_up": 1,
    "shared.down": 1,
    "qkv_adapter.up": 0,
    "out_adapter.down": 1,
    "gate_up_adapter.up": 1,
    "down_adapter.down": 1,
}
"""By the end of a parameter's name; every rank holds all other parameters whole."""
VOCABULARY = ("embedding", "lm_head")
WITH_KEYS = ("attention.qkv", "attention.qkv_bias", "qkv_adapter.up")
"""Stored (key/value heads, query heads of each + key + value, ...)."""


def cut_dimension(name: str) -> int | None:
    return next((d for end, d in CUT_DIMENSION.items() if _ends(name, end)), None)


def _ends(name: str, *ends: str) -> bool:
    return f".{name}".endswith(tuple(f".{end}" for end in ends))


def is_of_experts(name: str) -> bool:
    """Whether the first dimension of a parameter is the experts."""
    return ".experts." in name


class ExpertPlace(NamedTuple):
    """Which experts a rank holds, and what part of their inner width."""

    rank: int
    size: int
    width_rank: int
    width_size: int


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a parameter: where it lies in a rank's tensor, and where in the whole."""

    starts: tuple[int, ...]
    """In the rank's tensor."""
    offsets: tuple[int, ...]
    """In the whole parameter."""
    shape: tuple[int, ...]
    is_copy: bool = False
    """Whether another tensor-parallel rank is the one that writes it."""

    def of_local(self, tensor: Tensor) -> Tensor:
        return _rectangle(tensor, self.starts, self.shape)

    def of_whole(self, tensor: Tensor) -> Tensor:
        return _rectangle(tensor, self.offsets, self.shape)

    def within(self, dimension: int, start: int, stop: int) -> "Part":
        """What lies between two indices of the rank's tensor, seen from the first."""
        starts, offsets, shape = list(self.starts), list(self.offsets), list(self.shape)
        begin = starts[dimension]
        end = begin + shape[dimension]
        first, last = (min(max(index, begin), end) for index in (start, stop))
        offsets[dimension] += first - begin
        starts[dimension] = max(0, min(first, stop) - start)
        shape[dimension] = last - first
        return Part(tuple(starts), tuple(offsets), tuple(shape), self.is_copy)

    def within_whole(self, dimension: int, start: int, stop: int) -> "Part":
        """What lies between two indices of the whole parameter, seen from the first."""
        return self._swapped().within(dimension, start, stop)._swapped()

    def _swapped(self) -> "Part":
        return replace(self, starts=self.offsets, offsets=self.starts)

    @staticmethod
    def whole(shape: Sequence[int]) -> "Part":
        """The part of a rank that holds a whole parameter."""
        return Part((0,) * len(shape), (0,) * len(shape), tuple(shape))


def _rectangle(tensor: Tensor, starts: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    if tensor.shape == shape:
        return tensor
    for dimension, (start, size) in enumerate(zip(starts, shape, strict=True)):
        tensor = tensor.narrow(dimension, start, size)
    return tensor


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One rank's part of a model that `size` ranks compute together.

    `parts` is the only place that knows which part: loading, checkpoints, gradient norms and weight
    sync ask it. Where the vocabulary does not divide, the last rows of the last ranks are padding,
    which no token reads and no softmax sees. Where ranks outnumber the key/value heads, consecutive
    ranks hold copies of one, and their gradients are summed.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    config: ModelConfig | None = None
    """Sizes of the whole model, which sets it."""
    ep: int = 1
    """Parts that the experts are dealt into, whole."""
    ep_group: dist.ProcessGroup | None = None
    """Data-parallel ranks that hold all experts together and exchange tokens. Without it the
    tensor-parallel ranks do, which all have the same tokens, as in an engine."""

    @staticmethod
    def of(
        group: dist.ProcessGroup, ep: int = 1, ep_group: dist.ProcessGroup | None = None
    ) -> "TensorShard | None":
        """None if the rank holds all that its replica computes with."""
        if group.size() == ep == 1:
            return None
        return TensorShard(group.rank(), group.size(), group, ep=ep, ep_group=ep_group)

    @property
    def expert_place(self) -> ExpertPlace:
        if self.ep_group is not None:
            return ExpertPlace(self.ep_group.rank(), self.ep, self.rank, self.size)
        width_size = self.size // self.ep
        rank, width_rank = divmod(self.rank, width_size)
        return ExpertPlace(rank, self.ep, width_rank, width_size)

    @property
    def num_entries(self) -> int:
        """Vocabulary rows of this rank that are not padding."""
        rows = -(-self.config.vocab_size // self.size)
        return min(rows, max(0, self.config.vocab_size - self.rank * rows))

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same key/value head."""
        return max(1, self.size // self.config.num_kv_heads)

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole parameter; `shape` is that of a rank's tensor."""
        cut = cut_dimension(name)
        whole = list(shape)
        if _ends(name, *VOCABULARY):
            whole[0] = self.config.vocab_size
        elif _ends(name, *WITH_KEYS):
            whole[:2] = self.config.num_kv_heads, self.config.group_size + 2
        elif is_of_experts(name):
            whole[0] *= self.expert_place.size
            if cut is not None:
                whole[cut] *= self.expert_place.width_size
        elif cut is not None:
            whole[cut] *= self.size
        return tuple(whole)

    def parts(self, name: str, shape: Sequence[int]) -> list[Part]:
        """The rectangles of a rank's tensor of this shape: copies come last."""
        cut = cut_dimension(name)
        zeros = (0,) * len(shape)
        held = list(shape)
        if is_of_experts(name):
            return [self._part_of_experts(cut, shape)]
        if cut is None:
            return [Part(zeros, zeros, tuple(shape), is_copy=self.rank > 0)]
        if keys := self.shared_keys(name, shape):
            # The last rank of a key/value head has the queries next to it: it writes both.
            held[1] -= 2 * keys.is_copy
            first = self.rank % self.num_copies * (shape[1] - 2)
            queries = Part(zeros, (keys.offsets[0], first, *zeros[2:]), tuple(held))
            return [queries, keys] if keys.is_copy else [queries]
        if _ends(name, *VOCABULARY):
            held[0] = self.num_entries
        first = min(self.rank * shape[cut], self.whole_shape(name, shape)[cut])
        return [Part(zeros, (*zeros[:cut], first, *zeros[cut + 1 :]), tuple(held))]

    def _part_of_experts(self, cut: int | None, shape: Sequence[int]) -> Part:
        place = self.expert_place
        offsets = [place.rank * shape[0], *(0 for _ in shape[1:])]
        if cut is not None:
            offsets[cut] = place.width_rank * shape[cut]
        is_copy = cut is None and place.width_rank > 0
        return Part((0,) * len(shape), tuple(offsets), tuple(shape), is_copy)

    def shared_keys(self, name: str, shape: Sequence[int]) -> Part | None:
        """The key and value rows that other ranks hold too."""
        if self.num_copies == 1 or not _ends(name, *WITH_KEYS):
            return None
        head, copy = divmod(self.rank, self.num_copies)
        rest = (0,) * (len(shape) - 2)
        starts = (0, shape[1] - 2, *rest)
        offsets = (head, self.config.group_size, *rest)
        is_copy = copy < self.num_copies - 1
        return Part(starts, offsets, (1, 2, *shape[2:]), is_copy)

    def cut(self, name: str, whole: Tensor, shape: Sequence[int]) -> Tensor:
        """This rank's tensor, of the given shape, from the whole parameter; padding is 0."""
        parts = self.parts(name, shape)
        if parts[0].shape == tuple(shape):
            return parts[0].of_whole(whole)
        local = whole.new_zeros(shape)
        for part in parts:
            part.of_local(local).copy_(part.of_whole(whole))
        return local

    def join(self, name: str, local: Tensor) -> Tensor:
        """The whole parameter from the tensors of all ranks. A collective call."""
        cut = cut_dimension(name)
        if is_of_experts(name):
            if cut is not None:
                local = self.gather(local, cut)
            return local if self.ep_group is None else torch.cat(_gather(local, self.ep_group))
        if cut is None or self.size == 1:
            return local
        whole = local.new_empty(self.whole_shape(name, local.shape))
        for rank, held in enumerate(_gather(local, self.group)):
            for part in replace(self, rank=rank).parts(name, local.shape):
                if not part.is_copy:
                    part.of_whole(whole).copy_(part.of_local(held))
        return whole

    def sum_over_copies(self, x: Tensor) -> Tensor:
        """The sum over the ranks with the same key/value head, in the same order on each."""
        first = self.rank // self.num_copies * self.num_copies
        return torch.stack(_gather(x, self.group)[first : first + self.num_copies]).sum(0)

    def look_up(self, token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
        """Embed tokens, each on the rank that holds its row."""
        local_T = token_ids_T - self.rank * len(embedding_VH)
        is_here_T = (local_T >= 0) & (local_T < len(embedding_VH))
        x_TH = torch.nn.functional.embedding(local_T * is_here_T, embedding_VH)
        return self.all_reduce(torch.where(is_here_T[:, None], x_TH, 0.0))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place without gradients; backward is the identity, because
        what follows is the same on all ranks (Megatron's g)."""
        if self.size == 1:
            return x
        return _AllReduce.apply(x, self) if torch.is_grad_enabled() else self.sum_in_place(x)

    def spread(self, x: Tensor) -> Tensor:
        """The identity on its way into sharded modules; backward sums over ranks (Megatron's f)."""
        return _Spread.apply(x, self) if self.size > 1 and torch.is_grad_enabled() else x

    def sum_in_place(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, dimension: int = 1) -> Tensor:
        """All ranks' parts, concatenated in the order of ranks."""
        return x if self.size == 1 else torch.cat(_gather(x, self.group), dimension)


def _gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return parts


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard):
        return shard.sum_in_place(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.shard.sum_in_place(grad.contiguous().clone()), None
