"""What fits: the memory of every rank and its work in a step, before a run starts. No torch.

print(render(Plan(config, device_map, PlanOptions(), device_bytes=80 * 2**30)))  # in render.py
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import tyro

from roll_lite.checks import above, at_least, check_choices
from roll_lite.device_map import DeviceMap, Role, format_ranks
from roll_lite.models.config import DEFAULT_TARGETS, ModelConfig
from roll_lite.models.cost import cache_bytes_per_token
from roll_lite.models.memory import (
    MAX_RUNNING,
    PAGE_TOKENS,
    RankMemory,
    adapter_bytes,
    context_bytes,
    engine_bytes,
    format_bytes,
    role_memory,
    together,
    usable_bytes,
)

TRAINED = ("train", "critic")
DEFAULT_CACHE_GIB = 1.0
"""kv_cache_gib on a CPU, and at least that on a GPU where it fits."""
ENGINES = ("generate", "judge", "reward_model")
"""Roles that work while samples are generated; the first may sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan reads of a run, beside its model and device map; named as a recipe's options."""

    prompts_per_step: int = 32
    """Prompts per step."""
    samples_per_prompt: int = 8
    """Group size: samples of one prompt that are compared with each other."""
    prompt_tokens: int = 256
    """Longest prompt, in tokens."""
    max_tokens: int = 1024
    """Longest reply, in tokens."""
    tokens_per_microbatch: int = 16384
    """Packed tokens of one forward and backward pass."""
    updates_per_step: int = 1
    """Optimizer updates per step, each on an equal part of its samples."""
    epochs: int = 1
    """Passes over the samples of a step."""
    policy_scores: int = 0
    """Forward passes of the policy before the update, for old or reference logprobs."""
    max_staleness: float = 0.0
    """Above 0, engines on ranks of their own generate while the trainer works."""
    kv_cache_gib: float | None = None
    """KV cache per rank; None means what its samples need, or as much of that as fits."""
    judge_cache_gib: Annotated[float, tyro.conf.Suppress] = 0.0  # no flag of roll-lite plan
    """KV cache of a judge, per rank."""
    engines_sleep: bool = False
    """Engines have no weights and no KV cache while the trainer works."""
    offload: bool = False
    """Trainers and the reference are in host memory while the engines generate."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: what the backward pass recomputes."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's moments."""
    lora_rank: int = 0
    """Train LoRA adapters of this rank instead of all weights; 0 is off."""
    lora_targets: tuple[str, ...] = DEFAULT_TARGETS
    """Projections that get adapters."""

    def __post_init__(self):
        numbers = [field for field in fields(self) if field.type is int]
        at_least(0, self, *(field.name for field in numbers if field.default == 0))
        at_least(1, self, *(field.name for field in numbers if field.default > 0))
        at_least(0, self, "max_staleness", "judge_cache_gib")
        above(0, self, "kv_cache_gib")
        check_choices(self)

    @classmethod
    def of_recipe(
        cls, flat: Mapping[str, Any], device_map: DeviceMap, prompt_tokens: int = 256
    ) -> "PlanOptions":
        """From the flat options of a recipe's Config, or of the config.json of its run. A recipe
        that only generates has not all of them."""
        given = {field.name: flat[field.name] for field in fields(cls) if field.name in flat}
        has_reference = flat.get("kl_coef", 0) > 0 or flat.get("reference") is not None
        is_own_reference = has_reference and "reference" not in device_map
        given["policy_scores"] = is_own_reference + (flat.get("denominator") == "old")
        given["lora_targets"] = tuple(flat.get("lora_targets", ()))  # a list in JSON
        return cls(**given, prompt_tokens=prompt_tokens)

    @property
    def sample_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def samples(self) -> "Samples":
        """All samples have their maximum length, and all are trained on."""
        num_samples = self.prompts_per_step * self.samples_per_prompt
        return Samples(
            num_generated=num_samples, num_trained=num_samples, num_updates=self.updates_per_step,
            prompt_tokens=self.prompt_tokens, reply_tokens=self.max_tokens,
            longest_reply=self.max_tokens,
        )  # fmt: skip

    @property
    def train_options(self) -> dict[str, Any]:
        """Keyword arguments of `train_memory`."""
        names = ("checkpointing", "moments", "lora_rank", "lora_targets")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a step; lengths are means, except that of the longest reply."""

    num_generated: int
    num_trained: int
    num_updates: int
    prompt_tokens: float
    reply_tokens: float
    longest_reply: int

    @property
    def packed_tokens(self) -> float:
        """Tokens of a sample in a micro-batch: its last token is only a target."""
        return self.prompt_tokens + self.reply_tokens - 1

    def generated_by(self, role: Role) -> int:
        """Samples of each engine: the largest share if uneven, as below."""
        return share(self.num_generated, role.num_replicas)

    def per_update(self, role: Role) -> int:
        """Samples of one update on each replica of a role."""
        return share(share(self.num_trained, self.num_updates), role.num_replicas)

    def microbatches(self, role: Role, tokens: int) -> int:
        """Micro-batches of up to `tokens` on each replica, in one pass over the samples."""
        in_microbatch = max(1, int(tokens // self.packed_tokens))
        return share(self.per_update(role), in_microbatch) * self.num_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Ranks with the same roles and memory."""

    ranks: tuple[int, ...]
    roles: tuple[str, ...]
    phases: Mapping[str, RankMemory]
    """What they hold and when: several phases where engines sleep or trainers are offloaded."""
    needed: int
    """Peak with a KV cache of its fixed size, or of one sample."""
    samples_at_once: int
    """Full-length samples that fit the engine's KV cache; 0 without an engine."""

    @property
    def memory(self) -> RankMemory:
        """Memory at the peak."""
        return max(self.phases.values(), key=lambda memory: memory.total)


