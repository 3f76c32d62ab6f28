"""The plan of a recipe's run: what it would hold in memory and do in a step.

The rest of the package needs no torch, so this file imports the cluster where it uses it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from roll_lite.models.config import read_config
from roll_lite.models.cost import kv_bytes_per_token
from roll_lite.options import chosen_names, flatten, from_flat, mark_chosen
from roll_lite.planning.plan_report import render
from roll_lite.planning.planner import BatchPlan, Plan, take_turns
from roll_lite.planning.speed import Machine, known_gpu

if TYPE_CHECKING:
    from roll_lite.cluster.cluster import Cluster

T = TypeVar("T")


def print_plan(cfg: Any, prompt_tokens: Sequence[int]) -> int:
    """Returns the exit code: 1 if the run would not fit."""
    plan, machine = make_plan(cfg, max(prompt_tokens))
    print(render(plan, machine))
    return 0 if plan.fits else 1


def make_plan(cfg: Any, prompt_tokens: int) -> tuple[Plan, Machine | None]:
    """For a Config with the parts of recipes/rlvr.py, without starting anything."""
    from roll_lite.cluster.cluster import Cluster

    options = cfg.cluster_options
    options["auto_options"]["must_fit"] = False
    cluster = Cluster(cfg.device_map, cfg.device, **options)  # not entered
    cfg = choose_memory(cfg, cluster, prompt_tokens)
    return plan_run(cfg, cluster, prompt_tokens), machine_of(cluster)


def machine_of(cluster: "Cluster") -> Machine | None:
    """The GPU of a cluster if its speed is known, and the ranks per node."""
    gpu = known_gpu(cluster.device_name)
    return Machine(gpu, cluster.ranks_per_node) if gpu else None


def choose_memory(cfg: T, cluster: "Cluster", prompt_tokens: int = 256) -> T:
    """The config with engines_sleep and offload where device_map=auto needs them; says so."""
    if cfg.device_map != "auto":
        return cfg
    planned, why = take_turns(plan_run(cfg, cluster, prompt_tokens))
    if why is None:
        return cfg
    print(f"chosen: {why}", flush=True)
    options = {name: getattr(planned.batch, name) for name in ("engines_sleep", "offload")}
    chosen = [name for name, is_on in options.items() if is_on > getattr(cfg, name)]
    return mark_chosen(
        from_flat(type(cfg), **flatten(cfg) | options), [*chosen_names(cfg), *chosen]
    )


def plan_run(cfg: Any, cluster: "Cluster", prompt_tokens: int) -> Plan:
    training, options = cfg.training, cfg.cluster_options
    is_own_reference = cfg.kl.kl_coef > 0 and not cfg.loads_reference
    batch = BatchPlan(
        prompts_per_step=cfg.rollout.prompts_per_step,
        samples_per_prompt=cfg.rollout.samples_per_prompt,
        prompt_tokens=prompt_tokens,
        reply_tokens=cfg.lengths.max_tokens,
        tokens_per_microbatch=training.tokens_per_microbatch,
        updates_per_step=cfg.updates_per_step,
        epochs=cfg.epochs,
        policy_scores=is_own_reference + (cfg.policy_loss.denominator == "old"),
        max_staleness=cfg.rollout.max_staleness,
        kv_cache_gib=cfg.kv_cache_gib,
        judge_cache_gib=flatten(cfg).get("judge_cache_gib", 0.0),
        engines_sleep=cfg.engines_sleep,
        offload=cfg.offload,
        checkpointing=training.checkpointing,
        moments=training.moments,
        lora_rank=training.lora_rank,
        lora_targets=training.lora_targets,
    )
    sizes = cluster.device_map, batch, cluster.device_bytes, options["role_configs"]
    return Plan(options["config"], *sizes)


def cache_tokens(cfg: Any, cluster: "Cluster") -> int:
    """Tokens that the KV cache of a replica holds: in 16 bits, or 32 on a CPU."""
    from roll_lite.engine.attention_backends import PAGE_SIZE

    tp, width = cluster.device_map["generate"].tp, 2 if cluster.device.type == "cuda" else 4
    largest_page = max(PAGE_SIZE.values())
    per_token = kv_bytes_per_token(read_config(cfg.model), tp, width)
    return int(cfg.kv_cache_gib * 2**30 / per_token) // largest_page * largest_page
