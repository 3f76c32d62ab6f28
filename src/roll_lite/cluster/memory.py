"""Bytes that a model takes on one rank, by role. Pure arithmetic: no torch, no device.

H hidden, F intermediate, V vocabulary, D head; `width` is the bytes of an element that models
compute in: 2 (bf16) on a GPU, 4 (fp32) on a CPU. Of `tp` ranks each holds one share of the heads,
of F and of V.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from roll_lite.models.config import ModelConfig

USABLE = 0.9
"""Share of a device to plan with; the rest is for CUDA, communication buffers and fragments."""
LOGPROB_ROWS = 2048  # models/logprobs.py: rows that go through the head at once on a GPU
PAGE_TOKENS = 16  # the engine's cache is handed out in pages of so many tokens
MAX_PREFILL_TOKENS = 32768  # of one engine step
MAX_RUNNING = 1024  # samples that one engine decodes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank at the fullest moment of a step."""

    weights: int = 0
    """Shards of the fp32 masters and of the reference, and the engine's own copy."""
    gradients: int = 0
    """fp32, in shards."""
    optimizer: int = 0
    """AdamW's two fp32 moments, in shards."""
    gathered: int = 0
    """Whole weights of the modules at work, while they are at work."""
    activations: int = 0
    kv_cache: int = 0

    @property
    def total(self) -> int:
        stays = self.weights + self.gradients + self.optimizer + self.kv_cache
        return stays + self.gathered + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    block: int
    """Of one decoder block."""
    root: int
    """Of the embedding, the last norm and, unless tied, the head."""
    total: int


def count_parameters(config: ModelConfig) -> ParameterCounts:
    H, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * D
    block = qkv_rows * H + config.num_heads * D * H  # qkv and out
    block += 3 * F * H + 2 * H  # gate, up, down, and the two norms
    block += qkv_rows * config.qkv_bias + 2 * D * config.qk_norm
    root = config.vocab_size * H * (1 if config.tied_head else 2) + H
    return ParameterCounts(block=block, root=root, total=config.num_layers * block + root)


def train_memory(
    config: ModelConfig,
    num_ranks: int,
    tp: int,
    tokens: int,
    width: int,
    *,
    checkpointing: str = "none",
    moment_bytes: int = 4,
) -> Memory:
    """FSDP2 over the role's ranks: fp32 masters and gradients; compute in `width`."""
    counts = count_parameters(config)
    shard = ceil(counts.total / num_ranks)
    saved = tokens * saved_bytes_per_token(config, tp, width, checkpointing)
    saved += _backward_bytes(config, tp, tokens, width, checkpointing)
    # The root's gradients are reduced last (in `width` and fp32), when nothing saved is left.
    root_gradients = (width + 4) * counts.root // tp
    return Memory(
        weights=4 * shard,
        gradients=4 * shard,
        optimizer=2 * moment_bytes * shard,
        gathered=gathered_bytes(config, tp, width),
        activations=max(saved, root_gradients),
    )


def reference_memory(
    config: ModelConfig, num_ranks: int, tp: int, tokens: int, width: int
) -> Memory:
    """A frozen model in shards of the compute dtype, gathered block by block to run forward."""
    chunk = (width + 4) * LOGPROB_ROWS * config.vocab_size // tp  # a teacher's are also in fp32
    return Memory(
        weights=width * ceil(count_parameters(config).total / num_ranks),
        gathered=gathered_bytes(config, tp, width),
        activations=tokens * _forward_bytes_per_token(config, tp, width) + chunk,
    )


def engine_memory(config: ModelConfig, num_ranks: int, tp: int, tokens: int, width: int) -> Memory:
    """An engine's own weights and the prefill of so many tokens. Its cache comes on top."""
    tokens = min(tokens, MAX_PREFILL_TOKENS)
    return Memory(
        weights=engine_bytes(config, tp, 0, width),
        activations=tokens * _forward_bytes_per_token(config, tp, width),
    )


def role_memory(
    name: str, config: ModelConfig, num_ranks: int, tp: int, tokens: int, width: int
) -> Memory:
    """Of a role on each of its ranks, when a pass has so many tokens; without an engine's cache."""
    known = {
        "train": train_memory,
        "critic": train_memory,  # its head is a little smaller
        "generate": engine_memory,
        "reference": reference_memory,
        "judge": engine_memory,  # taken to be as large as the policy, like the next
        "reward_model": reference_memory,
    }
    if name not in known:
        raise ValueError(f"the memory of role {name} is not known; known are {', '.join(known)}")
    return known[name](config, num_ranks, tp, tokens, width)


def engine_bytes(config: ModelConfig, tp: int, cache_tokens: int, width: int = 2) -> int:
    """Of an engine at rest: its weights and its cache."""
    weights = width * ceil(count_parameters(config).total / tp)
    return weights + cache_tokens * kv_bytes_per_token(config, tp, width)