@dataclass(frozen=True)
class Plan:
    config: ModelConfig
    device_map: DeviceMap
    options: PlanOptions
    device_bytes: int | None
    """None on a CPU: fp32, no limit."""
    role_configs: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Models of roles that are not the policy's."""

    def with_options(self, **changes: Any) -> "Plan":
        return replace(self, options=replace(self.options, **changes))

    @property
    def width(self) -> int:
        """Bytes of an element that models compute in."""
        return 4 if self.device_bytes is None else 2

    @property
    def sample_bytes(self) -> int:
        """KV cache of one sample on one rank: whole pages, no shared prompt."""
        tokens = share(self.options.sample_tokens, PAGE_TOKENS) * PAGE_TOKENS
        tp = self.device_map["generate"].tp
        return tokens * cache_bytes_per_token(self.config, tp, self.width)

    @property
    def fixed_cache(self) -> int | None:
        """Bytes of an engine's KV cache on each of its ranks, if they do not depend on what is
        free."""
        gib = self.options.kv_cache_gib
        is_fixed = gib is not None or self.device_bytes is None
        return int((gib or DEFAULT_CACHE_GIB) * 2**30) if is_fixed else None

    @cached_property
    def frozen_bytes(self) -> int:
        """Frozen weights of a rank that engine and trainer share; 0 if each has its own."""
        is_shared = self.options.lora_rank and self.device_map.shares_weights
        tp = self.device_map["train"].tp if is_shared else 1
        return engine_bytes(self.config, tp, 0, self.width) if is_shared else 0

    @property
    def shared(self) -> RankMemory:
        """What stays on ranks that share weights: these, and the engine's adapters."""
        if not self.frozen_bytes:
            return RankMemory()
        adapters = self.options.lora_rank, self.options.lora_targets
        held = adapter_bytes(self.config, self.device_map["train"].tp, self.width, *adapters)
        return RankMemory(weights=self.frozen_bytes + held)

    @cached_property
    def ranks(self) -> tuple[RankPlan, ...]:
        """Memory of all ranks, grouped by roles and KV cache."""
        parts = {role.name: memory_of(self, role) for role in self.device_map.roles}
        roles: dict[int, tuple[str, ...]] = dict.fromkeys(range(self.device_map.world_size), ())
        for role in self.device_map.roles:
            for rank in role.ranks:
                roles[rank] += (role.name,)
        phases = {names: _phases(self, names, parts) for names in set(roles.values())}
        caches = dict.fromkeys(roles, 0)
        engines = self.device_map["generate"].replicas if "generate" in self.device_map else ()
        for replica in engines:
            beside = [
                memory.total
                for rank in replica
                for phase, memory in phases[roles[rank]].items()
                if _has_cache(self, phase)
            ]
            caches |= dict.fromkeys(replica, _cache_bytes(self, max(beside)))
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for rank in roles:
            groups.setdefault((roles[rank], caches[rank]), []).append(rank)
        return tuple(
            _rank_plan(self, ranks, names, cache, phases[names])
            for (names, cache), ranks in groups.items()
        )

    @property
    def needed(self) -> int:
        """Bytes that the fullest rank needs."""
        return max(part.needed for part in self.ranks)

    @property
    def fits_devices(self) -> bool:
        return self.device_bytes is None or self.needed <= usable_bytes(self.device_bytes)

    @property
    def fits(self) -> bool:
        return not self.problems

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Why this cannot run."""
        return tuple(_problems(self))


def take_turns(plan: Plan) -> Plan:
    """What `auto` does with a plan that does not fit: engines sleep, then trainers are offloaded
    too, if that is enough. The plan itself if it fits, or if nothing helps."""
    if plan.fits_devices or plan.options.max_staleness:
        return plan
    sleeping = plan.with_options(engines_sleep=True)
    in_turn = sleeping if sleeping.fits_devices else sleeping.with_options(offload=True)
    return in_turn if in_turn.fits_devices else plan


def share(total: int, num_parts: int) -> int:
    """The largest part of an even split."""
    return -(-total // num_parts)


def memory_of(plan: Plan, role: Role) -> RankMemory:
    """Memory of one role on one of its ranks, without the KV cache of generate and without weights
    that are `shared`."""
    options, samples = plan.options, plan.options.samples
    if role.name == "generate":
        tokens = samples.generated_by(role) * options.prompt_tokens
    else:
        packed = samples.per_update(role) * samples.packed_tokens
        tokens = share(min(options.tokens_per_microbatch, packed), role.cp)
    config = plan.role_configs.get(role.name, plan.config)
    sizes = role.ranks_per_copy, role.tp, tokens, plan.width
    held = role_memory(role.name, config, *sizes, role.ep, **options.train_options)
    checkpointing = options.checkpointing if role.name in TRAINED else None
    keys = context_bytes(config, role.cp, *sizes[1:], checkpointing)
    cache = int(options.judge_cache_gib * 2**30) if role.name == "judge" else 0
    weights = held.weights - plan.frozen_bytes * (role.name in ("train", "generate"))
    activations = held.activations + keys
    return replace(held, weights=weights, activations=activations, kv_cache=cache)


def _phases(plan: Plan, names: tuple[str, ...], parts: dict[str, RankMemory]) -> dict:
    """What these roles hold in each phase of a step, without the KV cache of generate.

    One phase, without a name, unless engines and trainers take turns.
    """
    options = plan.options
    engines = [name for name in names if name in ENGINES]
    trainers = [name for name in names if name not in ENGINES]
    shared = plan.shared if "train" in names else RankMemory()
    if not ((options.engines_sleep or options.offload) and "generate" in names and trainers):
        return {"": together([shared, *(parts[name] for name in names)])}
    awake = [name for name in engines if name != "generate" or not options.engines_sleep]
    loaded = trainers  # while samples are generated
    synced = trainers  # while weights go to the engines
    if options.offload:  # roles.py: one with adapters leaves before a sync, unless it shares
        loaded = []
        stays = not options.lora_rank or plan.frozen_bytes
        synced = ["train"] if "train" in trainers and stays else []

    def phase(working: list[str], idle: list[str]) -> RankMemory:
        return together([shared, *(parts[n] for n in working), *(parts[n].idle for n in idle)])

    return {
        "generating": phase(engines, loaded),
        "syncing": phase([], [*engines, *synced]),
        "training": phase(trainers, awake),
    }


def _rank_plan(
    plan: Plan,
    ranks: list[int],
    names: tuple[str, ...],
    cache: int,
    phases: Mapping[str, RankMemory],
) -> RankPlan:
    holds = "+".join(names) or "nothing"
    at_once = least = 0
    if "generate" in names:
        generated = plan.options.samples.generated_by(plan.device_map["generate"])
        at_once = min(cache // plan.sample_bytes, generated, MAX_RUNNING)
        least = plan.sample_bytes if plan.fixed_cache is None else cache

    def with_cache(num_bytes: int) -> dict[str, RankMemory]:
        return {
            f"{holds}, {phase}" if phase else holds: replace(
                memory, kv_cache=memory.kv_cache + num_bytes * _has_cache(plan, phase)
            )
            for phase, memory in phases.items()
        }

    return RankPlan(
        ranks=tuple(ranks),
        roles=names,
        phases=with_cache(cache),
        needed=max(memory.total for memory in with_cache(least).values()),
        samples_at_once=at_once,
    )


def _has_cache(plan: Plan, phase: str) -> bool:
    """Whether the engine's KV cache is there."""
    return not plan.options.engines_sleep or phase not in ("syncing", "training")


