"""Seconds that the parts of a step take on GPUs. Pure arithmetic: no torch, no device.

Published rates of a GPU, times the shares of them that this code reached on one H200
(docs/notebook/2026-11-18-benchmarks.md compares), and what the host needs for a sample and for a
layer. Traffic between ranks is counted by bytes and was not measured; the time of rewards is not
counted.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from roll_lite.checks import UserError
from roll_lite.device_map import DeviceMap, Role, parse_device_map
from roll_lite.hub import local_folder
from roll_lite.models.config import ModelConfig, planned_config
from roll_lite.models.cost import (
    adapter_cost,
    blocks_cost,
    count_parameters,
    device_flops,
    expert_parameters,
    kv_bytes_per_token,
    rows_per_token,
    vocabulary_rows,
)
from roll_lite.models.memory import PAGE_TOKENS, is_teacher
from roll_lite.planning.plan import Plan, PlanOptions, Samples, memory_of, share

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

WARM_UP = 2
"""Steps of a run that are left out: they capture graphs, compile kernels and pin host memory."""
ANY_BYTES = 2**50
"""Memory of the devices of a recorded run: it has fitted."""
PLANNED_ROLES = {"train", "generate", "reference"}
"""Roles of a run whose model is the policy's, or as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What each GPU of a machine reaches in a second."""

    gpu: str
    products: float
    """Flops of matrix products."""
    attention: float
    """Flops of attention in training."""
    memory: float
    """Bytes."""
    link: float
    """Bytes to other GPUs of the same machine."""
    ranks_per_node: int = 8

    def rate(self, ranks: Collection[int]) -> float:
        """Bytes per second between ranks: NVLink in one machine, else the network."""
        nodes = {rank // self.ranks_per_node for rank in ranks}
        return self.link if len(nodes) == 1 else NETWORK_RATE


def known_machine(device_name: str, ranks_per_node: int = 8) -> Machine | None:
    """The machine with this part in its device's name; None if its speed is not known."""
    gpu = next((part for part in MEMORY_RATES if re.search(rf"\b{part}\b", device_name)), None)
    if gpu is None:
        return None
    return Machine(
        gpu=gpu,
        products=PRODUCTS_SHARE * device_flops(gpu),
        attention=ATTENTION_SHARE * device_flops(gpu),
        memory=MEMORY_SHARE * MEMORY_RATES[gpu],
        link=LINK_RATES[gpu],
        ranks_per_node=ranks_per_node,
    )


def step_seconds(plan: Plan, machine: Machine, samples: Samples | None = None) -> dict[str, float]:
    """Seconds of the parts of a step, and of the whole, `step`: for the samples that a run had, or
    for those of the plan.

    Parts follow each other, unless the engines run ahead on ranks of their own.
    """
    device_map, options = plan.device_map, plan.options
    samples = samples or options.samples
    train, generate = device_map["train"], device_map["generate"]
    seconds = {}
    for name in ("reward_model", "reference", "critic"):
        if name in device_map:
            seconds[name] = _role_pass(plan, device_map[name], machine, samples).scoring
    teachers = [role for role in device_map.roles if is_teacher(role.name)]
    for role in teachers:  # each has its domain's samples: as many as the next
        taught = replace(samples, num_trained=share(samples.num_trained, len(teachers)))
        seconds[role.name] = _role_pass(plan, role, machine, taught).scoring
    if "critic" in device_map:
        seconds["critic"] += _train_seconds(plan, device_map["critic"], machine, samples, 0)
    seconds["train"] = _train_seconds(plan, train, machine, samples, options.lora_rank)
    seconds["train"] += options.policy_scores * _role_pass(plan, train, machine, samples).scoring
    seconds["sync"] = SYNC_SECONDS  # of adapters alone
    if not plan.frozen_bytes:
        rate = machine.rate(train.ranks)
        seconds["sync"] = sync_seconds(plan.config, machine, rate, len(train.ranks))
    tokens = samples.generated_by(generate) * (samples.prompt_tokens + samples.reply_tokens)
    seconds["sync"] += tokens / PAGE_TOKENS * PAGE_SECONDS
    if options.engines_sleep:
        seconds["sleep"] = SLEEP_SECONDS
    for name, num_bytes in _offloaded_bytes(plan).items() if options.offload else ():
        seconds[name] = seconds.get(name, 0.0) + num_bytes / HOST_RATE
    training = sum(seconds.values())
    generating = samples.num_generated * SAMPLE_SECONDS + generate_seconds(
        plan.config, machine, generate.tp,
        samples=replace(samples, num_generated=samples.generated_by(generate)),
        samples_per_prompt=options.samples_per_prompt,
        at_once=min(part.samples_at_once for part in plan.ranks if "generate" in part.roles),
    )  # fmt: skip
    runs_ahead = options.max_staleness and set(train.ranks).isdisjoint(generate.ranks)
    whole = max(generating, training) if runs_ahead else generating + training
    return {"generate": generating, **seconds, "step": whole}


def _offloaded_bytes(plan: Plan) -> dict[str, int]:
    """Between a rank and its host: masters and moments leave, they and frozen weights come back;
    with adapters the engine reads frozen weights from the host too, unless both share them."""
    num_bytes = {"reload": 0, "offload": 0, "sync": 0}
    for role in plan.device_map.roles:
        if role.name in ("train", "critic", "reference") or is_teacher(role.name):
            held = memory_of(plan, role)
            masters = held.gradients  # of the same parameters, in fp32 too
            num_bytes["reload"] += held.weights + held.optimizer
            num_bytes["offload"] += masters + held.optimizer
            if role.name == "train" and plan.options.lora_rank > 0 and not plan.frozen_bytes:
                num_bytes["sync"] += held.weights
    return num_bytes


def _role_pass(plan: Plan, role: Role, machine: Machine, samples: Samples) -> "Pass":
    """What each rank of a role has of one pass over the samples."""
    return Pass(
        config=plan.role_configs.get(role.name, plan.config), machine=machine,
        tp=role.tp, cp=role.cp, ep=role.ep,
        between_experts=machine.rate(role.ranks[: role.ep * role.tp]),
        num_samples=share(samples.num_trained, role.num_replicas) / role.cp,
        length=samples.packed_tokens, num_rows=samples.reply_tokens,
    )  # fmt: skip


def _train_seconds(
    plan: Plan, role: Role, machine: Machine, samples: Samples, lora_rank: int
) -> float:
    """All epochs and updates of a step. Weights and gradients travel, and the host launches
    kernels, while others are computed."""
    options = plan.options
    is_frozen = lora_rank > 0
    work = _role_pass(plan, role, machine, samples)
    config = work.config
    computing = work.training(options.checkpointing, is_frozen)
    num_microbatches = samples.microbatches(role, options.tokens_per_microbatch)
    one_copy = role.ranks[: role.ranks_per_copy]
    travelling = num_microbatches * shard_seconds(
        config, machine.rate(one_copy), role.ranks_per_copy // role.tp, role.tp, is_frozen, role.ep
    )
    launching = num_microbatches * config.num_layers * LAUNCH_SECONDS
    trained = count_parameters(config, role.tp).total
    if is_frozen:
        trained = adapter_cost(config, lora_rank, options.lora_targets, role.tp)[1].parameters
    held = trained / role.ranks_per_copy
    update = samples.num_updates * (
        update_seconds(held, machine)
        + copy_seconds(held, machine.rate(role.ranks), role.num_copies)
    )
    return options.epochs * (max(computing, travelling, launching) + update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Samples that go through a model on the `tp` ranks that hold it together."""

    config: ModelConfig
    machine: Machine
    tp: int = 1
    cp: int = 1
    ep: int = 1
    between_experts: float = 0.0
    """Bytes per second between ranks that hold different experts."""
    num_samples: float
    length: float
    """Packed tokens of a sample."""
    num_rows: float
    """Its tokens with a loss."""

    @property
    def num_tokens(self) -> float:
        return self.num_samples * self.length

    @property
    def forward(self) -> tuple[float, float, float, float]:
        """Seconds of products in the blocks, products in the head, attention, and all else, if one
        rank did it all."""
        config, machine = self.config, self.machine
        layers = config.num_layers
        blocks = blocks_cost(config, self.tp)
        head = self.tp * vocabulary_rows(config, self.tp) * config.hidden_size
        pairs = self.num_tokens * (self.length + 1) / 2
        return (
            2 * blocks.active_parameters * self.num_tokens / machine.products,
            2 * head * self.num_samples * self.num_rows / machine.products,
            blocks.pair_flops * pairs / machine.attention,
            POINTWISE_BYTES * self.num_tokens * layers * config.hidden_size / machine.memory,
        )

    @property
    def scoring(self) -> float:
        """Seconds of a forward pass of a frozen model."""
        return sum(self.forward) / self.tp + self._travelling(sums=1, keys=1, exchanges=2)

    def training(self, checkpointing: str, is_frozen: bool) -> float:
        """Seconds of forward and backward; with LoRA the model is frozen, and has no gradients of
        weights."""
        blocks, head, attention, other = self.forward
        seconds = (2 if is_frozen else 3) * (blocks + head) + 3 * (attention + other)
        if checkpointing != "none":
            seconds += other
        if checkpointing == "full":
            seconds += blocks + attention
        again = checkpointing != "none"
        return seconds / self.tp + self._travelling(
            sums=3 if checkpointing == "full" else 2, keys=2 + again, exchanges=4 + 2 * again
        )

    def _travelling(self, sums: int, keys: int, exchanges: int) -> float:
        """Seconds of traffic in bf16, or of its gradients: two sums of hidden states in every layer
        over the tensor-parallel ranks, keys and values between the context-parallel ones, and
        hidden states to the ranks with their experts, or back."""
        config, tp = self.config, self.tp
        hidden = 2 * 2 * config.num_layers * config.hidden_size * self.num_tokens
        summed = hidden * 2 * (tp - 1) / tp
        received = (self.cp - 1) * self.num_tokens * kv_bytes_per_token(config, tp, 2)
        seconds = (sums * summed + keys * received) / self.machine.link
        if self.ep > 1:
            away = rows_per_token(config.experts, self.ep) * (self.ep - 1) / self.ep
            hidden = 2 * len(config.sparse_layers) * config.hidden_size * self.num_tokens
            seconds += exchanges * away * hidden / self.between_experts
        return seconds


def shard_seconds(
    config: ModelConfig, rate: float, num_replicas: int, tp: int, is_frozen: bool, ep: int = 1
) -> float:
    """FSDP's traffic for one micro-batch: weights in bf16, twice, and gradients in fp32. Of experts
    a rank gathers those of its own from the ranks that hold the same ones."""
    width = 4 if is_frozen else 8
    total = count_parameters(config, tp).total
    experts = 0
    if ep > 1:
        num_experts = len(config.sparse_layers) * config.experts.num_experts
        experts = num_experts * expert_parameters(config)
    received = (total - experts) * (1 - 1 / num_replicas) + experts / ep * (1 - ep / num_replicas)
    return width * received / tp / rate


def copy_seconds(num_parameters: float, rate: float, num_copies: int) -> float:
    """The sum of a rank's gradients in fp32 over all copies of the weights, as a ring does it."""
    return 4 * num_parameters * 2 * (num_copies - 1) / num_copies / rate


def update_seconds(num_parameters: float, machine: Machine) -> float:
    """AdamW on this rank's share of the trained parameters."""
    return UPDATE_BYTES * num_parameters / machine.memory


def sync_seconds(config: ModelConfig, machine: Machine, rate: float, num_ranks: int) -> float:
    """Weights to the engines: masters are cast. Several ranks also gather and copy them, and both
    ends are checked."""
    num_parameters = count_parameters(config).total
    gathered = 2 * num_parameters * (num_ranks - 1) / num_ranks
    num_bytes = (6 if num_ranks == 1 else 14) * num_parameters
    return SYNC_SECONDS + num_bytes / machine.memory + gathered / rate


def generate_seconds(
    config: ModelConfig,
    machine: Machine,
    tp: int,
    *,
    samples: Samples,
    samples_per_prompt: float,
    at_once: int,
) -> float:
    """One engine, which generates all these samples; each prompt is read once."""
    num_samples, reply_tokens = samples.num_generated, samples.reply_tokens
    head = tp * vocabulary_rows(config, tp) * config.hidden_size
    active = blocks_cost(config, tp).active_parameters
    layers = config.num_layers
    steps = max(samples.longest_reply, num_samples / max(1, at_once) * reply_tokens)
    rows = num_samples * reply_tokens / steps
    reading = 2 * (_read_parameters(config, tp, rows) + head) / machine.memory
    products = 2 * (active + head) * rows / machine.products
    prompt_tokens = num_samples / samples_per_prompt * samples.prompt_tokens
    prefill = 2 * active * prompt_tokens / machine.products
    seen = num_samples * (samples.prompt_tokens * reply_tokens + reply_tokens**2 / 2)
    keys = seen * kv_bytes_per_token(config, tp, 2) / machine.memory
    fixed = LAYER_SECONDS + (2 * REDUCE_SECONDS if tp > 1 else 0)
    seconds = (prefill + steps * max(reading, products)) / tp + keys
    return seconds / DECODE_SHARE + steps * layers * fixed


def _read_parameters(config: ModelConfig, tp: int, num_rows: float) -> float:
    """Weights of the blocks that a decoding step of `num_rows` reads: of experts, those it uses."""
    active = blocks_cost(config, tp).active_parameters
    if not config.experts:
        return active
    mixture = config.experts
    unused = (1 - mixture.experts_per_token / mixture.num_experts) ** num_rows
    used = mixture.num_experts * (1 - unused) - mixture.experts_per_token
    return active + len(config.sparse_layers) * used * expert_parameters(config)


def run_seconds(
    folder: str | Path, model: str | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step of a run of recipes/rlvr.py: planned for the samples that it had, and
    measured. `model` names a shape or folder if the run's is gone."""
    config = json.loads((Path(folder) / "config.json").read_text())
    if config.get("recipe") != "rlvr":
        raise UserError(f"{folder} is a run of {config.get('recipe')}; only rlvr's are planned")
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/train" in row]
    if len(rows) <= WARM_UP:
        raise UserError(f"{folder} has {len(rows)} trained steps; at least {WARM_UP + 1} are read")
    rows = rows[WARM_UP:]
    start = config["starts"][-1]
    if (machine := known_machine(start["hardware"])) is None:
        raise UserError(
            f"{folder} ran on {start['hardware']}; only steps on known GPUs are planned"
        )
    if unknown := sorted(set(start["ranks"]) - PLANNED_ROLES):
        raise UserError(f"{folder} has the role {unknown[0]}, which is not planned here")
    device_map = _run_map(config["device_map"], start["ranks"])
    options = PlanOptions.of_recipe(config, device_map)
    shape = planned_config(local_folder(model or config["model"], with_weights=False))
    plan = Plan(shape, device_map, options, ANY_BYTES)
    return step_seconds(plan, machine, _run_samples(config, rows)), measured_seconds(rows)


def measured_seconds(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians of the parts of a step, named as in the plan."""

    def of(name: str) -> float:
        return median(row.get(name, 0.0) for row in rows)

    moving = {n: of(f"colocated/{n}") for n in ("sleep", "wake", "reload", "offload")}
    is_shared = any(moving.values())
    return {
        "generate": of("time/rollout"),
        "prepare": of("time/prepare") - moving["sleep"] - moving["reload"],
        "train": of("time/train"),
        "sync": of("colocated/sync") if is_shared else of("time/sync"),
        "sleep": moving["sleep"] + moving["wake"],
        "reload": moving["reload"],
        "offload": moving["offload"],
        "step": of("time/step"),
    }


def _run_map(text: str, ranks: Mapping[str, Sequence[Sequence[int]]]) -> DeviceMap:
    """The device map as given; one that was chosen is made of the ranks of each replica."""
    world_size = 1 + max(rank for role in ranks.values() for replica in role for rank in replica)
    if text == "auto":
        parts = []
        for role, replicas in ranks.items():
            members = "+".join(str(rank) for replica in replicas for rank in replica)
            parts.append(f"{role}={members},tp={len(replicas[0])}")
        text = " ".join(parts)
    return parse_device_map(text, world_size)


def _run_samples(config: Mapping[str, float], rows: Sequence[Mapping[str, float]]) -> Samples:
    """The samples of a step, by medians over the steps."""

    def of(name: str) -> float:
        return median(row[name] for row in rows)

    trained = of("rollout/trained_samples")
    reply = of("rollout/reply_tokens")
    packed = median(
        row["train/tokens_per_second"] * row["time/train"] / row["rollout/trained_samples"]
        for row in rows
    )
    in_step = config["prompts_per_step"] * config["samples_per_prompt"]
    return Samples(
        num_generated=int(of("rollout/started")),
        num_trained=int(trained),
        num_updates=max(1, round(trained / in_step * config["updates_per_step"])),
        prompt_tokens=packed / config["epochs"] + 1 - reply,
        reply_tokens=reply,
        longest_reply=int(of("rollout/longest_reply")),
    )
