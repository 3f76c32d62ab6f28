"""The parts of a decoder block. Shape suffixes: T tokens, H hidden, K kv heads, G group, D head."""

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from roll_lite.models.attention import Attend
from roll_lite.models.config import ModelConfig
from roll_lite.models.linear import linear
from roll_lite.models.lora import Adapter
from roll_lite.models.pointwise import add_norm, silu_mul
from roll_lite.models.rotary import Projected
from roll_lite.models.tensor import TensorShard

Checkpointing = Literal["none", "selective", "full"]


class RMSNorm(nn.Module):
    """With a `shard`, each rank norms other heads with the same weight."""

    def __init__(self, size: int, eps: float, shard: TensorShard | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.shard = shard

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.spread_weight, self.eps)

    @property
    def spread_weight(self) -> Tensor:
        return self.weight if self.shard is None else self.shard.spread(self.weight)


class Attention(nn.Module):
    """Grouped-query attention with one fused projection, stored (K, G+2, D, H).

    Row k of the weight holds the G query heads of kv head k, then its key and its value, so that
    a shard of dimension 0 is a whole set of heads for tensor parallelism and generation alike.
    """

    def __init__(self, config: ModelConfig, shard: TensorShard | None = None):
        super().__init__()
        K, G, D = config.num_kv_heads, config.group_size, config.head_dim
        self.qkv = nn.Parameter(torch.empty(K, G + 2, D, config.hidden_size))
        self.qkv_bias = nn.Parameter(torch.empty(K, G + 2, D)) if config.qkv_bias else None
        self.q_norm = RMSNorm(D, config.norm_eps, shard) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps, shard) if config.qk_norm else None
        self.out = nn.Parameter(torch.empty(config.hidden_size, K * G * D))
        self.qkv_adapter: Adapter | None = None
        self.out_adapter: Adapter | None = None

    def forward(
        self, x_TH: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        bias = None if self.qkv_bias is None else self.qkv_bias.flatten()
        qkv = project(x_TH, self.qkv.flatten(0, 2), self.qkv_adapter, bias)
        qkv_TKGD = qkv.unflatten(-1, self.qkv.shape[:3])
        out_THD = attend(layer, Projected(qkv_TKGD, *rotary, self.q_norm, self.k_norm))
        return project(out_THD.flatten(1), self.out, self.out_adapter)


class SwiGLU(nn.Module):
    """gate_up is stored (2, F, H): a shard of dimension 1 holds matching gate and up rows."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, config.intermediate_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, config.intermediate_size))
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


class Block(nn.Module):
    """Pre-norm residual block. `mlp` is any module from (T, H) to (T, H), dense or sparse.

    What a block adds to the residual stream is returned beside it, and added by the next one
    together with its norm. A `shard` adds up what tensor-parallel ranks computed.
    """

    checkpointing: Checkpointing = "none"
    """What backward computes again: nothing, all but products and attention, or everything."""

    def __init__(
        self, config: ModelConfig, layer: int, mlp: nn.Module, shard: TensorShard | None = None
    ):
        super().__init__()
        self.layer = layer
        self.shard = shard
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, shard)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x_TH: Tensor,
        delta_TH: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self._run(x_TH, delta_TH, rotary, attend)
        contexts = noop_context_fn
        if self.checkpointing == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        return checkpoint(
            self._run, x_TH, delta_TH, rotary, attend,
            use_reentrant=False, preserve_rng_state=False, context_fn=contexts,
        )  # fmt: skip

    def _run(
        self,
        x_TH: Tensor,
        delta_TH: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        if delta_TH is None:
            normed_TH = self.attention_norm(x_TH)
        else:
            norm = self.attention_norm
            x_TH, normed_TH = add_norm(x_TH, delta_TH, norm.weight, norm.eps)
        delta_TH = self._whole(self.attention(self._spread(normed_TH), rotary, attend, self.layer))
        x_TH, normed_TH = add_norm(x_TH, delta_TH, self.mlp_norm.weight, self.mlp_norm.eps)
        return x_TH, self._whole(self.mlp(self._spread(normed_TH)))

    def _spread(self, x_TH: Tensor) -> Tensor:
        return x_TH if self.shard is None else self.shard.spread(x_TH)

    def _whole(self, partial_TH: Tensor) -> Tensor:
        return partial_TH if self.shard is None else self.shard.add_up(partial_TH)


def _keep_products(context, operator, *args, **kwargs) -> CheckpointPolicy:
    """Matrix products and attention are kept; what is cheap to compute again is not."""
    name = operator.name()
    is_product = name.startswith(("aten::mm", "aten::addmm", "aten::bmm"))
    is_attention = "attn" in name or "attention" in name or "flash" in name
    if is_product or is_attention:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
