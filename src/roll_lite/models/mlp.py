"""The MLP of a block: dense, or a mixture of experts of which each token has a few.

Shape suffixes here: T tokens, H hidden, F inner width, E experts, K experts of a token.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from roll_lite.models.config import ModelConfig
from roll_lite.models.lora import Adapter
from roll_lite.models.ops import linear, silu_mul
from roll_lite.models.tensor_parallel import TensorShard

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
    return y if adapter is None or not adapter.is_on else adapter(x, y)


class Experts(nn.Module):
    """A mixture of experts, each a SwiGLU.

    The router chooses the K likeliest experts of a token; their outputs are added up, weighted with
    their probabilities. Tensor-parallel ranks hold a part of every expert's inner width.
    """

    def __init__(self, config: ModelConfig, number: int, shard: TensorShard | None = None):
        super().__init__()
        experts, H = config.experts, config.hidden_size
        self.number = number
        """Among the sparse layers of the model."""
        self.config = experts
        self.shard = shard
        self.router = nn.Parameter(torch.empty(experts.num_experts, H))
        self.expert_gate_up = nn.Parameter(torch.empty(experts.num_experts, 2, experts.size, H))
        self.expert_down = nn.Parameter(torch.empty(experts.num_experts, H, experts.size))
        self.shared = self.shared_gate = None
        if experts.shared_size:
            self.shared = SwiGLU(H, experts.shared_size)
            self.shared_gate = nn.Parameter(torch.empty(1, H))

    def forward(self, x_TH: Tensor, choose: Choose | None = None) -> Tensor:
        probabilities_TE = linear(x_TH, self._spread(self.router)).softmax(-1, torch.float32)
        ids_TK = top_experts(probabilities_TE, self.config.experts_per_token)
        if choose is not None:
            ids_TK = choose(self.number, ids_TK)
        weights_TK = probabilities_TE.gather(1, ids_TK)
        if self.config.renormalizes:
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        weights_TK = weights_TK.to(x_TH.dtype)
        y_TH = mix(x_TH, self.expert_gate_up, self.expert_down, ids_TK, weights_TK)
        if self.shared is None:
            return y_TH
        return y_TH + linear(x_TH, self._spread(self.shared_gate)).sigmoid() * self.shared(x_TH)

    def _spread(self, weight: Tensor) -> Tensor:
        """Of a weight that ranks hold whole, whose gradient each rank has a part of."""
        return weight if self.shard is None else self.shard.spread(weight)


def top_experts(probabilities_TE: Tensor, num: int) -> Tensor:
    """The likeliest experts, in order; of equal ones the first."""
    return probabilities_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num]


def mix(
    x_TH: Tensor, gate_up_E2FH: Tensor, down_EHF: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The weighted sum of the outputs of each token's experts, added in fp32 in their order."""
    num_chosen = ids_TK.shape[1]
    pairs_P = ids_TK.flatten().argsort(stable=True)  # by expert
    counts_E = ids_TK.flatten().bincount(minlength=len(down_EHF)).tolist()
    out = []
    for expert, pairs in enumerate(pairs_P.split(counts_E)):
        if len(pairs):
            x = x_TH[pairs // num_chosen]
            inner = silu_mul(linear(x, gate_up_E2FH[expert].flatten(0, 1)))
            out.append(linear(inner, down_EHF[expert]))
    out_TKH = torch.cat(out)[pairs_P.argsort()].unflatten(0, ids_TK.shape)
    return (out_TKH.float() * weights_TK.float()[:, :, None]).sum(1).to(x_TH.dtype)
