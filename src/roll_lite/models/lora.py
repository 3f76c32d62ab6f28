"""Low-rank adapters (LoRA): W x + scale * up (down x), with W frozen.

The projections are fused, so q, k and v share one `down`, and so do gate and up.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from roll_lite.models.config import TARGETS, LoraOptions
from roll_lite.models.ops import linear
from roll_lite.models.tensor_parallel import TensorShard


class Adapter(nn.Module):
    """With a `shard`, one matrix is cut like the weight, and the other is whole on every rank.

    `cuts_up`: `up` is the cut one (outputs are sharded), else `down` (inputs are sharded).
    """

    def __init__(
        self, weight: Tensor, options: LoraOptions, shard: TensorShard | None, cuts_up: bool
    ):
        super().__init__()
        rank = options.rank
        self.down = nn.Parameter(torch.empty(rank, weight.shape[-1]))
        self.up = nn.Parameter(torch.empty(*weight.shape[:-1], rank))
        self.scale = options.scale
        self.shard = shard
        self.cuts_up = cuts_up
        self.is_on = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """y, which may be overwritten without gradients, plus the product with the adapter."""
        down = self.down
        up = self.up.flatten(0, -2)
        if self.shard is not None and self.cuts_up:  # the whole one's gradient sums over ranks
            down = self.shard.spread(down)
        elif self.shard is not None:
            up = self.shard.spread(up)
        low = linear(x, down)
        if not x.is_cuda:  # in blocks of rows
            return y + linear(low * self.scale, up)
        add = torch.addmm if torch.is_grad_enabled() else Tensor.addmm_
        return add(y, low, up.T, alpha=self.scale)


def add_adapters(model: nn.Module, options: LoraOptions) -> None:
    """Freeze the model and add fp32 adapters to its blocks, initially without effect."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(options.seed)
    for block in model.blocks:
        for target in options.targets:
            module = block.get_submodule(TARGETS[target].split(".")[0])
            weight = getattr(module, target)
            adapter = Adapter(weight, options, model.shard, target in ("qkv", "gate_up"))
            adapter.to(weight.device)
            _initialize(adapter, f"{target}_adapter.down", generator)
            setattr(module, f"{target}_adapter", adapter)


@torch.no_grad()
def _initialize(adapter: Adapter, name: str, generator: torch.Generator) -> None:
    """Ranks draw the whole `down` (its `name`) and keep their part, so the layout is no matter."""
    adapter.up.zero_()
    shard = adapter.shard
    shape = adapter.down.shape
    rank, size = shard.whole_shape(name, shape) if shard else shape
    bound = 1 / math.sqrt(size)
    whole = (2 * torch.rand(rank, size, generator=generator) - 1) * bound
    adapter.down.copy_(shard.cut(name, whole, shape) if shard else whole)


def merge(weight: Tensor, down: Tensor, up: Tensor, options: LoraOptions) -> Tensor:
    """The weight with the adapter merged into it."""
    return (weight.float() + options.scale * (up @ down)).to(weight.dtype)


def adapters(model: nn.Module) -> Iterator[Adapter]:
    return (module for module in model.modules() if isinstance(module, Adapter))


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return "_adapter." in name
