"""Options resolved once: what was left open gets its value before anything starts, and afterwards
options are only read."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from roll_lite.cluster.launch import Launch, read_launch
from roll_lite.device_map import Device, DeviceMap, auto_device_map, parse_device_map
from roll_lite.models.memory import format_bytes, usable_bytes
from roll_lite.options import RecipeConfig, flatten, from_flat, open_parts
from roll_lite.planning.plan import DEFAULT_CACHE_GIB, Plan, PlanOptions, take_turns
from roll_lite.planning.render import turns_line
from roll_lite.train.optimizer import sized_defaults

if TYPE_CHECKING:
    from roll_lite.cluster.cluster import Cluster

T = TypeVar("T", bound=RecipeConfig)


def resolved(cfg: T) -> T:
    """`resolve` on this rank; the first rank prints what was chosen."""
    from roll_lite.cluster.places import find_device

    launch = read_launch()
    device = find_device(cfg.device, launch, measures=_is_auto(cfg) or _has_open_cache(cfg))
    cfg, notes = resolve(cfg, launch, device)
    if notes and launch.rank == 0:
        print("\n".join(notes), flush=True)
    return cfg


def resolve(
    cfg: T, launch: Launch, device: Device, prompt_tokens: int = 256
) -> tuple[T, list[str]]:
    """The options with a value for each that was left open, and lines that say what was chosen.

    `launch` is what torchrun set, `device` that of this rank. Nothing else counts, so that all
    ranks come to the same; the rendezvous compares it. `prompt_tokens` is for memory.
    """
    sizes, notes = sized_defaults(cfg)
    by_device = {"device": device.kind} if cfg.device == "auto" else {}
    cfg = with_chosen(cfg, _said_by_parts(cfg) | sizes | by_device)
    if not _is_auto(cfg):
        cfg, of_cache = _choose_cache(cfg, launch, device, prompt_tokens)
        return cfg, [*notes, *of_cache]
    device_map, reasons = _choose_map(cfg, launch, device)
    plan = plan_run(cfg, device_map, device, prompt_tokens)
    if _has_open_cache(cfg):
        plan = plan.with_options(kv_cache_gib=DEFAULT_CACHE_GIB)
    turns = {}
    if (in_turn := take_turns(plan)) is not plan:
        reasons.append(turns_line(plan, in_turn))
        both = {name: getattr(in_turn.options, name) for name in ("engines_sleep", "offload")}
        turns = {name: is_on for name, is_on in both.items() if is_on > getattr(cfg, name)}
    cfg = with_chosen(cfg, {"device_map": device_map.text} | turns)
    cfg, of_cache = _choose_cache(cfg, launch, device, prompt_tokens)
    return cfg, [*notes, *reasons, *of_cache]


def _has_open_cache(cfg: RecipeConfig) -> bool:
    """Whether the KV cache is to be chosen; not all recipes have one."""
    return getattr(cfg, "kv_cache_gib", 0.0) is None


def _choose_cache(
    cfg: T, launch: Launch, device: Device, prompt_tokens: int
) -> tuple[T, list[str]]:
    """A KV cache for all samples that are generated at once, or for as many as fit beside what the
    plan says that engines' ranks hold; not below the default, if that fits."""
    if not _has_open_cache(cfg):
        return cfg, []
    if device.num_bytes is None:
        return with_chosen(cfg, {"kv_cache_gib": DEFAULT_CACHE_GIB}), []
    device_map = parse_device_map(cfg.device_map, launch.world_size)
    plan = plan_run(cfg, device_map, device, prompt_tokens)
    plan = plan.with_options(kv_cache_gib=None, **cfg.generated_at_once)
    at_once = min([p.samples_at_once for p in plan.ranks if "generate" in p.roles], default=0)
    gib = math.ceil(at_once * plan.sample_bytes / 2**30 * 100) / 100 if at_once else 0.0
    is_default = not gib or plan.with_options(kv_cache_gib=DEFAULT_CACHE_GIB).fits_devices
    gib = max(gib, DEFAULT_CACHE_GIB) if is_default else gib
    note = (
        f"chosen for GPUs of {format_bytes(device.num_bytes)}: kv_cache_gib={gib:g}, which holds "
        f"{int(gib * 2**30 / plan.sample_bytes):,} samples of {plan.options.sample_tokens:,} tokens"
    )
    return with_chosen(cfg, {"kv_cache_gib": gib}), [note]