def kv_bytes_per_token(config: ModelConfig, tp: int, width: int) -> int:
    """Keys and values of one token in all layers."""
    return config.num_layers * 2 * config.num_kv_heads // tp * config.head_dim * width


def gathered_bytes(config: ModelConfig, tp: int, width: int) -> int:
    """The root stays whole from forward to backward; a block is at work, the next is on its way."""
    counts = count_parameters(config)
    return width * (counts.root + min(2, config.num_layers) * counts.block) // tp


def saved_bytes_per_token(
    config: ModelConfig, tp: int, width: int, checkpointing: str = "none"
) -> int:
    """What is kept of a packed token from forward to backward."""
    H, D = config.hidden_size, config.head_dim
    block = width * 2 * H  # full checkpointing: the residual stream, and what is added to it next
    if checkpointing == "none":
        block = block_bytes_per_token(config, tp, width)
    elif checkpointing == "selective":
        F, heads = config.intermediate_size // tp, config.num_heads // tp
        qkv = (config.num_heads + 2 * config.num_kv_heads) // tp * D
        # And the products: qkv, attention and its log-sum-exp, `out`, gate and up; `down` is there.
        block += width * (qkv + heads * D + H + 2 * F) + 4 * heads
    # Once: the last norm in and out, its rows that carry loss, its 1/rms, cos and sin.
    return config.num_layers * block + width * 3 * H + 4 * (1 + D)


def block_bytes_per_token(config: ModelConfig, tp: int, width: int) -> int:
    """What autograd keeps in one block, whose pointwise parts are fused."""
    H, F, D = config.hidden_size, config.intermediate_size // tp, config.head_dim
    heads, kv_heads = config.num_heads // tp, config.num_kv_heads // tp
    elements = (
        H  # the residual stream, for the attention norm
        + H  # that norm's output, for qkv
        + heads * D  # rotated queries, for attention
        + kv_heads * D  # rotated keys, for attention
        + kv_heads * D  # values, for attention
        + heads * D  # attention's output, for attention and `out`
        + H  # the residual stream, for the MLP norm
        + H  # that norm's output, for gate_up
        + 2 * F  # gate and up, for silu and the product
        + F  # the product, for down
    )
    fp32 = 2 + heads  # 1/rms of both norms, and attention's log-sum-exp
    if config.qk_norm:
        elements += (heads + 2 * kv_heads) * D  # qkv before its norms
        fp32 += heads + kv_heads  # 1/rms of every normed head
    return width * elements + 4 * fp32


def _backward_bytes(
    config: ModelConfig, tp: int, num_tokens: int, width: int, checkpointing: str
) -> int:
    """Beside what forward saved, at the fuller of two moments of the backward pass."""
    H, F, V = config.hidden_size, config.intermediate_size // tp, config.vocab_size // tp
    # The head, in chunks of rows: a chunk's logits, which become their gradient; the head's
    # gradient in fp32, and what a chunk adds to it; the gradient of the hidden states.
    head = width * LOGPROB_ROWS * V + (4 + width) * V * H + num_tokens * width * H
    # A block. Its own gradients whole, in `width` and in fp32 to be reduced; the head's gradient;
    # gradients of the residual stream, of gate and up, and of the product.
    block = (width + 4) * count_parameters(config).block // tp + width * V * H
    block += num_tokens * width * (2 * H + 3 * F)
    if checkpointing != "none":  # and what the block computes again
        block += num_tokens * block_bytes_per_token(config, tp, width)
    return max(head, block)


def _forward_bytes_per_token(config: ModelConfig, tp: int, width: int) -> int:
    """Without autograd: the residual stream, its norm, gate and up, and their product."""
    return width * (2 * config.hidden_size + 3 * config.intermediate_size // tp)


def together(memories: Iterable[Memory]) -> Memory:
    """Roles on one rank: what stays adds up; they take turns, so the work of only one counts."""
    memories = list(memories)
    busiest = max(memories, key=lambda m: m.gathered + m.activations, default=Memory())
    return Memory(
        weights=sum(m.weights for m in memories),
        gradients=sum(m.gradients for m in memories),
        optimizer=sum(m.optimizer for m in memories),
        gathered=busiest.gathered,
        activations=busiest.activations,
        kv_cache=sum(m.kv_cache for m in memories),
    )


def least_bytes(config: ModelConfig, roles: Iterable[str], num_ranks: int) -> int:
    """Of train and reference on all these ranks of a GPU cluster, before any micro-batch."""
    names = [name for name in roles if name != "generate"]
    return together(role_memory(name, config, num_ranks, 1, 0, 2) for name in names).total


def usable_bytes(device_bytes: int) -> int:
    return int(USABLE * device_bytes)


def format_bytes(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"
