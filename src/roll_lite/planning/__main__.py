"""Plan a run without starting it: bytes per rank, seconds of a step, what to change.

    roll-lite plan --model qwen3-8b --world-size 8
    roll-lite plan --model Qwen/Qwen3-8B --world-size 8
    roll-lite plan --model qwen3-8b --world-size 16 --device-map "train=0-7 generate=8-15"
    roll-lite plan --model qwen3-32b --lora-rank 16 --checkpointing full
    roll-lite plan --model models/tiny --device-gib None --max-tokens 64        # on a CPU
    roll-lite plan --run runs/rlvr       # what its steps took beside the plan of its samples

Needs no GPU and no torch: only the name of a shape, or a folder's config.json. Of a name on the
Hugging Face Hub, weights are not downloaded. Exits with 1 if the run would not fit.
"""

import sys
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import tyro

from roll_lite.checks import USER_ERROR, above, at_least, unread_with
from roll_lite.device_map import DeviceMap, auto_device_map, listing, parse_device_map
from roll_lite.hub import is_model_name, local_folder
from roll_lite.models.config import ModelConfig, planned_config
from roll_lite.planning.plan import Plan, PlanOptions, take_turns
from roll_lite.planning.render import (
    arguments_of,
    command_of,
    nearest_fit,
    options_between,
    render,
    seconds_table,
    turns_line,
)
from roll_lite.planning.speed import known_machine, run_seconds

DEFAULT = "qwen3-0.6b"


@dataclass(frozen=True, kw_only=True)
class Config:
    run: str | None = None
    """Run folder of recipes/rlvr.py on GPUs: the seconds that its steps took, beside those
    planned for the samples that it had. Only --model is read beside it."""
    model: str | None = None
    """Hugging Face folder, a name on the Hugging Face Hub, as Qwen/Qwen3-8B, or a shape:
    qwen3-0.6b, 1.7b, 4b, 8b, 14b, 32b, 30b-a3b or 235b-a22b; llama-3.2-1b or 3b, llama-3.1-8b, 70b
    or 405b; qwen2.5-0.5b, 1.5b or 7b; smollm2-135m. None means that of the run, or qwen3-0.6b."""
    world_size: int = 8
    """Number of processes, one per device."""
    ranks_per_node: int = 8
    """Devices per machine; auto never splits a tensor-parallel engine over two machines."""
    device_map: str = "auto"
    """auto, or roles with their ranks: "train=0-3,tp=2 generate=4-7 reference=0-3"."""
    reference: bool = False
    """With auto: whether the run has a reference model, as with --kl-coef above 0; with LoRA the
    policy is its own."""
    device_gib: float | None = 80.0
    """Memory of one device; None means CPU: fp32, no limit."""
    gpu: Literal["H100", "H200", "A100", "L40S", "B200"] = "H100"
    """Kind of device, for the seconds of a step; its memory is device_gib."""
    options: PlanOptions = PlanOptions()

    def check(self) -> None:
        """Not when it is made: tyro would call an error one of parsing."""
        if self.run is not None:
            for part, read in ((self, ("run", "model", "options")), (self.options, ())):
                unread_with("run", part, *(f.name for f in fields(part) if f.name not in read))
            return
        at_least(1, self, "world_size", "ranks_per_node")
        above(0, self, "device_gib")
        if self.options.max_staleness:
            unread_with("max_staleness above 0", self.options, "engines_sleep", "offload")
        choose_map(self, self.config)

    @cached_property
    def config(self) -> ModelConfig:
        return planned_config(local_folder(self.model or DEFAULT, with_weights=False))

    @property
    def device_bytes(self) -> int | None:
        return None if self.device_gib is None else int(self.device_gib * 2**30)


def choose_map(cfg: Config, config: ModelConfig) -> tuple[DeviceMap, list[str]]:
    """The device map, and the reasons for it."""
    options = cfg.options
    if cfg.device_map == "auto":
        has_reference = cfg.reference and not options.lora_rank  # which is its own
        roles = ["train", "generate", *(["reference"] if has_reference else [])]
        return auto_device_map(
            cfg.world_size, config, cfg.device_bytes, roles, cfg.ranks_per_node,
            must_fit=False, **options.train_options,
            **dict.fromkeys(("engines_sleep", "offload"), not options.max_staleness),  # if need be
        )  # fmt: skip
    chosen = parse_device_map(cfg.device_map, cfg.world_size)
    chosen.check(config)
    return chosen, ["as given"]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if the run would not fit."""
    cfg = tyro.cli(
        Config, args=arguments, prog="roll-lite plan", description=__doc__.split("\n\n")[0],
        config=(tyro.conf.OmitArgPrefixes,),
    )  # fmt: skip
    try:
        cfg.check()
        if cfg.run is not None:
            print(seconds_table(*run_seconds(cfg.run, cfg.model)))
            return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return _print_plan(cfg)


def _print_plan(cfg: Config) -> int:
    config = cfg.config
    device_map, reasons = choose_map(cfg, config)
    for reason in reasons:
        print(f"device map: {reason}")
    is_own_reference = cfg.reference and cfg.options.lora_rank > 0
    scores = cfg.options.policy_scores + is_own_reference
    options = replace(cfg.options, policy_scores=scores)
    plan = Plan(config, device_map, options, cfg.device_bytes)
    if cfg.device_map == "auto" and (in_turn := take_turns(plan)) is not plan:
        print(turns_line(plan, in_turn))
        plan = in_turn
    machine = None if cfg.device_gib is None else known_machine(cfg.gpu, cfg.ranks_per_node)
    print(render(plan, machine))
    fitting = plan if plan.fits else nearest_fit(plan, machine)
    if fitting is None:
        return 1
    if fitting is not plan:
        print(f"\nwith {listing(options_between(plan, fitting), 'and')} it fits:\n")
        print(render(fitting, machine))
    is_folder = cfg.model is not None and (Path(cfg.model).is_dir() or is_model_name(cfg.model))
    chooses_map = cfg.device_map == "auto" and fitting.device_map == device_map
    model = cfg.model if is_folder else "FOLDER"
    command = command_of(
        fitting, model, cfg.ranks_per_node, chooses_map=chooses_map, has_reference=cfg.reference
    )
    print(f"\n{command}")
    if arguments := arguments_of(fitting):
        print(f"with rl.TrainingOptions({arguments}) in a copy: roll-lite eject rlvr mine")
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(main())
