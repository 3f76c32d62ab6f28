"""Plans a run before it starts: roles, bytes and work of every rank. No torch, no device.

print(render(plan(config, device_map, BatchPlan(), device_bytes=80 * 2**30)))
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from roll_lite.checks import above, at_least, check_choices
from roll_lite.cluster.device_map import DeviceMap, Role, format_ranks, format_table, listing
from roll_lite.cluster.memory import (
    MAX_RUNNING,
    PAGE_TOKENS,
    USABLE,
    RankMemory,
    format_bytes,
    role_memory,
    together,
    train_memory,
    usable_bytes,
)
from roll_lite.models.config import ModelConfig
from roll_lite.models.cost import count_parameters, kv_bytes_per_token

CPU_CACHE_GIB = 1.0  # default of kv_cache_gib on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The work of one step, with all samples at their maximum length."""

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    prompt_tokens: int = 256
    reply_tokens: int = 1024
    tokens_per_microbatch: int = 16384
    updates_per_step: int = 1
    kv_cache_gib: float | None = None
    """Per rank; None is what all samples of a replica need, or as much of that as is free."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's moments."""

    def __post_init__(self):
        at_least(1, self, *(f.name for f in fields(self) if f.type is int))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Work per rank in one step: the largest share if uneven; 0 without the role."""

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
    memory: RankMemory
    samples_at_once: int
    """Full-length samples that fit the engine's KV cache; 0 without an engine."""


