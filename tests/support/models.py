"""Small models of every family, made by transformers, which is the reference throughout."""

import torch
import transformers

from roll_lite.characters import character_tokenizer

SMALL = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, 
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "smollm2": (
        "Llama",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5": ("Qwen2", {"num_attention_heads": 8, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
MIXTURES = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32, "tie_word_embeddings": True, "num_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
        },
    ),
    "qwen2_moe": (  # an expert that is shared, and a layer with an ordinary MLP
        "Qwen2Moe",
        {
            "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
        },
    ),
}  # fmt: skip


def make_reference(family: str, seed: int = 0, **more):
    """A transformers model of the family with random weights, biases and norms included."""
    kind, changes = (FAMILIES | MIXTURES)[family]
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes | more))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.normal_(centre, 0.08)
    return model


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def make_toy(folder, **changes):
    """One layer, random weights, one token per character: it learns easy things in a second. With
    EXPERTS it is a mixture."""
    tokenizer = character_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 64,
    } | changes  # fmt: skip
    kind = "qwen3_moe" if "num_experts" in sizes else "qwen3"
    config = transformers.AutoConfig.for_model(
        kind, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, **sizes
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
