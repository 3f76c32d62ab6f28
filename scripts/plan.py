"""Plan a run without starting it: roles and bytes per rank, the work of a step, warnings.

    python scripts/plan.py --model qwen3-8b --world-size 8
    python scripts/plan.py --model qwen3-8b --world-size 16 --device-map "train=0-7 generate=8-15"
    python scripts/plan.py --model models/tiny --world-size 2 --device-gib None       # on a CPU

Needs no GPU, no torch and no download: only the name of a shape, or a folder's config.json.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from roll_lite.checks import above, at_least
from roll_lite.cluster.device_map import DeviceMap, auto_device_map, parse_device_map
from roll_lite.cluster.planner import BatchPlan, plan, render
from roll_lite.models.config import ModelConfig, read_config
from roll_lite.models.presets import SHAPES, shape_config


@dataclass(kw_only=True)
class Config:
    model: str = "qwen3-0.6b"
    """Hugging Face folder, or smollm2-135m, qwen3-0.6b, qwen2.5-7b, qwen3-8b or llama-3.1-70b."""
    world_size: int = 8
    """Number of processes, one per device."""
    ranks_per_node: int = 8
    """Devices per machine; auto never splits a tensor-parallel engine over two machines."""
    device_map: str = "auto"
    """auto, or roles with their ranks: "train=0-3,tp=2 generate=4-7 reference=0-3"."""
    reference: bool = True
    """With auto: whether the run has a reference model."""
    device_gib: float | None = 80.0
    """Memory of one device; None means CPU: fp32, no limit."""
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
    kv_cache_gib: float | None = None
    """KV cache per rank; None means what its samples need, or as much of that as fits."""

    def __post_init__(self):
        at_least(1, self, "world_size", "ranks_per_node", "max_tokens")
        if self.device_gib is not None:
            above(0, self, "device_gib")
        batch_plan(self)
        device_map(self, model_config(self.model))


def model_config(model: str) -> ModelConfig:
    if model in SHAPES:
        return shape_config(model)
    if not Path(model).is_dir():
        raise ValueError(f"model={model!r} is neither a folder nor one of {', '.join(SHAPES)}")
    return read_config(model)


def device_bytes(cfg: Config) -> int | None:
    return None if cfg.device_gib is None else int(cfg.device_gib * 2**30)


def device_map(cfg: Config, config: ModelConfig) -> tuple[DeviceMap, list[str]]:
    """The device map, and the reasons for it."""
    if cfg.device_map == "auto":
        roles = ["train", "generate", *(["reference"] if cfg.reference else [])]
        return auto_device_map(cfg.world_size, config, device_bytes(cfg), roles, cfg.ranks_per_node)
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
    )


def main(cfg: Config) -> None:
    config = model_config(cfg.model)
    chosen, reasons = device_map(cfg, config)
    for reason in reasons:
        print(f"device map: {reason}")
    print(render(plan(config, chosen, batch_plan(cfg), device_bytes(cfg))))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