@dataclass(frozen=True, slots=True)
class Plan:
    config: ModelConfig
    device_map: DeviceMap
    batch: BatchPlan
    device_bytes: int | None
    """None on a CPU: fp32, no limit."""
    step: StepPlan
    ranks: tuple[RankPlan, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Bytes of an element that models compute in."""
        return 4 if self.device_bytes is None else 2

    @property
    def cached_bytes(self) -> int:
        """KV cache of one sample on one rank: whole pages, no shared prompt."""
        tokens = _share(self.batch.sample_tokens, PAGE_TOKENS) * PAGE_TOKENS
        return tokens * kv_bytes_per_token(self.config, self.device_map["generate"].tp, self.width)


def plan(
    config: ModelConfig, device_map: DeviceMap, batch: BatchPlan, device_bytes: int | None
) -> Plan:
    """Plan a run; warnings name what does not fit and which ranks would wait."""
    draft = Plan(config, device_map, batch, device_bytes, _plan_step(device_map, batch))
    draft = replace(draft, ranks=_plan_ranks(draft))
    return replace(draft, warnings=(*_does_not_fit(draft), *_waiting_ranks(draft)))


def _plan_step(device_map: DeviceMap, batch: BatchPlan) -> StepPlan:
    num_trainers = device_map["train"].num_replicas if "train" in device_map else 0
    num_engines = device_map["generate"].num_replicas if "generate" in device_map else 0
    in_update = _share(_share(batch.num_samples, batch.updates_per_step), num_trainers)
    in_microbatch = max(1, batch.tokens_per_microbatch // batch.packed_tokens)
    return StepPlan(
        samples_per_rank=in_update * batch.updates_per_step,
        tokens_per_rank=in_update * batch.updates_per_step * batch.sample_tokens,
        microbatches_per_rank=_share(in_update, in_microbatch) * batch.updates_per_step,
        samples_per_replica=_share(batch.num_samples, num_engines),
    )


def _share(total: int, num_parts: int) -> int:
    """The largest part of an even split; 0 without parts."""
    return -(-total // num_parts) if num_parts else 0


def _role_memory(draft: Plan, role: Role, microbatch: int | None = None) -> RankMemory:
    """Memory of one role on one of its ranks, without the KV cache."""
    batch = draft.batch
    if role.name == "generate":
        tokens = draft.step.samples_per_replica * batch.prompt_tokens
    else:
        samples = _share(_share(batch.num_samples, batch.updates_per_step), role.num_replicas)
        limit = batch.tokens_per_microbatch if microbatch is None else microbatch
        tokens = min(limit, samples * batch.packed_tokens)
    sizes = len(role.ranks), role.tp, tokens, draft.width
    if role.name == "train":
        moment_bytes = 4 if batch.moments == "float32" else 2
        options = {"checkpointing": batch.checkpointing, "moment_bytes": moment_bytes}
        return train_memory(draft.config, *sizes, **options)
    return role_memory(role.name, draft.config, *sizes)


def _plan_ranks(draft: Plan) -> tuple[RankPlan, ...]:
    """Memory of all ranks, grouped by roles and KV cache."""
    device_map, num_samples = draft.device_map, draft.step.samples_per_replica
    parts = {role.name: _role_memory(draft, role) for role in device_map.roles}
    roles: dict[int, tuple[str, ...]] = dict.fromkeys(range(device_map.world_size), ())
    for role in device_map.roles:
        for rank in role.ranks:
            roles[rank] += (role.name,)
    held = {names: together(parts[name] for name in names) for names in set(roles.values())}
    caches, sample_bytes = dict.fromkeys(roles, 0), 1
    if "generate" in device_map:
        sample_bytes = draft.cached_bytes
        for replica in device_map["generate"].replicas:
            fullest = max(held[roles[rank]].total for rank in replica)
            caches |= dict.fromkeys(replica, _cache_bytes(draft, fullest))
    groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for rank in roles:
        groups.setdefault((roles[rank], caches[rank]), []).append(rank)
    return tuple(
        RankPlan(
            ranks=tuple(ranks),
            roles=names,
            memory=replace(held[names], kv_cache=cache),
            samples_at_once=min(cache // sample_bytes, num_samples, MAX_RUNNING),
        )
        for (names, cache), ranks in groups.items()
    )


def _cache_bytes(draft: Plan, held: int) -> int:
    """KV cache on each rank of an engine, beside the bytes `held` by the fullest of its ranks."""
    gib = draft.batch.kv_cache_gib
    if gib is not None or draft.device_bytes is None:
        return int((gib or CPU_CACHE_GIB) * 2**30)
    wanted = draft.step.samples_per_replica * draft.cached_bytes
    return max(0, min(wanted, usable_bytes(draft.device_bytes) - held))


def _does_not_fit(draft: Plan) -> Iterator[str]:
    """Warnings about what does not fit the model, a micro-batch or a device."""
    batch, limit = draft.batch, draft.config.max_positions
    if batch.sample_tokens > limit:
        yield (
            f"a sample of {batch.sample_tokens} tokens exceeds the model's {limit} positions; "
            "lower prompt_tokens or reply_tokens"
        )
    if "train" in draft.device_map and batch.packed_tokens > batch.tokens_per_microbatch:
        yield (
            f"a sample of {batch.packed_tokens} tokens does not fit a micro-batch; raise "
            f"tokens_per_microbatch={batch.tokens_per_microbatch}"
        )
    usable = usable_bytes(draft.device_bytes or 0)
    for part in draft.ranks:
        ranks, total = f"ranks {format_ranks(part.ranks)}", part.memory.total
        if draft.device_bytes is not None and total > usable:
            room = f"{format_bytes(usable)} of {format_bytes(draft.device_bytes)}"
            yield f"{ranks} need {format_bytes(total)} but have {room}; {_remedy(draft, part)}"
        elif "generate" in part.roles and not part.samples_at_once:
            cache, sample = format_bytes(part.memory.kv_cache), format_bytes(draft.cached_bytes)
            is_free = batch.kv_cache_gib is None and draft.device_bytes is not None
            remedy = _remedy(draft, part) if is_free else "raise kv_cache_gib"
            yield f"{ranks}: a cache of {cache} holds no sample, which takes {sample}; {remedy}"


def _remedy(draft: Plan, part: RankPlan) -> str:
    """Options that make room on these ranks, at least for one sample in the KV cache."""
    remedies, batch, tokens = [], draft.batch, _fitting_tokens(draft, part)
    if batch.packed_tokens <= tokens < batch.tokens_per_microbatch:
        remedies.append(f"lower tokens_per_microbatch to {tokens}")
    if "train" in part.roles and batch.checkpointing != "full":
        remedies.append("set checkpointing=full")
    if batch.kv_cache_gib is not None and "generate" in part.roles:
        remedies.append(f"lower kv_cache_gib={batch.kv_cache_gib}")
    if parallel := [name for name in part.roles if name != "reference"]:
        remedies.append(f"raise the tp of {' and '.join(parallel)}")
    return listing([*remedies, "use more or larger devices"], "or")


def _fitting_tokens(draft: Plan, part: RankPlan) -> int:
    """The largest tokens_per_microbatch that fits these ranks; -1 if none does."""
    roles = [draft.device_map[name] for name in part.roles]
    one_sample = draft.cached_bytes if "generate" in part.roles else 0

    def total(tokens: int) -> int:
        held = together(_role_memory(draft, role, tokens) for role in roles).total
        return held + max(part.memory.kv_cache, one_sample)

    usable = usable_bytes(draft.device_bytes or 0)
    return bisect_right(range(draft.batch.tokens_per_microbatch + 1), usable, key=total) - 1


def _waiting_ranks(draft: Plan) -> Iterator[str]:
    """Warnings about ranks that wait for ranks with more samples."""
    device_map, batch = draft.device_map, draft.batch
    if "generate" in device_map:
        yield from _uneven(batch.num_samples, device_map["generate"].num_replicas, "engines")
    if "train" in device_map:
        in_update = _share(batch.num_samples, batch.updates_per_step)
        yield from _uneven(in_update, device_map["train"].num_replicas, "ranks of train")


def _uneven(num_samples: int, num_parts: int, what: str) -> Iterator[str]:
    if fewer := -num_samples % num_parts:
        share = _share(num_samples, num_parts)
        yield (
            f"{num_samples} samples do not divide over {num_parts} {what}: {fewer} get "
            f"{share - 1} and wait for those with {share}; use a multiple of {num_parts}"
        )


def render(plan: Plan) -> str:
    """The plan as text, with one line for ranks that hold the same."""
    step, batch, counts = plan.step, plan.batch, count_parameters(plan.config)
    dtype, device = "fp32", "CPU, no limit"
    if plan.device_bytes is not None:
        dtype, device = "bf16", f"{format_bytes(plan.device_bytes)}, planned to {USABLE:.0%}"
    lines = [
        f"model: {counts.total:,} parameters, {format_bytes(plan.width * counts.total)} in {dtype}",
        f"device: {device}",
        "",
        str(plan.device_map),
        "",
        _memory_table(plan.ranks),
        "",
        f"step: {batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples of up to "
        f"{batch.sample_tokens:,} tokens: {batch.num_samples:,} samples, "
        f"{batch.num_samples * batch.sample_tokens:,} tokens",
    ]
    if step.samples_per_rank:
        lines.append(
            f"train, per data-parallel rank: {step.samples_per_rank:,} samples, "
            f"{step.tokens_per_rank:,} tokens, {step.microbatches_per_rank:,} micro-batches of up "
            f"to {batch.tokens_per_microbatch:,} tokens, updates_per_step={batch.updates_per_step}"
        )
    if step.samples_per_replica:
        at_once = sorted({part.samples_at_once for part in plan.ranks if "generate" in part.roles})
        lines.append(
            f"generate, per engine: {step.samples_per_replica:,} samples, "
            f"{listing(at_once, 'or')} of them at once"
        )
    return "\n".join([*lines, "", *(f"warning: {text}" for text in plan.warnings)]).rstrip()


def _memory_table(parts: tuple[RankPlan, ...]) -> str:
    columns = [field.name for field in fields(RankMemory)]
    rows = [["ranks", "holds", *(name.replace("_", " ") for name in columns), "total"]]
    for part in parts:
        sizes = [format_bytes(getattr(part.memory, name)) for name in columns]
        holds = "+".join(part.roles) or "nothing"
        rows.append([format_ranks(part.ranks), holds, *sizes, format_bytes(part.memory.total)])
    return format_table(rows)