def _is_auto(cfg: RecipeConfig) -> bool:
    """Whether the device map is to be chosen, for which a recipe has `map_options`."""
    return hasattr(cfg, "map_options") and cfg.device_map == "auto"


def fit_cache(cfg: T, cluster: "Cluster") -> T:
    """The options with a KV cache for which there is room beside what other programs hold."""
    cfg, notes = lower_cache(cfg, cluster.device_map, cluster.free_bytes)
    if notes:
        print("\n".join(notes), flush=True)
    return cfg


def lower_cache(
    cfg: T, device_map: DeviceMap, free_bytes: int | None, prompt_tokens: int = 256
) -> tuple[T, list[str]]:
    """A smaller KV cache where the plan of an engine's rank needs more than the `free_bytes` of the
    fullest GPU, if a whole sample fits it; and a line that says so."""
    if free_bytes is None:
        return cfg, []
    plan = plan_run(cfg, device_map, Device("cuda", num_bytes=free_bytes), prompt_tokens)
    needed = max(part.needed for part in plan.ranks if "generate" in part.roles)
    over = needed - usable_bytes(free_bytes)
    gib = math.floor((cfg.kv_cache_gib - over / 2**30) * 10) / 10
    if over <= 0 or gib * 2**30 < plan.sample_bytes:
        return cfg, []
    note = (
        f"kv_cache_gib={cfg.kv_cache_gib:g} is lowered to {gib:g}: "
        f"{format_bytes(free_bytes)} are free on the fullest GPU"
    )
    return with_chosen(cfg, {"kv_cache_gib": gib}), [note]


def with_epochs(cfg: T, num_rows: int) -> T:
    """The options with as many steps as their `epochs` over the rows take."""
    steps = math.ceil(cfg.epochs * num_rows / cfg.rows_per_step)
    print(f"chosen for epochs={cfg.epochs:g} of {num_rows:,} rows: steps={steps}", flush=True)
    return with_chosen(cfg, {"steps": steps})


def with_chosen(cfg: T, values: Mapping[str, Any]) -> T:
    """The options with these values, which are noted as chosen."""
    if not values:
        return cfg
    flat = flatten(cfg)
    open_options = {n for _, part in open_parts(cfg) for n in part.keywords.keys() - part.options}
    before = {name: None if name in open_options else flat[name] for name in values}
    return from_flat(type(cfg), **flat | values | {"chosen": before | {**cfg.chosen}})


def _said_by_parts(cfg: RecipeConfig) -> dict[str, Any]:
    """What the recipe and its parts say of options that were left open; losses also of their
    estimator's."""
    parts = [cfg, *(getattr(cfg, field.name) for field in fields(cfg))]
    parts = [part for part in parts if is_dataclass(part)]
    found = {}
    for part in parts:
        for name, value in getattr(part, "open_defaults", {}).items():
            given = getattr(part, name)
            if given in (None, ()) and value != given:
                found[name] = value
    if hasattr(cfg, "policy_loss"):
        estimator = cfg.advantages
        for name, value in cfg.policy_loss.facts.advantage_defaults.items():
            if name in estimator.keywords and name not in estimator.options:
                found[name] = value
    return found


def _choose_map(cfg: Any, launch: Launch, device: Device) -> tuple[DeviceMap, list[str]]:
    parts = cfg.cluster_options
    return auto_device_map(
        launch.world_size, parts["config"], device.num_bytes, parts["roles"],
        launch.local_world_size, must_fit=not cfg.plan, **cfg.map_options,
    )  # fmt: skip


def plan_run(cfg: Any, device_map: DeviceMap, device: Device, prompt_tokens: int) -> Plan:
    parts = cfg.cluster_options
    options = PlanOptions.of_recipe(flatten(cfg) | cfg.planned, device_map, prompt_tokens)
    return Plan(parts["config"], device_map, options, device.num_bytes, parts["role_configs"])
