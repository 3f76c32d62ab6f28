"""A plan as text, and what to change where it does not fit."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from roll_lite.device_map import DeviceMap, format_ranks, format_table, listing
from roll_lite.models.cost import active_parameters, count_parameters
from roll_lite.models.memory import MAX_RUNNING, USABLE, RankMemory, format_bytes
from roll_lite.planning.planner import BatchPlan, Plan, RankPlan
from roll_lite.planning.speed import (
    MEMORY_SHARE,
    PRODUCTS_SHARE,
    SAMPLE_SECONDS,
    Machine,
    step_seconds,
)

MAX_RANKS = 4096  # more are not proposed
MAX_TP = 8  # larger ones, which would span nodes, are not proposed
LORA_RANK = 16


def render(plan: Plan, machine: Machine | None = None) -> str:
    """The plan as text, with one line for ranks that hold the same; seconds of a known machine."""
    lines = [*_model_lines(plan), "", str(plan.device_map), "", _memory_table(plan.ranks), ""]
    lines += [*_step_lines(plan)]
    if machine and plan.fits:
        lines += _seconds_lines(plan, machine)
    lines.append("")
    lines += [f"does not fit: {text}" for text in plan.problems]
    lines += [f"  {text}" for text in remedies(plan)]
    lines += [f"warning: {text}" for text in plan.warnings]
    return "\n".join(lines).rstrip()


def _model_lines(plan: Plan) -> list[str]:
    total, active = count_parameters(plan.config).total, active_parameters(plan.config)
    dtype, device = "fp32", "CPU, no limit"
    if plan.device_bytes is not None:
        dtype, device = "bf16", f"{format_bytes(plan.device_bytes)}, planned to {USABLE:.0%}"
    used = f", {active:,} used by a token" if active < total else ""
    size = format_bytes(plan.width * total)
    return [f"model: {total:,} parameters{used}, {size} in {dtype}", f"device: {device}"]


def _step_lines(plan: Plan) -> Iterator[str]:
    step, batch = plan.step, plan.batch
    yield (
        f"step: {batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples of up to "
        f"{batch.sample_tokens:,} tokens: {batch.num_samples:,} samples, "
        f"{batch.num_samples * batch.sample_tokens:,} tokens"
    )
    if step.samples_per_rank:
        yield (
            f"train, per data-parallel rank: {step.samples_per_rank:,} samples, "
            f"{step.tokens_per_rank:,} tokens, {step.microbatches_per_rank:,} micro-batches of up "
            f"to {batch.tokens_per_microbatch:,} tokens, updates_per_step={batch.updates_per_step}"
        )
    if step.samples_per_replica:
        at_once = sorted({part.samples_at_once for part in plan.ranks if "generate" in part.roles})
        most = min(step.samples_per_replica, MAX_RUNNING)
        gib = most * plan.sample_bytes / 2**30
        is_small = plan.fixed_cache is not None and at_once[0] < most
        yield (
            f"generate, per engine: {step.samples_per_replica:,} samples, "
            f"{listing(at_once, 'or')} of them at once"
            f"{f'; --kv-cache-gib {math.ceil(gib)} would hold {most:,}' if is_small else ''}"
        )


def _seconds_lines(plan: Plan, machine: Machine) -> list[str]:
    seconds, gpu = step_seconds(plan, machine), machine.gpu
    whole = seconds.pop("step")
    parts = ", ".join(f"{name} {value:.2g}" for name, value in seconds.items())
    return [
        f"seconds: about {whole:.2g} a step of full-length samples on {gpu.name}: {parts}",
        f"  assumed: products at {gpu.products / 1e12:.0f} TFLOP/s ({PRODUCTS_SHARE:.0%} of the "
        f"published rate), memory at {gpu.memory / 1e12:.1f} TB/s ({MEMORY_SHARE:.0%}), "
        f"{SAMPLE_SECONDS * 1e6:.0f} us of the host a sample; rewards are not counted",
    ]


def _memory_table(parts: tuple[RankPlan, ...]) -> str:
    columns = [field.name for field in fields(RankMemory)]
    rows = [["ranks", "holds", *(name.replace("_", " ") for name in columns), "total"]]
    for part in parts:
        for holds, memory in part.phases.items():
            sizes = [format_bytes(getattr(memory, name)) for name in columns]
            rows.append([format_ranks(part.ranks), holds, *sizes, format_bytes(memory.total)])
    return format_table(rows)


def remedies(plan: Plan) -> list[str]:
    """Options that make a plan fit; if none is enough, what each would do, and several together."""
    if plan.fits_devices:
        return []
    all_weights, lora = [*_smaller(plan), *_wider(plan)], [*_lora(plan)]
    changes = [*all_weights, *lora]
    enough = [new for new in changes if new.fits_devices]
    shown = enough or [new for new in changes if new.needed < plan.needed]
    if not any(new.fits_devices for new in all_weights):
        shown.append(_combined(plan))
    if not enough:
        shown += map(_combined, lora)
    lines = [_effect(plan, new) for new in shown]
    if not any(new.fits_devices for new in shown):
        lines.append("use larger devices or a smaller model")
    return lines


def _combined(plan: Plan) -> Plan:
    """One option after the other until it fits, or none helps. LoRA, which trains another model,
    is not among them."""
    while not plan.fits_devices:
        helpful = (new for new in (*_smaller(plan), *_wider(plan)) if new.needed < plan.needed)
        if (better := next(helpful, None)) is None:
            break
        plan = better
    return plan


def _effect(plan: Plan, changed: Plan) -> str:
    """How far the options in which the plans differ go."""
    options = _options(plan, changed)
    verb = "together bring" if len(options) > 1 else "brings" if options[0][0] == "-" else "bring"
    enough = "" if changed.fits_devices else ", which is not enough"
    return f"{listing(options, 'and')} {verb} it to {format_bytes(changed.needed)}{enough}"


def _options(plan: Plan, changed: Plan) -> list[str]:
    """The options of a recipe in which the plans differ."""
    options, old_map, new_map = [], plan.device_map, changed.device_map
    for field in fields(BatchPlan):
        value = getattr(changed.batch, field.name)
        if value != getattr(plan.batch, field.name):
            flag = f"--{field.name.replace('_', '-')}"
            options.append(flag if value is True else f"{flag} {value}")
    if [role.tp for role in new_map.roles] != [role.tp for role in old_map.roles]:
        options.append(f'--device-map "{new_map.text}"')
    if new_map.world_size != old_map.world_size:
        options.append(f"{new_map.world_size} ranks")
    return options


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with one more option that saves memory, the cheapest in time first."""
    batch = plan.batch
    if not batch.engines_sleep and not batch.max_staleness:
        yield _with_batch(plan, engines_sleep=True)
        yield _with_batch(plan, engines_sleep=True, offload=True)
    elif not batch.offload and not batch.max_staleness:
        yield _with_batch(plan, offload=True)
    if batch.checkpointing != "full":
        yield _with_batch(plan, checkpointing="full")
    yield _halved(plan, "tokens_per_microbatch", batch.packed_tokens)
    if batch.kv_cache_gib is not None:
        yield _halved(plan, "kv_cache_gib", plan.sample_bytes / 2**30)
    if batch.moments != "bfloat16":
        yield _with_batch(plan, moments="bfloat16")


