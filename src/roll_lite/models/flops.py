"""Floating-point operations of a decoder, and what devices can do."""

from roll_lite.models.config import ModelConfig

DENSE_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Operations a second by a part of the device's name, as their makers state them (SXM)."""


def product_parameters(config: ModelConfig) -> int:
    """Entries of all matrices that every token is multiplied with, the head included."""
    H, D = config.hidden_size, config.head_dim
    attention = H * D * (2 * config.num_heads + 2 * config.num_kv_heads)
    block = attention + 3 * H * config.intermediate_size
    return config.num_layers * block + config.vocab_size * H


def forward_flops(config: ModelConfig, num_tokens: int, num_pairs: int) -> float:
    """`num_pairs` counts (query, key) pairs: len * (len + 1) / 2 of each sequence."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * num_pairs
    return 2.0 * product_parameters(config) * num_tokens + attention


def training_flops(config: ModelConfig, num_tokens: int, num_pairs: int) -> float:
    """Forward and backward; what checkpointing computes again does not count."""
    return 3 * forward_flops(config, num_tokens, num_pairs)


def device_flops(name: str) -> float | None:
    """Operations a second in bf16 of a device by its name; None if it is not known."""
    return next((flops for part, flops in DENSE_BF16.items() if part in name), None)
