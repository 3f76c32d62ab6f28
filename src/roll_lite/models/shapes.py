"""What the config.json of well-known models says, by name: no download."""

from typing import Any

from roll_lite.checks import UserError


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int = 8, **more: Any) -> dict:
    return {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "rope_theta": 1e6,
    } | more  # fmt: skip


def _qwen2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict:
    return {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": hidden,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "tie_word_embeddings": False, "rope_theta": 1e6,
    } | more  # fmt: skip


def _llama3(hidden: int, mlp: int, layers: int, heads: int, factor: float, **more: Any) -> dict:
    return {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": hidden,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    } | more  # fmt: skip


def _experts(size: int) -> dict:
    """The MLP of Qwen3's mixtures: 128 experts, 8 for each token."""
    mixture = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": size}
    return {"model_type": "qwen3_moe", "norm_topk_prob": True, **mixture}


TIED = {"tie_word_embeddings": True}
SHAPES: dict[str, dict] = {
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "rope_theta": 1e5,
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, **TIED),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, **TIED),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, **TIED),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, **TIED),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, **TIED),
    "qwen2.5-7b": _qwen2(
        3584, 18944, 28, 28, 4, vocab_size=152064, max_position_embeddings=131072
    ),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 32.0, head_dim=64, **TIED),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 32.0, **TIED),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8.0),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 8.0),
    "llama-3.1-405b": _llama3(16384, 53248, 126, 128, 8.0),
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, 32, 4, **_experts(768)),
    "qwen3-235b-a22b": _qwen3(4096, 12288, 94, 64, 4, **_experts(1536)),
}  # fmt: skip


def hf_shape(name: str) -> dict:
    """The config.json of a well-known model; of qwen3-8b/4, with four layers alone."""
    base, _, layers = name.partition("/")
    if base not in SHAPES:
        raise UserError(f"shape={base!r} is not known; use one of {', '.join(SHAPES)}")
    if not layers:
        return SHAPES[base]
    most = SHAPES[base]["num_hidden_layers"]
    if not layers.isdecimal() or not 1 <= int(layers) <= most:
        raise UserError(f"shape={name!r}: give 1 to {most} layers, as in {base}/2")
    return SHAPES[base] | {"num_hidden_layers": int(layers)}