def _lora(plan: Plan) -> Iterator[Plan]:
    if not plan.batch.lora_rank:
        yield _with_batch(plan, lora_rank=LORA_RANK)


def _with_batch(plan: Plan, **options: Any) -> Plan:
    return replace(plan, batch=replace(plan.batch, **options))


def _halved(plan: Plan, option: str, least: float) -> Plan:
    """Halve an option until the plan fits or it would be less than `least`."""
    while not plan.fits_devices:
        value = getattr(plan.batch, option)
        half = value // 2 if isinstance(value, int) else value / 2
        if half < least:
            return plan
        plan = _with_batch(plan, **{option: half})
    return plan


def _wider(plan: Plan) -> Iterator[Plan]:
    """Twice the tp of one role, or two ranks for each."""
    device_map = plan.device_map
    for role in (role for role in device_map.roles if 2 * role.tp <= MAX_TP):
        roles = [replace(r, tp=2 * r.tp) if r is role else r for r in device_map.roles]
        try:
            wider = replace(device_map, roles=tuple(roles))
            wider.check(plan.config, required=wider.names, role_configs=plan.role_configs)
        except ValueError:  # it does not divide ranks or heads
            continue
        yield replace(plan, device_map=wider)
    if 2 * device_map.world_size <= MAX_RANKS:
        roles = [
            replace(role, ranks=tuple(2 * rank + i for rank in role.ranks for i in (0, 1)))
            for role in device_map.roles
        ]
        yield replace(plan, device_map=DeviceMap(tuple(roles), 2 * device_map.world_size))
