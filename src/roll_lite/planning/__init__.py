"""The plan of a recipe's run: plan.py says what fits, speed.py how long a step takes, render.py
writes both.

Nothing in the package imports torch before it is needed: plans are made on laptops.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from roll_lite.cluster.launch import read_launch
from roll_lite.device_map import parse_device_map
from roll_lite.models.config import read_config
from roll_lite.models.cost import cache_bytes_per_token
from roll_lite.planning.plan import Plan
from roll_lite.planning.render import render
from roll_lite.planning.resolve import plan_run, resolve
from roll_lite.planning.speed import Machine, known_machine

if TYPE_CHECKING:
    from roll_lite.cluster.cluster import Cluster


def print_plan(cfg: Any, prompt_tokens: Sequence[int]) -> int:
    """Print the plan of a Config with the parts of recipes/rlvr.py; returns the exit code: 1 if the
    run would not fit."""
    plan, machine = make_plan(cfg, max(prompt_tokens))
    print(render(plan, machine))
    return 0 if plan.fits else 1


def make_plan(cfg: Any, prompt_tokens: int) -> tuple[Plan, Machine | None]:
    """The plan, and the machine if its speed is known."""
    from roll_lite.cluster.places import find_device

    launch = read_launch()
    device = find_device(cfg.device, launch, measures=True)
    cfg, notes = resolve(cfg, launch, device, prompt_tokens)
    print("\n".join(notes))
    device_map = parse_device_map(cfg.device_map, launch.world_size)
    parts = cfg.cluster_options
    configs = {"role_configs": parts["role_configs"]}
    device_map.check(parts["config"], required=parts["roles"], **configs)
    plan = plan_run(cfg, device_map, device, prompt_tokens)
    return plan, known_machine(device.name, launch.local_world_size)


def cache_tokens(cfg: Any, cluster: "Cluster") -> int:
    """Tokens that the KV cache of a replica holds: in 16 bits, or 32 on a CPU."""
    from roll_lite.engine.attention_backends import PAGE_SIZE

    tp = cluster.device_map["generate"].tp
    width = 2 if cluster.device.type == "cuda" else 4
    largest_page = max(PAGE_SIZE.values())
    per_token = cache_bytes_per_token(read_config(cfg.model), tp, width)
    return int(cfg.kv_cache_gib * 2**30 / per_token) // largest_page * largest_page
