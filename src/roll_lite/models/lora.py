"""Low-rank adapters (LoRA): W x + scale * up (down x), with W frozen.

The projections are fused, so q, k and v share one `down`, and so do gate and up. Every expert of a
mixture has an adapter of its own.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from roll_lite.checks import UserError
from roll_lite.models.config import TARGETS, LoraOptions
from roll_lite.models.ops import linear
from roll_lite.models.tensor_parallel import TensorShard, is_of_experts


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
        down, up = self.matrices()
        up = up.flatten(0, -2)
        low = linear(x, down)
        if not x.is_cuda:  # in blocks of rows
            return y + linear(low * self.scale, up)
        add = torch.addmm if torch.is_grad_enabled() else Tensor.addmm_
        return add(y, low, up.T, alpha=self.scale)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """`down` and `up`; of the whole one the gradient sums over ranks."""
        if self.shard is None:
            return self.down, self.up
        spread = self.shard.spread
        return (spread(self.down), self.up) if self.cuts_up else (self.down, spread(self.up))


class ExpertAdapter(Adapter):
    """Adapters of all experts that a rank holds: their weights have a first dimension more."""

    def __init__(
        self, weight: Tensor, options: LoraOptions, shard: TensorShard | None, cuts_up: bool
    ):
        super().__init__(weight, options, shard, cuts_up)
        sizes = {"lora rank": options.rank, "the width of a weight": weight.shape[-1]}
        for name, size in sizes.items():  # grouped products take rows of 16 bytes
            if weight.is_cuda and size % 8:
                raise UserError(
                    f"{name}={size} with experts as targets must be a multiple of 8 on a GPU; "
                    "change it (tp cuts widths), or leave experts out of lora_targets"
                )
        self.down = nn.Parameter(torch.empty(len(weight), *self.down.shape))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """(E, rank, in) and (E, out, rank)."""
        down, up = super().matrices()
        return down, up.flatten(1, -2)


def add_adapters(model: nn.Module, options: LoraOptions) -> None:
    """Freeze the model and add fp32 adapters to its blocks, initially without effect."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(options.seed)
    adapted = set()
    for block in model.blocks:
        weights = dict(block.named_parameters())
        for target, path in ((t, path) for t in options.targets for path in TARGETS[t]):
            if path in weights:
                adapted.add(target)
                _add_adapter(block, path, options, model.layout, generator)
    if missing := [t for t in options.targets if t.startswith("expert_") and t not in adapted]:
        raise UserError(f"lora targets={','.join(missing)} are experts, and this model has none")
    if not adapted:
        raise UserError(
            f"lora targets={','.join(options.targets)} are in no layer of this model; add others, "
            "as qkv, out, expert_gate_up, expert_down"
        )


def _add_adapter(
    block: nn.Module,
    path: str,
    options: LoraOptions,
    shard: TensorShard | None,
    generator: torch.Generator,
) -> None:
    owner, _, name = path.rpartition(".")
    module = block.get_submodule(owner)
    weight = getattr(module, name)
    kind = ExpertAdapter if is_of_experts(path) else Adapter
    adapter = kind(weight, options, shard, name in ("qkv", "gate_up")).to(weight.device)
    _initialize(adapter, f"{path}_adapter.down", generator)
    setattr(module, f"{name}_adapter", adapter)


@torch.no_grad()
def _initialize(adapter: Adapter, name: str, generator: torch.Generator) -> None:
    """Ranks draw the whole `down` (its `name`) and keep their part, so the layout is no matter."""
    adapter.up.zero_()
    shard = adapter.shard
    shape = adapter.down.shape
    sizes = shard.whole_shape(name, shape) if shard else shape
    bound = 1 / math.sqrt(sizes[-1])
    whole = (2 * torch.rand(sizes, generator=generator) - 1) * bound
    adapter.down.copy_(shard.cut(name, whole, shape) if shard else whole)


def merge(weight: Tensor, down: Tensor, up: Tensor, options: LoraOptions) -> Tensor:
    """The weight with the adapter merged into it."""
    down = down.view(*down.shape[:-2], *[1] * (up.dim() - down.dim()), *down.shape[-2:])
    return (weight.float() + options.scale * (up @ down)).to(weight.dtype)


def adapters(model: nn.Module) -> Iterator[Adapter]:
    return (module for module in model.modules() if isinstance(module, Adapter))


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return "_adapter." in name
