"""Small mixtures of experts, made by transformers."""

import torch
import transformers

from roll_lite.models.tiny import character_tokenizer
from support.models import SMALL

MIXTURE = {
    "head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "norm_topk_prob": True, "mlp_only_layers": [1],
}  # fmt: skip


def make_mixture(folder, seed=0, **changes):
    """A mixture in layers 0 and 2 of three; routers far from undecided. Returns transformers'."""
    config = transformers.Qwen3MoeConfig(**SMALL | MIXTURE | changes)
    torch.manual_seed(seed)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    return model


def make_toy_mixture(folder, **changes):
    """One token per character: it learns easy things in a second."""
    tokenizer = character_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
        "num_experts_per_tok": 2, "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True, "mlp_only_layers": [],
    } | changes  # fmt: skip
    config = transformers.Qwen3MoeConfig(**SMALL | MIXTURE | sizes)
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def routed(reference, token_ids):
    """The experts of transformers' routers: (tokens, sparse layers, K), the likeliest first."""
    with torch.no_grad():
        found = reference(torch.tensor([token_ids]), output_router_logits=True)
    return torch.stack([logits.topk(3).indices for logits in found.router_logits], 1)
