"""Plans a run before it starts: roles, bytes and work of every rank. No torch, no device.

print(render(Plan(config, device_map, BatchPlan(), device_bytes=80 * 2**30)))  # in plan_report
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from roll_lite.checks import above, at_least, check_choices
from roll_lite.device_map import DeviceMap, Role, format_ranks
from roll_lite.models.config import MixtureConfig, ModelConfig
from roll_lite.models.cost import kv_bytes_per_token
from roll_lite.models.memory import (
    LORA_TARGETS,
    MAX_RUNNING,
    PAGE_TOKENS,
    RankMemory,
    context_bytes,
    format_bytes,
    role_memory,
    together,
    usable_bytes,
)

TRAINED = ("train", "critic")
CPU_CACHE_GIB = 1.0  # default of kv_cache_gib on a CPU
ENGINES = ("generate", "judge", "reward_model")
"""Roles that work while samples are generated; the first may sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The work of one step, with all samples at their maximum length, and what saves memory."""

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    prompt_tokens: int = 256
    reply_tokens: int = 1024
    tokens_per_microbatch: int = 16384
    updates_per_step: int = 1
    epochs: int = 1
    """Passes over the samples of a step."""
    policy_scores: int = 0
    """Forward passes of the policy before the update, for old or reference logprobs."""
    max_staleness: int = 0
    """Above 0, engines with ranks of their own generate while the trainer works."""
    kv_cache_gib: float | None = None
    """Per rank; None is what all samples of a replica need, or as much of that as is free."""
    judge_cache_gib: float = 0.0
    """KV cache of a judge, per rank."""
    engines_sleep: bool = False
    """Engines have no weights and no KV cache while the trainer works."""
    offload: bool = False
    """Trainers and the reference are in host memory while the engines generate."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's moments."""
    lora_rank: int = 0
    """0 trains all weights."""
    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self):
        numbers = [field for field in fields(self) if field.type is int]
        at_least(0, self, *(field.name for field in numbers if field.default == 0))
        at_least(1, self, *(field.name for field in numbers if field.default > 0))
        check_choices(self)
        if self.kv_cache_gib is not None:
            above(0, self, "kv_cache_gib")

    @property
    def num_samples(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def sample_tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens

    @property
    def packed_tokens(self) -> int:
        """Tokens of a sample in a micro-batch: its last token is only a target."""
        return self.sample_tokens - 1

    @property
    def train_options(self) -> dict[str, Any]:
        """Keyword arguments of `train_memory`."""
        return {
            "checkpointing": self.checkpointing,
            "moment_bytes": 4 if self.moments == "float32" else 2,
            "lora_rank": self.lora_rank,
            "lora_targets": self.lora_targets,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Work per rank in one pass over a step: the largest share if uneven; 0 without the role."""

    samples_per_rank: int
    """Per data-parallel rank of train."""
    tokens_per_rank: int
    microbatches_per_rank: int
    samples_per_replica: int
    """Per engine."""


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
        """At the peak."""
        return max(self.phases.values(), key=lambda memory: memory.total)


@dataclass(frozen=True)
class Plan:
    config: ModelConfig
    device_map: DeviceMap
    batch: BatchPlan
    device_bytes: int | None
    """None on a CPU: fp32, no limit."""
    role_configs: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Models of roles that are not the policy's."""

    @property
    def width(self) -> int:
        """Bytes of an element that models compute in."""
        return 4 if self.device_bytes is None else 2

    @property
    def sample_bytes(self) -> int:
        """KV cache of one sample on one rank: whole pages, no shared prompt."""
        tokens = share(self.batch.sample_tokens, PAGE_TOKENS) * PAGE_TOKENS
        return tokens * kv_bytes_per_token(self.config, self.device_map["generate"].tp, self.width)

    @property
    def fixed_cache(self) -> int | None:
        """Bytes of an engine's KV cache on each of its ranks, if they do not depend on what is
        free."""
        gib = self.batch.kv_cache_gib
        is_fixed = gib is not None or self.device_bytes is None
        return int((gib or CPU_CACHE_GIB) * 2**30) if is_fixed else None

    @cached_property
    def step(self) -> StepPlan:
        return _plan_step(self.device_map, self.batch)

    @cached_property
    def ranks(self) -> tuple[RankPlan, ...]:
        return _plan_ranks(self)

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

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        return tuple(_warnings(self))


def take_turns(plan: Plan) -> tuple[Plan, str | None]:
    """What `auto` does with a plan that does not fit: engines sleep, then trainers are offloaded
    too, if that is enough. Returns the plan, and what was chosen and why."""
    options = {"engines_sleep": True, "offload": True}
    sleeping = replace(plan, batch=replace(plan.batch, engines_sleep=True))
    both = replace(plan, batch=replace(plan.batch, **options))
    if plan.fits_devices or plan.batch.max_staleness:
        return plan, None
    for new in (sleeping, both):
        if new.fits_devices:
            chosen = [n for n in options if getattr(new.batch, n) > getattr(plan.batch, n)]
            before, needed = format_bytes(plan.needed), format_bytes(new.needed)
            usable = format_bytes(usable_bytes(plan.device_bytes))
            why = f"a rank would need {before} at once, in turn {needed} of {usable}"
            return new, f"{' and '.join(chosen)}: {why}"
    return plan, None


def _plan_step(device_map: DeviceMap, batch: BatchPlan) -> StepPlan:
    num_trainers = device_map["train"].num_replicas if "train" in device_map else 0
    num_engines = device_map["generate"].num_replicas if "generate" in device_map else 0
    in_update = share(share(batch.num_samples, batch.updates_per_step), num_trainers)
    in_microbatch = max(1, batch.tokens_per_microbatch // batch.packed_tokens)
    return StepPlan(
        samples_per_rank=in_update * batch.updates_per_step,
        tokens_per_rank=in_update * batch.updates_per_step * batch.sample_tokens,
        microbatches_per_rank=share(in_update, in_microbatch) * batch.updates_per_step,
        samples_per_replica=share(batch.num_samples, num_engines),
    )


def share(total: int, num_parts: int) -> int:
    """The largest part of an even split; 0 without parts."""
    return -(-total // num_parts) if num_parts else 0


def memory_of(plan: Plan, role: Role) -> RankMemory:
    """Memory of one role on one of its ranks, without the KV cache."""
    batch = plan.batch
    if role.name == "generate":
        tokens = plan.step.samples_per_replica * batch.prompt_tokens
    else:
        samples = share(share(batch.num_samples, batch.updates_per_step), role.num_replicas)
        tokens = min(batch.tokens_per_microbatch, samples * batch.packed_tokens)
        tokens = share(tokens, role.cp)
    config = plan.role_configs.get(role.name, plan.config)
    sizes = role.ranks_per_copy, role.tp, tokens, plan.width
    held = role_memory(role.name, config, *sizes, **batch.train_options)
    checkpointing = batch.checkpointing if role.name in TRAINED else None
    keys = context_bytes(config, role.cp, *sizes[1:], checkpointing)
    cache = int(batch.judge_cache_gib * 2**30 * (role.name == "judge"))
    return replace(held, activations=held.activations + keys, kv_cache=cache)


def _phases(plan: Plan, names: tuple[str, ...], parts: dict[str, RankMemory]) -> dict:
    """What these roles hold in each phase of a step, without the KV cache of generate.

    One phase, without a name, unless engines and trainers take turns.
    """
    batch, trainers = plan.batch, [name for name in names if name not in ENGINES]
    if not ((batch.engines_sleep or batch.offload) and "generate" in names and trainers):
        return {"": together(parts[name] for name in names)}
    idle = {name: parts[name].idle for name in names}
    awake = [parts[name] for name in names if name in ENGINES]
    held = ENGINES[1:] if batch.engines_sleep else ENGINES  # while trainers work
    # colocated.py: of offloaded trainers only a policy without adapters is there during a sync
    synced = [name for name in trainers if name == "train" and not batch.lora_rank]
    stays = [idle[name] for name in trainers if not batch.offload]
    syncing = [idle[name] for name in (synced if batch.offload else trainers)]
    return {
        "generating": together([*awake, *stays]),
        "syncing": together([*(idle[name] for name in names if name in ENGINES), *syncing]),
        "training": together(
            [*(parts[name] for name in trainers), *(idle[name] for name in names if name in held)]
        ),
    }


def _has_cache(plan: Plan, phase: str) -> bool:
    """Whether the engine's KV cache is there."""
    return not plan.batch.engines_sleep or phase not in ("syncing", "training")


def _plan_ranks(plan: Plan) -> tuple[RankPlan, ...]:
    """Memory of all ranks, grouped by roles and KV cache."""
    device_map = plan.device_map
    parts = {role.name: memory_of(plan, role) for role in device_map.roles}
    roles: dict[int, tuple[str, ...]] = dict.fromkeys(range(device_map.world_size), ())
    for role in device_map.roles:
        for rank in role.ranks:
            roles[rank] += (role.name,)
    phases = {names: _phases(plan, names, parts) for names in set(roles.values())}
    caches = dict.fromkeys(roles, 0)
    if "generate" in device_map:
        for replica in device_map["generate"].replicas:
            held = [memory.total for rank in replica for phase, memory in
                    phases[roles[rank]].items() if _has_cache(plan, phase)]  # fmt: skip
            caches |= dict.fromkeys(replica, _cache_bytes(plan, max(held)))
    groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for rank in roles:
        groups.setdefault((roles[rank], caches[rank]), []).append(rank)
    return tuple(
        _rank_plan(plan, ranks, names, cache, phases[names])
        for (names, cache), ranks in groups.items()
    )


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
        at_once = min(cache // plan.sample_bytes, plan.step.samples_per_replica, MAX_RUNNING)
        least = plan.sample_bytes if plan.fixed_cache is None else cache
    with_cache = {phase: _has_cache(plan, phase) for phase in phases}
    return RankPlan(
        ranks=tuple(ranks),
        roles=names,
        phases={
            ", ".join(filter(None, (holds, phase))): replace(
                memory, kv_cache=memory.kv_cache + cache * with_cache[phase]
            )
            for phase, memory in phases.items()
        },
        needed=max(m.total + least * with_cache[phase] for phase, m in phases.items()),
        samples_at_once=at_once,
    )


def _cache_bytes(plan: Plan, held: int) -> int:
    """KV cache on each rank of an engine, beside the bytes `held` by the fullest of its ranks."""
    if plan.fixed_cache is not None:
        return plan.fixed_cache
    wanted = plan.step.samples_per_replica * plan.sample_bytes
    return max(0, min(wanted, usable_bytes(plan.device_bytes) - held))


def _problems(plan: Plan) -> Iterator[str]:
    """What does not fit the model, a micro-batch, a KV cache or a device."""
    batch, limit = plan.batch, plan.config.max_positions
    if batch.sample_tokens > limit:
        yield (
            f"a sample of {batch.sample_tokens} tokens exceeds the model's {limit} positions; "
            "lower prompt_tokens or max_tokens"
        )
    if "train" in plan.device_map and batch.packed_tokens > batch.tokens_per_microbatch:
        yield (
            f"a sample of {batch.packed_tokens} tokens does not fit a micro-batch; raise "
            f"tokens_per_microbatch={batch.tokens_per_microbatch}"
        )
    for part in plan.ranks:
        ranks = f"each of ranks {format_ranks(part.ranks)}"
        if len(part.ranks) == 1:
            ranks = f"rank {part.ranks[0]}"
        if plan.device_bytes is not None and part.needed > usable_bytes(plan.device_bytes):
            usable, whole = usable_bytes(plan.device_bytes), plan.device_bytes
            yield (
                f"{ranks} needs {format_bytes(part.needed)} but has "
                f"{format_bytes(usable)} of {format_bytes(whole)}"
            )
        elif "generate" in part.roles and not part.samples_at_once:
            cache, sample = format_bytes(plan.fixed_cache), format_bytes(plan.sample_bytes)
            yield (
                f"{ranks} has a KV cache of {cache}, which holds no sample of {sample}; raise "
                "kv_cache_gib"
            )


def _warnings(plan: Plan) -> Iterator[str]:
    """What cannot run yet, and ranks that wait for ranks with more samples."""
    device_map, batch = plan.device_map, plan.batch
    if isinstance(plan.config, MixtureConfig):
        yield "a mixture of experts is planned only, and cannot be trained yet"
    if "generate" in device_map:
        yield from _uneven(batch.num_samples, device_map["generate"].num_replicas, "engines")
    if "train" in device_map:
        in_update = share(batch.num_samples, batch.updates_per_step)
        yield from _uneven(in_update, device_map["train"].num_replicas, "ranks of train")


def _uneven(num_samples: int, num_parts: int, what: str) -> Iterator[str]:
    if fewer := -num_samples % num_parts:
        most = share(num_samples, num_parts)
        yield (
            f"{num_samples} samples do not divide over {num_parts} {what}: {fewer} get "
            f"{most - 1} and wait for those with {most}; use a multiple of {num_parts}"
        )
