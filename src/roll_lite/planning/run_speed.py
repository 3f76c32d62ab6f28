"""What the steps of a run took, beside what the plan says of the samples that it had. No torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from roll_lite.device_map import DeviceMap, parse_device_map
from roll_lite.models.config import planned_config
from roll_lite.planning.planner import BatchPlan, Plan
from roll_lite.planning.speed import Machine, Samples, known_gpu, step_seconds

WARM_UP = 2
"""Steps that are left out: they capture graphs, compile kernels and pin host memory."""
ANY_BYTES = 2**50  # of a device: the run has fitted

PLANNED = {"train", "generate", "reference"}
"""Roles whose model is the policy's, or as large."""

Row = Mapping[str, float]
Ranks = Mapping[str, Sequence[Sequence[int]]]
"""Of each replica of each role."""


def run_table(folder: str | Path, model: str | None = None) -> list[list[str]]:
    """Of a run folder of recipes/rlvr.py; `model` names a shape or folder if the run's is gone."""
    config = json.loads((Path(folder) / "config.json").read_text())
    if config.get("recipe") != "rlvr":
        raise ValueError(f"{folder} is a run of {config.get('recipe')}; only rlvr's are planned")
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/train" in row]
    if len(rows) <= WARM_UP:
        raise ValueError(f"{folder} has {len(rows)} trained steps; at least {WARM_UP + 1} are read")
    start, rows = config["starts"][-1], rows[WARM_UP:]
    if (gpu := known_gpu(start["hardware"])) is None:
        raise ValueError(
            f"{folder} ran on {start['hardware']}; only steps on known GPUs are planned"
        )
    if others := sorted(set(start["ranks"]) - PLANNED):
        raise ValueError(f"{folder} has the role {others[0]}, which is not planned here")
    plan = Plan(
        planned_config(model or config["model"]), _device_map(config["device_map"], start["ranks"]),
        _batch(config, start["ranks"]), ANY_BYTES,
    )  # fmt: skip
    planned = step_seconds(plan, Machine(gpu), _samples(config, rows))
    return seconds_table(planned, measured_seconds(rows))


def seconds_table(planned: Mapping[str, float], measured: Mapping[str, float]) -> list[list[str]]:
    rows = [["seconds", "planned", "measured", "planned / measured"]]
    for name, seconds in measured.items():
        expected = planned.get(name)
        if not expected and not seconds:
            continue
        ratio = f"{expected / seconds:.2f}" if expected and seconds else ""
        rows.append([name, f"{expected:.3f}" if expected else "", f"{seconds:.3f}", ratio])
    return rows


def measured_seconds(rows: Sequence[Row]) -> dict[str, float]:
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


def _device_map(text: str, ranks: Ranks) -> DeviceMap:
    """As given; one that was chosen, from the ranks of each replica."""
    world_size = 1 + max(rank for of in ranks.values() for replica in of for rank in replica)
    if text == "auto":
        parts = []
        for role, replicas in ranks.items():
            members = "+".join(str(rank) for replica in replicas for rank in replica)
            parts.append(f"{role}={members},tp={len(replicas[0])}")
        text = " ".join(parts)
    return parse_device_map(text, world_size)


def _batch(config: Mapping[str, Any], ranks: Ranks) -> BatchPlan:
    same = (
        "prompts_per_step", "samples_per_prompt", "tokens_per_microbatch", "updates_per_step",
        "epochs", "kv_cache_gib", "engines_sleep", "offload", "checkpointing", "moments",
        "lora_rank", "max_staleness",
    )  # fmt: skip
    is_own_reference = config["kl_coef"] > 0 and "reference" not in ranks
    return BatchPlan(
        **{name: config[name] for name in same},
        reply_tokens=config["max_tokens"],
        policy_scores=is_own_reference + (config["denominator"] == "old"),
        lora_targets=tuple(config["lora_targets"]),
    )


def _samples(config: Mapping[str, Any], rows: Sequence[Row]) -> Samples:
    """By medians over the steps."""

    def of(name: str) -> float:
        return median(row[name] for row in rows)

    started, trained = of("rollout/started"), of("rollout/trained_samples")
    reply = of("rollout/reply_tokens")
    packed = median(
        row["train/tokens_per_second"] * row["time/train"] / row["rollout/trained_samples"]
        for row in rows
    )
    longest = [row.get("rollout/longest_reply", config["max_tokens"]) for row in rows]
    in_step = config["prompts_per_step"] * config["samples_per_prompt"]
    return Samples(
        num_generated=int(started),
        num_trained=int(trained),
        prompt_tokens=packed / config["epochs"] + 1 - reply,
        reply_tokens=reply,
        longest_reply=int(median(longest)),
        num_updates=max(1, round(trained / in_step * config["updates_per_step"])),
    )
