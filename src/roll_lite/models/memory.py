"""Bytes that each role takes on one rank. Pure arithmetic: no torch, no device.

`width` is the bytes of an element that models compute in: 2 (bf16) on a GPU, 4 (fp32) on a CPU.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

from roll_lite.checks import UserError
from roll_lite.models.config import DEFAULT_TARGETS, ModelConfig
from roll_lite.models.cost import (
    adapter_cost,
    block_bytes_per_token,
    cache_bytes_per_token,
    count_parameters,
    kv_bytes_per_token,
    saved_bytes_per_token,
    vocabulary_rows,
    workspace_bytes_per_token,
)

USABLE = 0.9
"""Share of a device to plan with; the rest is for CUDA, communication buffers and fragmentation."""
LOGPROB_ROWS = 2048  # models/logprobs.py: rows that go through the head at once on a GPU
PAGE_TOKENS = 16  # tokens in a page of the engine's KV cache
MAX_PREFILL_TOKENS = 32768  # tokens that one engine step prefills
MAX_RUNNING = 1024  # samples that one engine decodes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at the peak of a step."""

    weights: int = 0
    """Shards of the fp32 masters and of the reference, and the engine's own copy."""
    gradients: int = 0
    """fp32 shards."""
    optimizer: int = 0
    """Shards of AdamW's two moments."""
    gathered: int = 0
    """Unsharded weights of the modules that FSDP has gathered."""
    activations: int = 0
    kv_cache: int = 0

    @property
    def total(self) -> int:
        resident = self.weights + self.gradients + self.optimizer + self.kv_cache
        return resident + self.gathered + self.activations

    @property
    def idle(self) -> "RankMemory":
        """What stays while the role waits: a trainer keeps no gradients between its updates."""
        return RankMemory(weights=self.weights, optimizer=self.optimizer, kv_cache=self.kv_cache)


def train_memory(
    config: ModelConfig,
    num_ranks: int,
    tp: int,
    tokens: int,
    width: int,
    *,
    ep: int = 1,
    checkpointing: str = "none",
    moments: str = "float32",
    lora_rank: int = 0,
    lora_targets: Collection[str] = DEFAULT_TARGETS,
) -> RankMemory:
    """FSDP2 over `num_ranks` that hold the weights once: fp32 masters and gradients, compute in
    `width`. Experts are dealt to `ep` of them, and sharded over those that hold the same ones.

    With LoRA the model is frozen in `width`, and masters, gradients and moments are those of the
    adapters; frozen weights that are not sharded are not gathered either. Inputs of projections
    without adapters are counted as kept, which is slightly too much.
    """
    counts = count_parameters(config, tp, ep)
    targets = lora_targets if lora_rank else ()
    adapters, all_adapters = adapter_cost(config, lora_rank, targets, tp, ep)
    whole_adapters = adapter_cost(config, lora_rank, targets, tp)[1]
    trained = whole_adapters.parameters if lora_rank else counts.total
    shard = ceil(trained / num_ranks)
    moment_bytes = 4 if moments == "float32" else 2
    frozen = width * ceil(counts.total / num_ranks) if lora_rank else 0
    per_token = saved_bytes_per_token(config, tp, width, checkpointing, ep)
    if checkpointing != "full":
        per_token += all_adapters.kept(width)
    recomputed = block_bytes_per_token(config, tp, width, ep) + adapters.kept(width)
    trained_block = adapters.parameters if lora_rank else counts.block
    trained_head = 0 if lora_rank else vocabulary_rows(config, tp) * config.hidden_size
    saved = tokens * per_token + _backward_bytes(
        config, tp, ep, tokens, width, recomputed if checkpointing != "none" else 0,
        trained_block // tp, trained_head,
    )  # fmt: skip
    # The root's gradients are reduced last (in `width` and fp32), after all activations are freed.
    root_gradients = 0 if lora_rank else (width + 4) * counts.root // tp
    gathered = gathered_bytes(config, tp, width, ep, adapters.parameters)
    if lora_rank and num_ranks == tp:
        gathered = adapter_bytes(config, tp, width, lora_rank, targets)
    return RankMemory(
        weights=4 * shard + frozen,
        gradients=4 * shard,
        optimizer=2 * moment_bytes * shard,
        gathered=gathered,
        activations=max(saved, root_gradients),
    )


def reference_memory(
    config: ModelConfig, num_ranks: int, tp: int, tokens: int, width: int, ep: int = 1
) -> RankMemory:
    """A frozen model sharded in the compute dtype, gathered block by block to run forward."""
    # A teacher also has the logits in fp32.
    chunk = (width + 4) * LOGPROB_ROWS * vocabulary_rows(config, tp)
    return RankMemory(
        weights=width * ceil(count_parameters(config, tp).total / num_ranks),
        gathered=gathered_bytes(config, tp, width, ep),
        activations=tokens * workspace_bytes_per_token(config, tp, width, ep) + chunk,
    )


def context_bytes(
    config: ModelConfig, cp: int, tp: int, tokens: int, width: int, checkpointing: str | None
) -> int:
    """Keys and values of all `cp` ranks beside a rank's own `tokens`; None is a forward pass alone.

    A layer holds them as they arrive and in order; backward needs those of all layers, unless they
    are gathered again.
    """
    if cp == 1:
        return 0
    layer = cp * tokens * kv_bytes_per_token(config, tp, width) // config.num_layers
    return (2 + (config.num_layers if checkpointing == "none" else 1)) * layer


