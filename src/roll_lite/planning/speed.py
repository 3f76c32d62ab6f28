"""Seconds that the parts of a step take on GPUs. Pure arithmetic: no torch, no device.

Published rates of a GPU, times the shares of them that this code reached on one H200
(docs/benchmarks.md compares), and what the host needs for a sample and for a layer. Traffic between
ranks is counted by bytes and was not measured; the time of rewards is not counted.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from roll_lite.device_map import Role
from roll_lite.models.config import MixtureConfig, ModelConfig
from roll_lite.models.cost import (
    adapter_parameters,
    block_cost,
    count_parameters,
    device_flops,
    forward_flops,
    kv_bytes_per_token,
    mlp_cost,
    vocabulary_rows,
)
from roll_lite.models.memory import PAGE_TOKENS
from roll_lite.planning.planner import BatchPlan, Plan, memory_of, share

MEMORY_RATES = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12, "L40S": 0.86e12, "B200": 8e12}
LINK_RATES = {"H200": 450e9, "H100": 450e9, "A100": 300e9, "L40S": 32e9, "B200": 900e9}
"""Bytes per second of memory and, in one direction, of NVLink (L40S: PCIe), as published."""
NETWORK_RATE = 50e9
"""Bytes per second and GPU between machines: 400 Gbit/s."""

PRODUCTS_SHARE = 0.79  # of the published flops, in large matrix products
ATTENTION_SHARE = 0.16  # of the published flops, in attention of packed sequences of 2,048 tokens
MEMORY_SHARE = 0.89
POINTWISE_BYTES = 160
"""Traffic of all that is no product, per token, layer and unit of the hidden size, in one of the
three parts of a pass: forward, and gradients of inputs and of weights."""
UPDATE_BYTES = 28  # of AdamW, per parameter: gradient, master and two moments; all but one written
DECODE_SHARE = 0.85  # of what decoding's products and bytes take one after the other
LAYER_SECONDS = 30e-6  # starting a layer's kernels in a decoding step
SAMPLE_SECONDS = 250e-6  # of the host: coordinator and engine, for each sample
LAUNCH_SECONDS = 4.5e-3  # of the host: a layer's kernels of one micro-batch, forward and backward
REDUCE_SECONDS = 20e-6  # one small all-reduce between tensor-parallel ranks; assumed
SLEEP_SECONDS = 0.3  # sleep() and wake() together: 0.1 to 0.4
SYNC_SECONDS = 3e-3  # of the host, beyond the bytes; without a digest of the weights 0.7 to 2.7 ms
PAGE_SECONDS = 0.5e-6  # of the host, to forget a page of the KV cache when weights are new
HOST_RATE = 50e9  # bytes per second to and from pinned host memory, PCIe 5; assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What a GPU reaches, per second."""

    name: str
    products: float
    """Flops of matrix products."""
    attention: float
    """Flops of attention in training."""
    memory: float
    """Bytes."""
    link: float
    """Bytes to other GPUs of the machine."""


