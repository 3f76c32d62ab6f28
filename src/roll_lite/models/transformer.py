"""The decoder that is trained and that generates: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3;
and mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE.

Shape suffixes: T tokens, H hidden, K kv heads, G query heads per kv head, D head, F intermediate.
"""

import functools
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from roll_lite.models.attention import Attend, Projected
from roll_lite.models.config import ModelConfig, local_config
from roll_lite.models.logprobs import ALL, head_logits, token_logprobs, top_logprobs
from roll_lite.models.lora import Adapter
from roll_lite.models.mlp import Choose, Experts, SwiGLU, project
from roll_lite.models.ops import Rotary, add_norm
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.types import Truncation

Checkpointing = Literal["none", "selective", "full"]
Head = Literal["language", "value"]


class RMSNorm(nn.Module):
    """With a `shard`, the ranks norm different heads with the same weight."""

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

    Row k of the weight holds the G query heads of kv head k, then its key and its value. So a
    shard of dimension 0 is a set of whole heads, for tensor parallelism and generation alike.
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


class Block(nn.Module):
    """Pre-norm residual block. Its MLP is dense or a mixture of experts.

    A block returns the residual stream and what is still to be added to it; the next block fuses
    that addition with its norm. A `shard` sums over tensor-parallel ranks.
    """

    checkpointing: Checkpointing = "none"
    """What backward recomputes: nothing, all but matrix products and attention, or everything."""

    def __init__(self, config: ModelConfig, layer: int, shard: TensorShard | None = None):
        super().__init__()
        self.layer = layer
        self.shard = shard
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, shard)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        if layer in config.sparse_layers:
            self.mlp = Experts(config, config.sparse_layers.index(layer), shard)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, *inputs) -> tuple[Tensor, Tensor]:
        """The block on the inputs of `_run`, with checkpointing in training."""
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self._run(*inputs)
        options = {"use_reentrant": False, "preserve_rng_state": False}
        if self.checkpointing == "full":
            return checkpoint(self._run, *inputs, **options)
        keep = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        if isinstance(self.mlp, Experts):  # whose products keep what backward needs, and no more
            return self._finish(*checkpoint(self._start, *inputs, context_fn=keep, **options))
        return checkpoint(self._run, *inputs, context_fn=keep, **options)

    def _run(self, *inputs) -> tuple[Tensor, Tensor]:
        return self._finish(*self._start(*inputs))

    def _start(
        self,
        x_TH: Tensor,
        delta_TH: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        choose: Choose | None,
    ) -> tuple[Tensor, ...]:
        """Up to the MLP: the residual stream and the inputs of the MLP."""
        if delta_TH is None:
            normed_TH = self.attention_norm(x_TH)
        else:
            norm = self.attention_norm
            x_TH, normed_TH = add_norm(x_TH, delta_TH, norm.weight, norm.eps)
        delta_TH = self._whole(self.attention(self._spread(normed_TH), rotary, attend, self.layer))
        x_TH, normed_TH = add_norm(x_TH, delta_TH, self.mlp_norm.weight, self.mlp_norm.eps)
        normed_TH = self._spread(normed_TH)
        if isinstance(self.mlp, Experts):
            return x_TH, normed_TH, *self.mlp.route(normed_TH, choose)
        return x_TH, normed_TH

    def _finish(self, x_TH: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return x_TH, self._whole(self.mlp(*inputs))

    def _spread(self, x_TH: Tensor) -> Tensor:
        return x_TH if self.shard is None else self.shard.spread(x_TH)

    def _whole(self, partial_TH: Tensor) -> Tensor:
        return partial_TH if self.shard is None else self.shard.all_reduce(partial_TH)


def _keep_products(context, operator, *args, **kwargs) -> CheckpointPolicy:
    """Keep matrix products and attention; recompute what is cheap."""
    name = operator.name()
    is_product = name.startswith(("aten::mm", "aten::addmm", "aten::bmm"))
    is_attention = "attn" in name or "attention" in name or "flash" in name
    if is_product or is_attention:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Transformer(nn.Module):
    """Sequences are packed end to end in (T,); only `attend` knows their boundaries.

    With a `shard`, modules have this rank's sizes, and tensor-parallel ranks run in lockstep.
    """

    def __init__(
        self, config: ModelConfig, head: Head = "language", shard: TensorShard | None = None
    ):
        super().__init__()
        self.config = config
        self.layout = replace(shard, config=config) if shard else None
        """Which part of each parameter this rank holds; None if it holds all."""
        self.shard = self.layout if shard and shard.size > 1 else None
        self.local_config = config = local_config(config, shard.size) if shard else config
        self.rotary = Rotary(config.rope, config.head_dim)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(
            Block(config, layer, self.layout) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = self.value_head = None
        if head == "value":
            self.value_head = nn.Parameter(torch.empty(1, config.hidden_size))
        elif not config.tied_head:
            self.lm_head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    @property
    def head_weight(self) -> Tensor:
        """The (vocabulary, hidden) matrix of the language-model head."""
        return self.embedding if self.lm_head is None else self.lm_head

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary; -inf for its padding."""
        return head_logits(hidden_RH, self.head_weight, self.shard, -torch.inf)

    def hidden_states(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        choose: Choose | None = None,
    ) -> Tensor:
        """`choose` may record the experts that routers choose, or give others."""
        if self.shard is None:
            x_TH = F.embedding(token_ids_T, self.embedding)
        else:
            x_TH = self.shard.look_up(token_ids_T, self.embedding)
        rotary = self.rotary(positions_T)
        delta_TH = None
        for block in self.blocks:
            x_TH, delta_TH = block(x_TH, delta_TH, rotary, attend, choose)
        return add_norm(x_TH, delta_TH, self.norm.weight, self.norm.eps)[1]

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        rows_R: Tensor,
        targets_R: Tensor | None = None,
        temperature: float = 1.0,
        num_top: int = 0,
        num_entries: int | None = None,
        truncation: Truncation = ALL,
        is_whole_R: Tensor | None = None,
        choose: Choose | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """At the positions `rows_R`: logprobs of `targets_R` and entropies, or values (fp32).

        A row may have one target, (R,), or several, (R, K). With `num_top`: ids and logprobs of
        that many likeliest tokens instead, among the vocabulary's first `num_entries`. Logprobs of
        targets and entropies are of what the `truncation` leaves in, except where `is_whole_R`.

        The head runs inside forward, so that FSDP hooks see it, and only on `rows_R`.
        """
        hidden_RH = self.hidden_states(token_ids_T, positions_T, attend, choose)[rows_R]
        if self.value_head is not None:
            return (hidden_RH.float() * self.value_head.float()).sum(-1)
        if num_top:
            options = temperature, self.shard, num_entries
            return top_logprobs(hidden_RH, self.head_weight, num_top, *options)
        options = temperature, self.shard, truncation, is_whole_R
        return token_logprobs(hidden_RH, self.head_weight, targets_R, *options)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fresh weights: normal matrices, biases 0, norms 1, residual outputs scaled by depth."""
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        std = 0.02
        residual_std = std / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(("bias", "value_head")):
                parameter.zero_()
            else:
                is_residual = name.endswith(("attention.out", ".down"))
                parameter.normal_(0, residual_std if is_residual else std, generator=generator)


def random_model(
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head: Head = "language",
    shard: TensorShard | None = None,
) -> Transformer:
    """A model for benchmarks; tensor-parallel ranks draw the same numbers for their shards."""
    with torch.device("meta"):
        model = Transformer(config, head, shard)
    model.to(dtype).to_empty(device=device)  # in this order: fp32 might not fit
    model.init_weights(0)
    return model
