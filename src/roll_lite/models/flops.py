"""Floating-point operations of a decoder, and what devices can do."""

from roll_lite.models.config import ModelConfig

DENSE_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Operations a second by a part of the device's name, as their makers state them (SXM)."""


def forward_flops(
    config: ModelConfig, *, num_tokens: float, num_pairs: float, num_rows: float
) -> float:
    """`num_pairs` counts (query, key) pairs, len * (len + 1) / 2 of each sequence; `num_rows` the
    tokens that go through the head."""
    H, D = config.hidden_size, config.head_dim
    block = H * D * (2 * config.num_heads + 2 * config.num_kv_heads)
    block += 3 * H * config.intermediate_size
    products = 2.0 * (config.num_layers * block * num_tokens + config.vocab_size * H * num_rows)
    return products + 4 * config.num_layers * config.num_heads * D * num_pairs


def training_flops(config: ModelConfig, *, is_frozen: bool = False, **counts: float) -> float:
    """Forward and backward, whose second half, gradients of weights, a frozen model does without.

    What checkpointing computes again does not count.
    """
    return (2 if is_frozen else 3) * forward_flops(config, **counts)


def device_flops(name: str) -> float | None:
    """Operations a second in bf16 of a device by its name; None if it is not known."""
    return next((flops for part, flops in DENSE_BF16.items() if part in name), None)
