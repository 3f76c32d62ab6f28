"""The MLP of a block: dense, or a mixture of experts of which each token has a few.

Shape suffixes here: T tokens, H hidden, F inner width, E experts, K experts of a token.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from roll_lite.models.config import ModelConfig
from roll_lite.models.expert_parallel import mix_over_ranks
from roll_lite.models.lora import Adapter, ExpertAdapter
from roll_lite.models.ops import linear, silu_mul
from roll_lite.models.tensor_parallel import ExpertPlace, TensorShard

Choose = Callable[[int, Tensor], Tensor]
"""(number of a sparse layer, experts (T, K) that its router chose) -> the experts to use."""


class SwiGLU(nn.Module):
    """gate_up is stored (2, F, H): a shard of dimension 1 holds matching gate and up rows."""

    def __init__(self, hidden_size: int, size: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, size, hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, size))
        self.gate_up_adapter: Adapter | None = None
        self.down_adapter: Adapter | None = None

    def forward(self, x_TH: Tensor) -> Tensor:
        gate_up = project(x_TH, self.gate_up.flatten(0, 1), self.gate_up_adapter)
        return project(silu_mul(gate_up), self.down, self.down_adapter)


def project(
    x: Tensor, weight: Tensor, adapter: Adapter | None, bias: Tensor | None = None
) -> Tensor:
    y = linear(x, weight, bias)
    return y if adapter is None or not adapter.is_on else y + adapter(x)


class Experts(nn.Module):
    """A mixture of experts, each a SwiGLU.

    The router chooses the K likeliest experts of a token; their outputs are added up, weighted with
    their probabilities. Every rank holds the whole router.
    """

    def __init__(self, config: ModelConfig, number: int, shard: TensorShard | None = None):
        super().__init__()
        experts, H = config.experts, config.hidden_size
        self.number = number
        """Among the sparse layers of the model."""
        self.config = experts
        self.shard = shard
        self.router = nn.Parameter(torch.empty(experts.num_experts, H))
        self.experts = ExpertWeights(config, shard)
        self.balance: float | None = None
        """Slope of the balancing loss; None where the tokens of experts are not counted."""
        self.counts_E: Tensor
        """A recomputing backward pass counts all tokens again."""
        self.shared = self.shared_gate = None
        if experts.shared_size:
            self.shared = SwiGLU(H, experts.shared_size)
            self.shared_gate = nn.Parameter(torch.empty(1, H))

    def route(self, x_TH: Tensor, choose: Choose | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights, each (T, K)."""
        probabilities_TE = linear(x_TH, self._spread(self.router)).softmax(-1, torch.float32)
        ids_TK = top_experts(probabilities_TE, self.config.experts_per_token)
        if choose is not None:
            ids_TK = choose(self.number, ids_TK)
        if self.balance is not None:
            probabilities_TE = self._balanced(probabilities_TE, ids_TK)
        weights_TK = probabilities_TE.gather(1, ids_TK)
        if self.config.renormalizes:
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        return ids_TK, weights_TK.to(x_TH.dtype)

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TH = self.experts(x_TH, ids_TK, weights_TK)
        if self.shared is None:
            return y_TH
        return y_TH + linear(x_TH, self._spread(self.shared_gate)).sigmoid() * self.shared(x_TH)

    def _balanced(self, probabilities_TE: Tensor, ids_TK: Tensor) -> Tensor:
        ids = ids_TK.flatten()
        counts_E = torch.zeros_like(self.counts_E).scatter_add_(0, ids, torch.ones_like(ids))
        self.counts_E += counts_E
        slope_E = self.balance * len(counts_E) * counts_E / len(ids_TK)
        return _Sloped.apply(probabilities_TE, slope_E) if self.balance else probabilities_TE

    def _spread(self, weight: Tensor) -> Tensor:
        """Of a weight that ranks hold whole, whose gradient each rank has a part of."""
        return weight if self.shard is None else self.shard.spread(weight)


