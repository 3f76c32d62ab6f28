"""The plan of a recipe's run: plan.py says what fits, speed.py how long a step takes, render.py
writes both.

Nothing in the package imports torch before it is needed: plans are made on laptops.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from roll_lite.models.config import read_config
from roll_lite.models.cost import kv_bytes_per_token
from roll_lite.options import chosen_names, flatten, from_flat, mark_chosen
from roll_lite.planning.plan import Plan, PlanOptions, take_turns
from roll_lite.planning.render import render, turns_line
from roll_lite.planning.speed import Machine, known_machine

if TYPE_CHECKING:
    from roll_lite.cluster.cluster import Cluster

T = TypeVar("T")


def print_plan(cfg: Any, prompt_tokens: Sequence[int]) -> int:
    """Print the plan of a Config with the parts of recipes/rlvr.py; returns the exit code: 1 if the
    run would not fit."""
    plan, machine = make_plan(cfg, max(prompt_tokens))
    print(render(plan, machine))
    return 0 if plan.fits else 1


def make_plan(cfg: Any, prompt_tokens: int) -> tuple[Plan, Machine | None]:
    """The plan, and the machine if its speed is known."""
    from roll_lite.cluster.cluster import Cluster

    options = cfg.cluster_options
    options["auto_options"]["must_fit"] = False
    cluster = Cluster(cfg.device_map, cfg.device, **options)  # not entered
    cfg = choose_memory(cfg, cluster, prompt_tokens)
    return plan_run(cfg, cluster, prompt_tokens), machine_of(cluster)


def machine_of(cluster: "Cluster") -> Machine | None:
    return known_machine(cluster.device_name, cluster.ranks_per_node)


def choose_memory(cfg: T, cluster: "Cluster", prompt_tokens: int = 256) -> T:
    """The config with engines_sleep and offload where device_map=auto needs them; says so."""
    if cfg.device_map != "auto":
        return cfg
    plan = plan_run(cfg, cluster, prompt_tokens)
    if (in_turn := take_turns(plan)) is plan:
        return cfg
    print(turns_line(plan, in_turn), flush=True)
    options = {name: getattr(in_turn.options, name) for name in ("engines_sleep", "offload")}
    chosen = [name for name, is_on in options.items() if is_on > getattr(cfg, name)]
    return mark_chosen(
        from_flat(type(cfg), **flatten(cfg) | options), [*chosen_names(cfg), *chosen]
    )


def plan_run(cfg: Any, cluster: "Cluster", prompt_tokens: int) -> Plan:
    parts = cfg.cluster_options
    options = PlanOptions.of_recipe(flatten(cfg), cluster.device_map, prompt_tokens)
    return Plan(
        parts["config"], cluster.device_map, options, cluster.device_bytes, parts["role_configs"]
    )


def cache_tokens(cfg: Any, cluster: "Cluster") -> int:
    """Tokens that the KV cache of a replica holds: in 16 bits, or 32 on a CPU."""
    from roll_lite.engine.attention_backends import PAGE_SIZE

    tp = cluster.device_map["generate"].tp
    width = 2 if cluster.device.type == "cuda" else 4
    largest_page = max(PAGE_SIZE.values())
    per_token = kv_bytes_per_token(read_config(cfg.model), tp, width)
    return int(cfg.kv_cache_gib * 2**30 / per_token) // largest_page * largest_page
