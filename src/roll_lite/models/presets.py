"""Models by name: a Hugging Face folder, or the shape of a well-known model (no download)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_lite.models.config import ModelConfig, parse_config

if TYPE_CHECKING:
    from roll_lite.models.transformer import Transformer

SHAPE = "shape:"
SHAPES: dict[str, dict] = {
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "rope_theta": 1e5,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "rope_theta": 1e6,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "rope_theta": 1e6,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 1e6,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "rope_theta": 1e6,
    },
    "llama-3.1-70b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip


def shape_config(name: str) -> ModelConfig:
    if name not in SHAPES:
        raise ValueError(f"shape={name!r} is not known; use one of {', '.join(SHAPES)}")
    return parse_config(SHAPES[name])


def open_model(source: str | Path, **options: Any) -> "Transformer":
    """`source` is a folder, or a shape with random weights for benchmarks: shape:qwen3-0.6b."""
    from roll_lite.models.hf import load_model  # not above: sizes alone need no torch
    from roll_lite.models.transformer import random_model

    if str(source).startswith(SHAPE):
        return random_model(shape_config(str(source).removeprefix(SHAPE)), **options)
    return load_model(source, **options)