class _Sloped(torch.autograd.Function):
    """The identity; adds to a loss the sum over tokens of slope * probability."""

    @staticmethod
    def forward(ctx, probabilities_TE, slope_E):
        ctx.save_for_backward(slope_E)
        return probabilities_TE.view_as(probabilities_TE)

    @staticmethod
    def backward(ctx, grad_TE):
        (slope_E,) = ctx.saved_tensors
        return grad_TE + slope_E.to(grad_TE.dtype), None


class ExpertWeights(nn.Module):
    """The experts of a rank: all of them with a part of their inner width each, or some of them
    (`ep`). It is a module because FSDP cuts it over other ranks than the rest of the block."""

    def __init__(self, config: ModelConfig, shard: TensorShard | None):
        super().__init__()
        experts, H = config.experts, config.hidden_size
        place = shard.expert_place if shard else ExpertPlace(0, 1, 0, 1)
        E, F = experts.num_experts // place.size, experts.size // place.width_size
        self.gate_up = nn.Parameter(torch.empty(E, 2, F, H))
        self.down = nn.Parameter(torch.empty(E, H, F))
        self.gate_up_adapter: ExpertAdapter | None = None
        self.down_adapter: ExpertAdapter | None = None
        self.first = place.rank * E
        self.group = shard.ep_group if shard else None

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """With a group, the sum over its ranks; else what the experts of this rank add."""
        if self.group is None:
            return self._mix(x_TH, ids_TK, weights_TK)
        chosen = ids_TK, weights_TK
        return mix_over_ranks(self._mix, x_TH, *chosen, len(self.down), self.group)

    def _mix(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        adapters = [a if a and a.is_on else None for a in (self.gate_up_adapter, self.down_adapter)]
        return mix(x_TH, self.gate_up, self.down, ids_TK, weights_TK, self.first, adapters)


def top_experts(probabilities_TE: Tensor, num: int) -> Tensor:
    """The likeliest experts, in order; of equal ones the first."""
    return probabilities_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num]


def mix(
    x_TH: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    first: int = 0,
    adapters: Sequence[ExpertAdapter | None] = (None, None),
) -> Tensor:
    """The weighted sum of the outputs of each token's experts, added in fp32 in their order.

    The E experts are those from number `first` on; others add nothing.
    """
    num_experts, num_chosen = len(down_EHF), ids_TK.shape[1]
    local_P = ids_TK.flatten() - first
    local_P = local_P.where((local_P >= 0) & (local_P < num_experts), num_experts)  # elsewhere last
    pairs_P = local_P.argsort(stable=True)
    *counts_E, num_elsewhere = local_P.bincount(minlength=num_experts + 1).tolist()
    parts = pairs_P.split([*counts_E, num_elsewhere])
    gate_up, down = map(_of_each, (gate_up_E2FH.flatten(1, 2), down_EHF), adapters)
    out = []
    for number, pairs in enumerate(parts[:-1]):
        inner = silu_mul(gate_up(number, x_TH[pairs // num_chosen]))
        out.append(down(number, inner))
    out.append(x_TH.new_zeros(num_elsewhere, x_TH.shape[1]))
    out_TKH = torch.cat(out)[pairs_P.argsort()].unflatten(0, ids_TK.shape)
    return (out_TKH.float() * weights_TK.float()[:, :, None]).sum(1).to(x_TH.dtype)


def _of_each(weight_ENH: Tensor, adapter: ExpertAdapter | None) -> Callable[[int, Tensor], Tensor]:
    """The projection of each expert, with its adapter."""
    weights = weight_ENH.unbind()
    if adapter is None:
        return lambda number, x: linear(x, weights[number])
    down, up = (matrices.unbind() for matrices in adapter.matrices())

    def project(number: int, x: Tensor) -> Tensor:
        added = linear(linear(x, down[number]), up[number])
        return linear(x, weights[number]) + added * adapter.scale

    return project
