"""The MLP of a block: dense, or a mixture of experts of which each token has a few.

Shape suffixes here: T tokens, H hidden, F inner width, E experts, K experts of a token.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roll_lite.models.config import ModelConfig
from roll_lite.models.expert_parallel import mix_over_ranks
from roll_lite.models.lora import Adapter, ExpertAdapter
from roll_lite.models.ops import linear, sigmoid, silu_mul
from roll_lite.models.tensor_parallel import ExpertPlace, TensorShard

Choose = Callable[[int, Tensor], Tensor]
"""(number of a sparse layer, experts (T, K) that its router chose, integers) -> those to use."""


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
    return y if adapter is None or not adapter.is_on else adapter(x, y)


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
        logits_TE = linear(x_TH, self._spread(self.router))
        options = self.config.experts_per_token, self.config.renormalizes
        ids_TK, weights_TK = top_experts(logits_TE.detach(), *options)
        chosen_TK = ids_TK if choose is None else choose(self.number, ids_TK)
        if chosen_TK is ids_TK and not torch.is_grad_enabled():
            return ids_TK, weights_TK
        probabilities_TE = logits_TE.softmax(-1, torch.float32)
        chosen_TK = chosen_TK.long()
        if self.balance is not None:
            probabilities_TE = self._balanced(probabilities_TE, chosen_TK)
        weights_TK = weights_of(probabilities_TE, chosen_TK, self.config.renormalizes)
        return chosen_TK, weights_TK.to(x_TH.dtype)

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TH = self.experts(x_TH, ids_TK, weights_TK)
        if self.shared is None:
            return y_TH
        gate_T1 = sigmoid(linear(x_TH, self._spread(self.shared_gate)))
        return y_TH + gate_T1 * self.shared(x_TH)

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
        E, size = experts.num_experts // place.size, experts.size // place.width_size
        self.gate_up = nn.Parameter(torch.empty(E, 2, size, H))
        self.down = nn.Parameter(torch.empty(E, H, size))
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

    def _mix(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_pairs: int | None = None
    ) -> Tensor:
        adapters = [a if a and a.is_on else None for a in (self.gate_up_adapter, self.down_adapter)]
        here = {"first": self.first, "num_pairs": num_pairs}
        return mix(x_TH, self.gate_up, self.down, ids_TK, weights_TK, adapters, **here)


def top_experts(logits_TE: Tensor, num: int, renormalizes: bool) -> tuple[Tensor, Tensor]:
    """The likeliest experts, in order, and their weights; of equal ones the first."""
    if logits_TE.is_cuda:
        from roll_lite.kernels.experts import route

        return route(logits_TE, num, renormalizes)
    probabilities_TE = logits_TE.softmax(-1, torch.float32)
    ids_TK = probabilities_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num]
    return ids_TK, weights_of(probabilities_TE, ids_TK, renormalizes).to(logits_TE.dtype)


def weights_of(probabilities_TE: Tensor, ids_TK: Tensor, renormalizes: bool) -> Tensor:
    weights_TK = probabilities_TE.gather(1, ids_TK)
    return weights_TK / weights_TK.sum(1, keepdim=True) if renormalizes else weights_TK


def mix(
    x_TH: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    adapters: Sequence[ExpertAdapter | None] = (None, None),
    *,
    first: int = 0,
    num_pairs: int | None = None,
) -> Tensor:
    """The weighted sum of the outputs of each token's experts, added in fp32 in their order.

    The E experts are those from number `first` on; others add nothing. `num_pairs` is how many are
    not others, if that is known.
    """
    if x_TH.is_cuda and not any(adapters):
        return _kernels(num_pairs, x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK, first)
    num_experts, num_chosen = len(down_EHF), ids_TK.shape[1]
    local_P = ids_TK.flatten() - first
    local_P = local_P.where((local_P >= 0) & (local_P < num_experts), num_experts)  # elsewhere last
    pairs_P = local_P.argsort(stable=True)[:num_pairs]
    x_PH = x_TH[pairs_P // num_chosen]
    run = _grouped if x_TH.is_cuda else _one_by_one
    out_PH = run(x_PH, local_P[pairs_P], gate_up_E2FH.flatten(1, 2), down_EHF, adapters)
    zeros = x_TH.new_zeros(ids_TK.numel(), x_TH.shape[1])
    out_TKH = zeros.index_copy(0, pairs_P, out_PH).unflatten(0, ids_TK.shape)
    return (out_TKH.float() * weights_TK.float()[:, :, None]).sum(1).to(x_TH.dtype)


def _kernels(num_pairs: int | None, *inputs: Tensor | int) -> Tensor:
    if torch.is_grad_enabled():
        from roll_lite.kernels.expert_gradients import grouped_mlp

        return grouped_mlp(*inputs, num_pairs)
    from roll_lite.kernels.experts import expert_mlp

    return expert_mlp(*inputs)


def _one_by_one(
    x_PH: Tensor,
    experts_P: Tensor,
    gate_up_ENH: Tensor,
    down_EHF: Tensor,
    adapters: Sequence[ExpertAdapter | None],
) -> Tensor:
    """Outputs of pairs in order of their experts; 0 for the last ones, of experts elsewhere."""
    *parts, elsewhere = x_PH.split(experts_P.bincount(minlength=len(down_EHF) + 1).tolist())
    gate_up, down = map(_projection, (gate_up_ENH, down_EHF), adapters)
    out = [down(n, silu_mul(gate_up(n, x))) for n, x in enumerate(parts)]
    return torch.cat([*out, torch.zeros_like(elsewhere)])


def _projection(
    weight_ENH: Tensor, adapter: ExpertAdapter | None
) -> Callable[[int, Tensor], Tensor]:
    """The projection of one expert, with its adapter."""
    weights = weight_ENH.unbind()
    if adapter is None:
        return lambda number, x: linear(x, weights[number])
    down, up = (matrices.unbind() for matrices in adapter.matrices())

    def project(number: int, x: Tensor) -> Tensor:
        added = linear(linear(x, down[number]), up[number])
        return linear(x, weights[number]) + added * adapter.scale

    return project


def _grouped(
    x_PH: Tensor,
    experts_P: Tensor,
    gate_up_ENH: Tensor,
    down_EHF: Tensor,
    adapters: Sequence[ExpertAdapter | None],
) -> Tensor:
    """As `_one_by_one`, in grouped products, which a CUDA graph can capture."""
    numbers_E = torch.arange(len(down_EHF), device=x_PH.device)
    ends_E = torch.searchsorted(experts_P, numbers_E, right=True, out_int32=True)
    is_here_P1 = (experts_P < len(down_EHF))[:, None]

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends_E)

    def project(x: Tensor, weight: Tensor, adapter: ExpertAdapter | None) -> Tensor:
        if adapter is None:
            return product(x, weight)
        down, up = adapter.matrices()
        return product(x, weight) + product(product(x, down), up) * adapter.scale

    # Behind the last group products hold anything, and so do their gradients.
    inner = silu_mul(project(x_PH.where(is_here_P1, 0), gate_up_ENH, adapters[0]))
    return project(inner, down_EHF, adapters[1]).where(is_here_P1, 0)
