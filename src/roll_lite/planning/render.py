"""A plan as text: what it holds, what it does, and what to change where it does not fit."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from roll_lite.device_map import DeviceMap, format_ranks, format_table, listing
from roll_lite.models.cost import active_parameters, count_parameters
from roll_lite.models.memory import MAX_RUNNING, USABLE, RankMemory, format_bytes, usable_bytes
from roll_lite.planning.plan import Plan, PlanOptions, RankPlan, share
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
RECIPE_FLAGS = (
    "prompts_per_step", "samples_per_prompt", "tokens_per_microbatch", "updates_per_step", "epochs",
    "max_staleness", "engines_sleep", "offload", "checkpointing", "lora_rank",
)  # fmt: skip
"""Options of a plan that are flags of the recipe with the same default."""
RECIPE_ARGUMENTS = ("moments", "lora_targets")
"""Those that are arguments of its rl.TrainingOptions."""


def render(plan: Plan, machine: Machine | None = None) -> str:
    """The plan as text, with one line for ranks that hold the same; seconds of a known machine."""
    lines = [*_model_lines(plan), "", str(plan.device_map), "", _memory_table(plan.ranks), ""]
    lines += _step_lines(plan)
    if machine and plan.fits:
        lines += _seconds_lines(plan, machine)
    lines.append("")
    lines += [f"does not fit: {text}" for text in plan.problems]
    lines += [f"  {text}" for text in remedies(plan)]
    lines += [f"warning: {text}" for text in warnings(plan)]
    return "\n".join(lines).rstrip()


def _model_lines(plan: Plan) -> list[str]:
    total = count_parameters(plan.config).total
    active = active_parameters(plan.config)
    dtype = "fp32"
    device = "CPU, no limit"
    if plan.device_bytes is not None:
        dtype = "bf16"
        device = f"{format_bytes(plan.device_bytes)}, planned to {USABLE:.0%}"
    used = f", {active:,} used by a token" if active < total else ""
    size = format_bytes(plan.width * total)
    return [f"model: {total:,} parameters{used}, {size} in {dtype}", f"device: {device}"]


def _memory_table(parts: tuple[RankPlan, ...]) -> str:
    columns = [field.name for field in fields(RankMemory)]
    rows = [["ranks", "holds", *(name.replace("_", " ") for name in columns), "total"]]
    for part in parts:
        for holds, memory in part.phases.items():
            sizes = [format_bytes(getattr(memory, name)) for name in columns]
            rows.append([format_ranks(part.ranks), holds, *sizes, format_bytes(memory.total)])
    return format_table(rows)


def _step_lines(plan: Plan) -> Iterator[str]:
    options, samples, device_map = plan.options, plan.options.samples, plan.device_map
    yield (
        f"step: {options.prompts_per_step} prompts x {options.samples_per_prompt} samples of up to "
        f"{options.sample_tokens:,} tokens: {samples.num_generated:,} samples, "
        f"{samples.num_generated * options.sample_tokens:,} tokens"
    )
    if "train" in device_map:
        num_samples = samples.per_update(device_map["train"]) * options.updates_per_step
        limit = options.tokens_per_microbatch
        yield (
            f"train, per data-parallel rank: {num_samples:,} samples, "
            f"{num_samples * options.sample_tokens:,} tokens, "
            f"{samples.microbatches(device_map['train'], limit):,} micro-batches of up "
            f"to {limit:,} tokens, updates_per_step={options.updates_per_step}"
        )
    if options.lora_rank and "train" in device_map and "generate" in device_map:
        yield (
            "weights: one copy of the frozen ones on a rank, for trainer and engine"
            if plan.frozen_bytes
            else "weights: engines have their own, with adapters merged"
        )
    if "generate" in device_map:
        num_samples = samples.generated_by(device_map["generate"])
        at_once = sorted({part.samples_at_once for part in plan.ranks if "generate" in part.roles})
        most = min(num_samples, MAX_RUNNING)
        gib = most * plan.sample_bytes / 2**30
        held = f", {listing(at_once, 'or')} of them at once" if at_once[0] else ""
        is_small = plan.fixed_cache is not None and at_once[0] < most
        yield (
            f"generate, per engine: {num_samples:,} samples{held}"
            f"{f'; --kv-cache-gib {math.ceil(gib)} would hold {most:,}' if is_small else ''}"
        )


def _seconds_lines(plan: Plan, machine: Machine) -> list[str]:
    seconds = step_seconds(plan, machine)
    whole = seconds.pop("step")
    parts = ", ".join(f"{name} {value:.2g}" for name, value in seconds.items())
    return [
        f"seconds: about {whole:.2g} a step of full-length samples on {machine.gpu}: {parts}",
        f"  assumed: products at {machine.products / 1e12:.0f} TFLOP/s ({PRODUCTS_SHARE:.0%} of "
        f"the published rate), memory at {machine.memory / 1e12:.1f} TB/s ({MEMORY_SHARE:.0%}), "
        f"{SAMPLE_SECONDS * 1e6:.0f} us of the host a sample; rewards are not counted",
    ]


def seconds_table(planned: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """The parts of a step of a run: what was planned beside what they took."""
    rows = [["seconds", "planned", "measured", "planned / measured"]]
    for name, seconds in measured.items():
        expected = planned.get(name)
        if not expected and not seconds:
            continue
        ratio = f"{expected / seconds:.2f}" if expected and seconds else ""
        rows.append([name, f"{expected:.3f}" if expected else "", f"{seconds:.3f}", ratio])
    return format_table(rows)


def turns_line(plan: Plan, in_turn: Plan) -> str:
    """What `take_turns` has chosen, and why."""
    names = [n for n in ("engines_sleep", "offload") if n in _changes(plan, in_turn)]
    before = format_bytes(plan.needed)
    needed = format_bytes(in_turn.needed)
    usable = format_bytes(usable_bytes(plan.device_bytes))
    why = f"a rank would need {before} at once, in turn {needed} of {usable}"
    return f"chosen: {' and '.join(names)}: {why}"


def warnings(plan: Plan) -> list[str]:
    """What cannot run yet, and ranks that wait for ranks with more samples."""
    device_map, samples = plan.device_map, plan.options.samples
    found = []
    in_update = share(samples.num_trained, samples.num_updates)
    for name, num_samples, parts in (
        ("generate", samples.num_generated, "engines"),
        ("train", in_update, "ranks of train"),
    ):
        num_parts = device_map[name].num_replicas if name in device_map else 1
        most = share(num_samples, num_parts)
        if fewer := -num_samples % num_parts:
            found.append(
                f"{num_samples} samples do not divide over {num_parts} {parts}: {fewer} get "
                f"{most - 1} and wait for those with {most}; use a multiple of {num_parts}"
            )
    return found


def remedies(plan: Plan) -> list[str]:
    """Options that make a plan fit; if none is enough, what each would do, and several together."""
    if plan.fits_devices:
        return []
    all_weights = [*_smaller(plan), *_wider(plan)]
    lora = [] if plan.options.lora_rank else [plan.with_options(lora_rank=LORA_RANK)]
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


def nearest_fit(plan: Plan, machine: Machine | None) -> Plan | None:
    """The plan on the same ranks that fits with flags alone and has the shortest step, if one is
    found: with one option more, or with several."""
    changed = [new for new in (*_smaller(plan), *_wider(plan), _combined(plan)) if new.fits]
    same_ranks = [
        new
        for new in changed
        if new.device_map.world_size == plan.device_map.world_size
        and new.options.moments == plan.options.moments
    ]
    if machine is None:
        return next(iter(same_ranks), None)
    return min(same_ranks, key=lambda new: step_seconds(new, machine)["step"], default=None)


def command_of(
    plan: Plan, model: str, ranks_per_node: int, *, chooses_map: bool, has_reference: bool
) -> str:
    """The command that starts a run so; the map is written into it unless the recipe chooses it."""
    world_size = plan.device_map.world_size
    words = ["roll-lite"]
    if world_size > 1:
        words = ["torchrun", "--nproc-per-node", str(min(world_size, ranks_per_node))]
        if world_size > ranks_per_node:
            words += ["--nnodes", str(share(world_size, ranks_per_node))]
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
        words += ["-m", "roll_lite"]
    words += ["rlvr", "--model", model, "--data", "DATA"]
    words += [] if chooses_map else ["--device-map", f'"{plan.device_map.text}"']
    words += ["--kl-coef", "0.001"] if has_reference else []
    words += ["--max-tokens", str(plan.options.max_tokens)]
    words += ["--kv-cache-gib", f"{_cache_gib(plan):g}"]
    default = PlanOptions()
    for name in RECIPE_FLAGS:
        if (value := getattr(plan.options, name)) != getattr(default, name):
            words += _flag(name, value)
    return " ".join(words)


def arguments_of(plan: Plan) -> str:
    """What differs from the recipe's options and has no flag there, as arguments of a part."""
    default = PlanOptions()
    values = {name: getattr(plan.options, name) for name in RECIPE_ARGUMENTS}
    changed = [f"{n}={v!r}" for n, v in values.items() if v != getattr(default, n)]
    return ", ".join(changed)


