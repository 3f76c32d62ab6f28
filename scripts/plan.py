"""Plan a run without starting it: bytes per rank, the work and seconds of a step, what to change.

    python scripts/plan.py --model qwen3-8b --world-size 8
    python scripts/plan.py --model qwen3-8b --world-size 16 --device-map "train=0-7 generate=8-15"
    python scripts/plan.py --model qwen3-32b --lora-rank 16 --checkpointing full
    python scripts/plan.py --model models/tiny --device-gib None --max-tokens 64      # on a CPU
    python scripts/plan.py --run runs/rlvr     # what its steps took beside the plan of its samples

Needs no GPU, no torch and no download: only the name of a shape, or a folder's config.json. Exits
with 1 if the run would not fit.
"""

import sys
from dataclasses import dataclass, fields
from typing import Literal

import tyro

from roll_lite.checks import above, at_least, unread_with
from roll_lite.device_map import (
    DeviceMap,
    auto_device_map,
    format_table,
    parse_device_map,
)
from roll_lite.models.config import ModelConfig, planned_config
from roll_lite.planning.plan_report import render
from roll_lite.planning.planner import BatchPlan, Plan, take_turns
from roll_lite.planning.run_speed import run_table
from roll_lite.planning.speed import Machine, known_gpu

DEFAULT = "qwen3-0.6b"
READ_OF_RUN = ("run", "model")


@dataclass(kw_only=True)
class Config:
    run: str | None = None
    """Folder of a run of recipes/rlvr.py on GPUs: the seconds that its steps took, beside those
    planned for the samples that it had. Of the other options only --model is read then."""
    model: str | None = None
    """Hugging Face folder, or a shape: qwen3-0.6b, 1.7b, 4b, 8b, 14b, 32b, 30b-a3b or 235b-a22b;
    llama-3.2-1b or 3b, llama-3.1-8b, 70b or 405b; qwen2.5-0.5b, 1.5b or 7b; smollm2-135m. None
    means that of the run, or qwen3-0.6b."""
    world_size: int = 8
    """Number of processes, one per device."""
    ranks_per_node: int = 8
    """Devices per machine; auto never splits a tensor-parallel engine over two machines."""
    device_map: str = "auto"
    """auto, or roles with their ranks: "train=0-3,tp=2 generate=4-7 reference=0-3"."""
    reference: bool = True
    """With auto: whether the run has a reference model; with LoRA the policy is its own."""
    device_gib: float | None = 80.0
    """Memory of one device; None means CPU: fp32, no limit."""
    gpu: Literal["H100", "H200", "A100", "L40S", "B200"] = "H100"
    """Kind of device, for the seconds of a step; its memory is device_gib."""
    prompts_per_step: int = 32
    """Prompts per step."""
    samples_per_prompt: int = 8
    """Group size: samples of one prompt that are compared with each other."""
    prompt_tokens: int = 256
    """Longest prompt, in tokens."""
    max_tokens: int = 1024
    """Longest reply, in tokens."""
    updates_per_step: int = 1
    """Optimizer updates per step, each on an equal part of its samples."""
    tokens_per_microbatch: int = 16384
    """Packed tokens of one forward and backward pass."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: what the backward pass recomputes."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's moments."""
    lora_rank: int = 0
    """Train LoRA adapters of this rank instead of all weights; 0 is off."""
    engines_sleep: bool = False
    """Engines give their memory to the trainer while it works."""
    offload: bool = False
    """Trainers give theirs to the engines while these generate."""
    max_staleness: int = 0
    """Above 0, engines on ranks of their own generate while the trainer works."""
    kv_cache_gib: float | None = None
    """KV cache per rank; None means what its samples need, or as much of that as fits."""

    def __post_init__(self):
        if self.run is not None:
            unread_with("run", self, *(f.name for f in fields(self) if f.name not in READ_OF_RUN))
            return
        at_least(1, self, "world_size", "ranks_per_node", "max_tokens")
        if self.device_gib is not None:
            above(0, self, "device_gib")
        if self.max_staleness:
            unread_with("max_staleness above 0", self, "engines_sleep", "offload")
        batch_plan(self)
        device_map(self, planned_config(self.model or DEFAULT))


def device_bytes(cfg: Config) -> int | None:
    return None if cfg.device_gib is None else int(cfg.device_gib * 2**30)


def device_map(cfg: Config, config: ModelConfig) -> tuple[DeviceMap, list[str]]:
    """The device map, and the reasons for it."""
    if cfg.device_map == "auto":
        has_reference = cfg.reference and not cfg.lora_rank  # which is its own
        roles = ["train", "generate", *(["reference"] if has_reference else [])]
        return auto_device_map(
            cfg.world_size, config, device_bytes(cfg), roles, cfg.ranks_per_node,
            must_fit=False, **batch_plan(cfg).train_options,
            **dict.fromkeys(("engines_sleep", "offload"), not cfg.max_staleness),  # if need be
        )  # fmt: skip
    chosen = parse_device_map(cfg.device_map, cfg.world_size)
    chosen.check(config)
    return chosen, ["as given"]


def batch_plan(cfg: Config) -> BatchPlan:
    return BatchPlan(
        prompts_per_step=cfg.prompts_per_step,
        samples_per_prompt=cfg.samples_per_prompt,
        prompt_tokens=cfg.prompt_tokens,
        reply_tokens=cfg.max_tokens,
        tokens_per_microbatch=cfg.tokens_per_microbatch,
        updates_per_step=cfg.updates_per_step,
        kv_cache_gib=cfg.kv_cache_gib,
        checkpointing=cfg.checkpointing,
        moments=cfg.moments,
        lora_rank=cfg.lora_rank,
        policy_scores=int(cfg.reference and cfg.lora_rank > 0),
        engines_sleep=cfg.engines_sleep,
        offload=cfg.offload,
        max_staleness=cfg.max_staleness,
    )


def show_run(folder: str, model: str | None) -> None:
    try:
        table = run_table(folder, model)
    except KeyError as error:
        sys.exit(f"error: {folder} has no {error}: it is of another version or recipe")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(format_table(table))


def main(cfg: Config) -> bool:
    """Returns whether the run would fit."""
    if cfg.run is not None:
        show_run(cfg.run, cfg.model)
        return True
    config = planned_config(cfg.model or DEFAULT)
    chosen, reasons = device_map(cfg, config)
    for reason in reasons:
        print(f"device map: {reason}")
    planned = Plan(config, chosen, batch_plan(cfg), device_bytes(cfg))
    if cfg.device_map == "auto":
        planned, why = take_turns(planned)
        if why:
            print(f"chosen: {why}")
    is_gpu = cfg.device_gib is not None
    print(render(planned, Machine(known_gpu(cfg.gpu), cfg.ranks_per_node) if is_gpu else None))
    return planned.fits


if __name__ == "__main__":
    fits = main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
    sys.exit(0 if fits else 1)