def _cache_bytes(plan: Plan, held: int) -> int:
    """KV cache on each rank of an engine, beside the bytes `held` by the fullest of its ranks."""
    if plan.fixed_cache is not None:
        return plan.fixed_cache
    generated = plan.options.samples.generated_by(plan.device_map["generate"])
    return max(0, min(generated * plan.sample_bytes, usable_bytes(plan.device_bytes) - held))


def _problems(plan: Plan) -> Iterator[str]:
    """What does not fit the model, a micro-batch, a KV cache or a device."""
    options = plan.options
    limit = plan.config.max_positions
    packed = options.samples.packed_tokens
    if options.sample_tokens > limit:
        yield (
            f"a sample of {options.sample_tokens} tokens exceeds the model's {limit} positions; "
            "lower prompt_tokens or max_tokens"
        )
    if "train" in plan.device_map and packed > options.tokens_per_microbatch:
        yield (
            f"a sample of {packed} tokens does not fit a micro-batch; raise "
            f"tokens_per_microbatch={options.tokens_per_microbatch}"
        )
    for part in plan.ranks:
        ranks = f"each of ranks {format_ranks(part.ranks)}"
        if len(part.ranks) == 1:
            ranks = f"rank {part.ranks[0]}"
        if plan.device_bytes is not None and part.needed > usable_bytes(plan.device_bytes):
            usable = format_bytes(usable_bytes(plan.device_bytes))
            yield (
                f"{ranks} needs {format_bytes(part.needed)} but has "
                f"{usable} of {format_bytes(plan.device_bytes)}"
            )
        elif "generate" in part.roles and not part.samples_at_once:
            yield (
                f"{ranks} has a KV cache of {format_bytes(plan.fixed_cache)}, which holds no "
                f"sample of {format_bytes(plan.sample_bytes)}; raise kv_cache_gib"
            )