def _cache_gib(plan: Plan) -> float:
    """The KV cache of every engine as it was given, or rounded down."""
    if plan.options.kv_cache_gib is not None:
        return plan.options.kv_cache_gib
    engines = [part for part in plan.ranks if "generate" in part.roles]
    caches = [max(memory.kv_cache for memory in part.phases.values()) for part in engines]
    return math.floor(100 * min(caches) / 2**30) / 100


def _flag(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


def options_between(plan: Plan, changed: Plan) -> list[str]:
    """The flags in which the plans differ."""
    old_map = plan.device_map
    new_map = changed.device_map
    options = [" ".join(_flag(*each)) for each in _changes(plan, changed).items()]
    if [role.tp for role in new_map.roles] != [role.tp for role in old_map.roles]:
        options.append(f'--device-map "{new_map.text}"')
    if new_map.world_size != old_map.world_size:
        options.append(f"{new_map.world_size} ranks")
    return options


def _effect(plan: Plan, changed: Plan) -> str:
    """How far the options in which the plans differ go."""
    options = options_between(plan, changed)
    verb = "together bring" if len(options) > 1 else "brings" if options[0][0] == "-" else "bring"
    enough = "" if changed.fits_devices else ", which is not enough"
    return f"{listing(options, 'and')} {verb} it to {format_bytes(changed.needed)}{enough}"


def _changes(plan: Plan, changed: Plan) -> dict[str, object]:
    """The options in which the plans differ, with their new values."""
    values = {field.name: getattr(changed.options, field.name) for field in fields(PlanOptions)}
    return {name: new for name, new in values.items() if new != getattr(plan.options, name)}


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with one more option that saves memory, the cheapest in time first."""
    options = plan.options
    if not options.engines_sleep and not options.max_staleness:
        yield plan.with_options(engines_sleep=True)
    if not options.offload and not options.max_staleness:
        yield plan.with_options(engines_sleep=True, offload=True)
    if options.checkpointing != "full":
        yield plan.with_options(checkpointing="full")
    yield _halved(plan, "tokens_per_microbatch", options.samples.packed_tokens)
    if options.kv_cache_gib is not None:
        yield _halved(plan, "kv_cache_gib", plan.sample_bytes / 2**30)
    if options.moments != "bfloat16":
        yield plan.with_options(moments="bfloat16")


def _halved(plan: Plan, option: str, least: float) -> Plan:
    """Halve an option until the plan fits or it would be less than `least`."""
    while not plan.fits_devices:
        value = getattr(plan.options, option)
        half = value // 2 if isinstance(value, int) else value / 2
        if half < least:
            return plan
        plan = plan.with_options(**{option: half})
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