def known_gpu(name: str) -> Gpu | None:
    """By a part of the device's name; None if it is not known."""
    part = next((part for part in MEMORY_RATES if re.search(rf"\b{part}\b", name)), None)
    if part is None:
        return None
    flops = device_flops(part)
    return Gpu(
        name=part,
        products=PRODUCTS_SHARE * flops,
        attention=ATTENTION_SHARE * flops,
        memory=MEMORY_SHARE * MEMORY_RATES[part],
        link=LINK_RATES[part],
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a plan would run."""

    gpu: Gpu
    ranks_per_node: int = 8

    def rate(self, ranks: Collection[int]) -> float:
        """Bytes per second between ranks: NVLink in one machine, else the network."""
        nodes = {rank // self.ranks_per_node for rank in ranks}
        return self.gpu.link if len(nodes) == 1 else NETWORK_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a step: those of a plan have their full length, those of a run a mean."""

    num_generated: int
    num_trained: int
    prompt_tokens: float
    reply_tokens: float
    longest_reply: int
    num_updates: int

    @staticmethod
    def planned(batch: BatchPlan) -> "Samples":
        return Samples(
            num_generated=batch.num_samples, num_trained=batch.num_samples,
            prompt_tokens=batch.prompt_tokens, reply_tokens=batch.reply_tokens,
            longest_reply=batch.reply_tokens, num_updates=batch.updates_per_step,
        )  # fmt: skip

    def passed(self, role: Role) -> "Pass":
        """Those of one replica of a role: what each of its `cp` ranks reads of them."""
        return Pass(
            num_samples=share(self.num_trained, role.num_replicas) / role.cp,
            length=self.prompt_tokens + self.reply_tokens - 1,
            num_rows=self.reply_tokens,
        )

    def microbatches(self, role: Role, tokens: int) -> int:
        """Of one replica of a role, in one pass over the samples."""
        in_update = share(share(self.num_trained, self.num_updates), role.num_replicas)
        in_microbatch = max(1, int(tokens // self.passed(role).length))
        return share(in_update, in_microbatch) * self.num_updates


def step_seconds(plan: Plan, machine: Machine, samples: Samples | None = None) -> dict[str, float]:
    """Seconds of the parts of a step, and of the whole, `step`.

    Parts follow each other, unless the engines run ahead on ranks of their own.
    """
    device_map, batch = plan.device_map, plan.batch
    samples, seconds = samples or Samples.planned(batch), {}
    for name in ("reward_model", "reference", "critic"):
        if name in device_map:
            seconds[name] = _score_seconds(plan, device_map[name], machine.gpu, samples)
    if "critic" in device_map:
        seconds["critic"] += _train_seconds(plan, device_map["critic"], machine, samples, 0)
    train, generate = device_map["train"], device_map["generate"]
    seconds["train"] = _train_seconds(plan, train, machine, samples, batch.lora_rank)
    seconds["train"] += batch.policy_scores * _score_seconds(plan, train, machine.gpu, samples)
    seconds["sync"] = sync_seconds(
        plan.config, machine.gpu, machine.rate(train.ranks), len(train.ranks)
    )
    held = share(samples.num_generated, generate.num_replicas)
    pages = held * (samples.prompt_tokens + samples.reply_tokens) / PAGE_TOKENS
    seconds["sync"] += pages * PAGE_SECONDS
    if batch.engines_sleep:
        seconds["sleep"] = SLEEP_SECONDS
    for name, num_bytes in _offloaded_bytes(plan).items() if batch.offload else ():
        seconds[name] = seconds.get(name, 0.0) + num_bytes / HOST_RATE
    others, generating = sum(seconds.values()), _generate_seconds(plan, machine.gpu, samples)
    runs_ahead = batch.max_staleness and set(train.ranks).isdisjoint(generate.ranks)
    whole = max(generating, others) if runs_ahead else generating + others
    return {"generate": generating, **seconds, "step": whole}


def _offloaded_bytes(plan: Plan) -> dict[str, int]:
    """Between a rank and its host: masters and moments leave, they and frozen weights come back;
    with adapters the engine reads frozen weights from the host too."""
    batch, num_bytes = plan.batch, {"reload": 0, "offload": 0, "sync": 0}
    moment = batch.train_options["moment_bytes"]
    for role in plan.device_map.roles:
        if role.name in ("train", "critic", "reference"):
            held = memory_of(plan, role)
            num_bytes["reload"] += held.weights + held.optimizer
            num_bytes["offload"] += held.optimizer * (4 + 2 * moment) // (2 * moment)
            num_bytes["sync"] += held.weights * (role.name == "train" and batch.lora_rank > 0)
    return num_bytes


def _generate_seconds(plan: Plan, gpu: Gpu, samples: Samples) -> float:
    generate, per_prompt = plan.device_map["generate"], plan.batch.samples_per_prompt
    at_once = min(part.samples_at_once for part in plan.ranks if "generate" in part.roles)
    num_samples = share(samples.num_generated, generate.num_replicas)
    return samples.num_generated * SAMPLE_SECONDS + generate_seconds(
        plan.config, gpu, generate.tp,
        num_samples=num_samples, num_prompts=num_samples / per_prompt, at_once=max(1, at_once),
        prompt_tokens=samples.prompt_tokens, reply_tokens=samples.reply_tokens,
        longest_reply=samples.longest_reply,
    )  # fmt: skip


def _score_seconds(plan: Plan, role: Role, gpu: Gpu, samples: Samples) -> float:
    config = plan.role_configs.get(role.name, plan.config)
    work = samples.passed(role)
    return score_seconds(config, gpu, role.tp, work) + keys_seconds(config, gpu, role, work, 1)


def _train_seconds(
    plan: Plan, role: Role, machine: Machine, samples: Samples, lora_rank: int
) -> float:
    """All epochs and updates of a step. Weights and gradients travel, and the host launches
    kernels, while others are computed."""
    config, batch, is_frozen = plan.config, plan.batch, lora_rank > 0
    work, passes = samples.passed(role), 2 if batch.checkpointing == "none" else 3
    computing = train_seconds(
        config, machine.gpu, role.tp, work,
        checkpointing=batch.checkpointing, is_frozen=is_frozen,
    ) + keys_seconds(config, machine.gpu, role, work, passes)  # fmt: skip
    num_microbatches = samples.microbatches(role, batch.tokens_per_microbatch)
    one_copy = role.ranks[: role.ranks_per_copy]
    travelling = num_microbatches * shard_seconds(
        config, machine.rate(one_copy), role.ranks_per_copy // role.tp, role.tp, is_frozen
    )
    launching = num_microbatches * config.num_layers * LAUNCH_SECONDS
    trained = count_parameters(config, role.tp).total
    if is_frozen:
        adapters = adapter_parameters(config, lora_rank, batch.lora_targets, role.tp)
        trained = config.num_layers * adapters
    held = trained / role.ranks_per_copy
    update = samples.num_updates * (
        update_seconds(held, machine.gpu)
        + copy_seconds(held, machine.rate(role.ranks), role.num_copies)
    )
    return batch.epochs * (max(computing, travelling, launching) + update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Samples that go through a model, on all tensor-parallel ranks of a replica."""

    num_samples: float
    length: float
    """Packed tokens of a sample."""
    num_rows: float
    """Its tokens with a loss."""

    @property
    def num_tokens(self) -> float:
        return self.num_samples * self.length

    def forward(
        self, config: ModelConfig, gpu: Gpu, tp: int = 1
    ) -> tuple[float, float, float, float]:
        """Seconds of products in the blocks, products in the head, attention, and all else."""
        tokens, pairs = self.num_tokens, self.num_samples * self.length * (self.length + 1) / 2
        rows = self.num_samples * self.num_rows
        blocks = forward_flops(config, tp, num_tokens=tokens, num_pairs=0, num_rows=0)
        head = forward_flops(config, tp, num_tokens=0, num_pairs=0, num_rows=rows)
        attention = forward_flops(config, tp, num_tokens=0, num_pairs=pairs, num_rows=0)
        other = POINTWISE_BYTES * tokens * config.num_layers * config.hidden_size
        rates = gpu.products, gpu.products, gpu.attention, gpu.memory
        return tuple(x / y for x, y in zip((blocks, head, attention, other), rates, strict=True))


def score_seconds(config: ModelConfig, gpu: Gpu, tp: int, work: Pass) -> float:
    """A forward pass of a frozen model."""
    return sum(work.forward(config, gpu, tp)) / tp + _reduce_seconds(config, gpu, tp, work, 1)


def train_seconds(
    config: ModelConfig, gpu: Gpu, tp: int, work: Pass, *, checkpointing: str, is_frozen: bool
) -> float:
    """Forward and backward; with LoRA the model is frozen, and has no gradients of weights."""
    blocks, head, attention, other = work.forward(config, gpu, tp)
    seconds = (2 if is_frozen else 3) * (blocks + head) + 3 * (attention + other)
    if checkpointing != "none":
        seconds += other
    if checkpointing == "full":
        seconds += blocks + attention
    passes = 3 if checkpointing == "full" else 2
    return seconds / tp + _reduce_seconds(config, gpu, tp, work, passes)


def _reduce_seconds(config: ModelConfig, gpu: Gpu, tp: int, work: Pass, passes: int) -> float:
    """Two sums of hidden states in every layer, over the tensor-parallel ranks, in bf16."""
    num_bytes = 2 * 2 * config.num_layers * config.hidden_size * work.num_tokens
    return passes * num_bytes * 2 * (tp - 1) / tp / gpu.link


def keys_seconds(config: ModelConfig, gpu: Gpu, role: Role, work: Pass, passes: int) -> float:
    """Keys and values in bf16, or their gradients, between the context-parallel ranks."""
    received = (role.cp - 1) * work.num_tokens * kv_bytes_per_token(config, role.tp, 2)
    return passes * received / gpu.link


def shard_seconds(
    config: ModelConfig, rate: float, num_replicas: int, tp: int, is_frozen: bool
) -> float:
    """FSDP's traffic for one micro-batch: weights in bf16, twice, and gradients in fp32."""
    width = 4 if is_frozen else 8
    share = (num_replicas - 1) / num_replicas
    return width * count_parameters(config, tp).total / tp * share / rate


def copy_seconds(num_parameters: float, rate: float, num_copies: int) -> float:
    """The sum of a rank's gradients in fp32 over all copies of the weights, as a ring does it."""
    return 4 * num_parameters * 2 * (num_copies - 1) / num_copies / rate


def update_seconds(num_parameters: float, gpu: Gpu) -> float:
    """AdamW on this rank's share of the trained parameters."""
    return UPDATE_BYTES * num_parameters / gpu.memory


def sync_seconds(config: ModelConfig, gpu: Gpu, rate: float, num_ranks: int) -> float:
    """Weights to the engines: masters are cast. Several ranks also gather and copy them, and both
    ends are checked."""
    num_parameters = count_parameters(config).total
    gathered = 2 * num_parameters * (num_ranks - 1) / num_ranks
    num_bytes = (6 if num_ranks == 1 else 14) * num_parameters
    return SYNC_SECONDS + num_bytes / gpu.memory + gathered / rate


def generate_seconds(
    config: ModelConfig,
    gpu: Gpu,
    tp: int,
    *,
    num_samples: int,
    num_prompts: float,
    at_once: int,
    prompt_tokens: float,
    reply_tokens: float,
    longest_reply: int,
) -> float:
    """One engine: each prompt is read once, and samples have `reply_tokens` tokens on average."""
    head = tp * vocabulary_rows(config, tp) * config.hidden_size
    block, layers = block_cost(config, tp), config.num_layers
    steps = max(longest_reply, num_samples / at_once * reply_tokens)
    rows = num_samples * reply_tokens / steps
    reading = 2 * (layers * _read_parameters(config, tp, rows) + head) / gpu.memory
    products = 2 * (layers * block.active_parameters + head) * rows / gpu.products
    prefill = 2 * layers * block.active_parameters * num_prompts * prompt_tokens / gpu.products
    seen = num_samples * (prompt_tokens * reply_tokens + reply_tokens**2 / 2)
    keys = seen * kv_bytes_per_token(config, tp, 2) / gpu.memory
    fixed = LAYER_SECONDS + (2 * REDUCE_SECONDS if tp > 1 else 0)
    seconds = (prefill + steps * max(reading, products)) / tp + keys
    return seconds / DECODE_SHARE + steps * layers * fixed


def _read_parameters(config: ModelConfig, tp: int, num_rows: float) -> float:
    """Weights of a block that a decoding step of `num_rows` reads: of experts, those it uses."""
    block = block_cost(config, tp)
    if not isinstance(config, MixtureConfig):
        return block.active_parameters
    unused = (1 - config.experts_per_token / config.num_experts) ** num_rows
    experts = 3 * config.intermediate_size * config.hidden_size * config.num_experts
    return block.active_parameters - mlp_cost(config).active_parameters + experts * (1 - unused)