def engine_memory(
    config: ModelConfig, num_ranks: int, tp: int, tokens: int, width: int, ep: int = 1
) -> RankMemory:
    """An engine's weights and a prefill of `tokens`; the KV cache is not included. Whole experts on
    `ep` of its ranks are as many bytes as a part of each."""
    tokens = min(tokens, MAX_PREFILL_TOKENS)
    return RankMemory(
        weights=engine_bytes(config, tp, 0, width),
        activations=tokens * workspace_bytes_per_token(config, tp, width),
    )


def role_memory(
    name: str,
    config: ModelConfig,
    num_ranks: int,
    tp: int,
    tokens: int,
    width: int,
    ep: int = 1,
    **train: Any,
) -> RankMemory:
    """Memory of a role on each of its ranks for passes of `tokens`; without the KV cache.

    `train` are options of `train_memory`; a critic has no adapters.
    """
    sizes = num_ranks, tp, tokens, width
    if name == "train":
        return train_memory(config, *sizes, ep=ep, **train)
    if name == "critic":  # slightly too much: its head is smaller
        return train_memory(config, *sizes, ep=ep, **train | {"lora_rank": 0})
    known = {
        "generate": engine_memory,
        "reference": reference_memory,
        "judge": engine_memory,
        "reward_model": reference_memory,
    }
    if is_teacher(name):
        return reference_memory(config, *sizes, ep)
    if name not in known:
        names = ", ".join(("train", "critic", "teacher", *known))
        raise UserError(f"the memory of role {name} is not known; known are {names}")
    return known[name](config, *sizes, ep)


def is_teacher(role: str) -> bool:
    """Whether a role scores samples for distillation: teacher, or teacher_DOMAIN."""
    return role.partition("_")[0] == "teacher"


def adapter_bytes(
    config: ModelConfig, tp: int, width: int, rank: int, targets: Collection[str]
) -> int:
    """The adapters of all blocks, on one rank of a model that is not sharded."""
    return width * ceil(adapter_cost(config, rank, targets, tp)[1].parameters / tp)


def engine_bytes(config: ModelConfig, tp: int, cache_tokens: int, width: int = 2) -> int:
    """An idle engine: its weights and its KV cache."""
    weights = width * ceil(count_parameters(config, tp).total / tp)
    return weights + cache_tokens * cache_bytes_per_token(config, tp, width)


def gathered_bytes(config: ModelConfig, tp: int, width: int, ep: int = 1, adapters: int = 0) -> int:
    """The root stays gathered from forward to backward, beside a block and the prefetched next.

    `adapters` are the parameters that LoRA adds to a block.
    """
    counts = count_parameters(config, tp, ep)
    return width * (counts.root + min(2, config.num_layers) * (counts.block + adapters)) // tp


def _backward_bytes(
    config: ModelConfig,
    tp: int,
    ep: int,
    num_tokens: int,
    width: int,
    recomputed: int,
    trained_block: int,
    trained_head: int,
) -> int:
    """Peak of the backward pass beyond what forward saved: in the head or in a block.

    `recomputed` are bytes per token of a block whose activations are computed again;
    `trained_block` and `trained_head` are parameters with a gradient on this rank.
    """
    H = config.hidden_size
    V = vocabulary_rows(config, tp)
    # Head, in chunks of rows: a chunk's logits, which become their gradient; the head's gradient
    # in fp32, and what a chunk adds to it; the gradient of the hidden states.
    head = width * LOGPROB_ROWS * V + (4 + width) * trained_head + num_tokens * width * H
    # Block: its unsharded gradients in `width`, and in fp32 to be reduced; the head's gradient;
    # gradients of activations.
    block = (width + 4) * trained_block + width * trained_head
    block += num_tokens * (workspace_bytes_per_token(config, tp, width, ep) + recomputed)
    return max(head, block)


def together(memories: Iterable[RankMemory]) -> RankMemory:
    """Roles on one rank take turns: resident bytes add up, of the rest only the largest counts."""
    memories = list(memories)
    busiest = max(memories, key=lambda m: m.gathered + m.activations, default=RankMemory())
    return RankMemory(
        weights=sum(m.weights for m in memories),
        gradients=sum(m.gradients for m in memories),
        optimizer=sum(m.optimizer for m in memories),
        gathered=busiest.gathered,
        activations=busiest.activations,
        kv_cache=sum(m.kv_cache for m in memories),
    )


def least_memory(
    config: ModelConfig, roles: Iterable[str], num_ranks: int, ep: int = 1, **train: Any
) -> RankMemory:
    """All roles but generate, on all GPU ranks, before any micro-batch; `ep` is of train."""
    parts = {name: ep if name == "train" else 1 for name in roles if name != "generate"}
    return together(
        role_memory(name, config, num_ranks, 1, 0, 2, part, **train) for name, part in parts.items()
    )


def usable_bytes(device_bytes: int) -> int:
    return int(USABLE * device_bytes)


def format_bytes(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"
