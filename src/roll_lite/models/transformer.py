"""The decoder that is trained and that generates: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roll_lite.models.attention import Attend
from roll_lite.models.config import ModelConfig
from roll_lite.models.layers import Block, RMSNorm, SwiGLU
from roll_lite.models.logprobs import token_logprobs, top_logprobs
from roll_lite.models.pointwise import add_norm
from roll_lite.models.rotary import Rotary
from roll_lite.models.tensor import TensorShard

Head = Literal["language", "value"]


class Transformer(nn.Module):
    """Tokens of several sequences lie end to end in (T,); only `attend` knows where they part.

    With a `shard` the modules have the size of this rank's part, and ranks run them together.
    """

    def __init__(
        self, config: ModelConfig, head: Head = "language", shard: TensorShard | None = None
    ):
        super().__init__()
        self.config, self.shard = config, shard
        self.local_config = config = shard.local(config) if shard else config
        self.rotary = Rotary(config.rope, config.head_dim)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(
            Block(config, layer, SwiGLU(config), shard) for layer in range(config.num_layers)
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

    def hidden_states(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        if self.shard is None:
            x_TH = F.embedding(token_ids_T, self.embedding)
        else:
            x_TH = self.shard.look_up(token_ids_T, self.embedding)
        rotary, delta_TH = self.rotary(positions_T), None
        for block in self.blocks:
            x_TH, delta_TH = block(x_TH, delta_TH, rotary, attend)
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
    ) -> tuple[Tensor, Tensor] | Tensor:
        """At the positions `rows_R`: logprobs of `targets_R` and entropies, or values (fp32).

        A row may have one target, (R,), or several, (R, K). With `num_top`: ids and logprobs of so
        many likeliest tokens instead, among the vocabulary's first `num_entries`.

        The head runs inside forward so that sharding hooks see it, and only on the rows asked for.
        """
        hidden_RH = self.hidden_states(token_ids_T, positions_T, attend)[rows_R]
        if self.value_head is not None:
            return (hidden_RH.float() * self.value_head.float()).sum(-1)
        if num_top:
            options = temperature, self.shard, num_entries
            return top_logprobs(hidden_RH, self.head_weight, num_top, *options)
        return token_logprobs(hidden_RH, self.head_weight, targets_R, temperature, self.shard)

    @torch.no_grad()
    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Fresh weights: normal matrices, biases 0, norms 1, residual outputs scaled by depth."""
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        residual_std = std / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(("bias", "value_head")):
                parameter.zero_()
            else:
                is_residual = name.endswith(("attention.out", "mlp.down"))
                parameter.normal_(0, residual_std if is_residual else std, generator=generator)


def random_model(
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head: Head = "language",
    shard: TensorShard | None = None,
) -> Transformer:
    """A model to measure with; tensor-parallel ranks draw the same numbers for their parts."""
    with torch.device("meta"):
        model = Transformer(config, head, shard)
    model.to_empty(device=device).to(dtype)
    model.init_weights(0)
    return model
