"""LoRA on one device, where engine and trainer share the frozen weights and where each has a copy.

python scripts/bench/lora.py --shape qwen3-8b
python scripts/bench/lora.py --shape qwen3-32b --copies one --turns

For each: bytes of the weights, the most bytes in use on the device by phase, milliseconds of a
sync, and seconds of a rollout, of handing over the device and of an update on its samples. Each is
a process of its own, and prints a line of JSON. With two copies and without --turns both must fit.
"""

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Literal

import tyro
from step import DeviceMemory
from timing import run_times

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import split
from roll_lite.engine.request import Request
from roll_lite.models.config import LoraOptions, shape_config
from roll_lite.roles import Roles
from roll_lite.sync import WeightSync
from roll_lite.train.batch import pack
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.trainer import Trainer
from roll_lite.types import SamplingParams

SYNCS = 20  # whose median counts


@dataclass(kw_only=True)
class Config:
    shape: str = "qwen3-8b"
    """Random weights of this shape, as qwen3-8b, qwen3-32b or qwen3-30b-a3b."""
    copies: Literal["one", "two", "both"] = "both"
    """Copies of the frozen weights."""
    turns: bool = False
    """Engines sleep and trainers are offloaded, as with --engines-sleep --offload of a recipe."""
    samples: int = 256
    """Replies of a rollout, each to a prompt of its own."""
    prompt_tokens: int = 128
    """Length of every prompt."""
    reply_tokens: int = 512
    """Length of every reply; tokens of a rollout are samples times this."""
    kv_cache_gib: float = 30.0
    """KV cache of the engine."""
    steps: int = 4
    """Rollouts and updates; medians leave out the first."""
    device: str = "auto"
    """auto, cpu or cuda."""


class Measured(WeightSync):
    def weight_bytes(self) -> int:
        """Of the memory that parameters of trainer and engine lie in."""
        both = [*self.trainer.model.parameters(), *self.engine.model.parameters()]
        held = [getattr(p, "_local_tensor", p).untyped_storage() for p in both]
        return sum({storage._cdata: storage.nbytes() for storage in held}.values())

    def rollout(self, requests: list[Request]) -> list[list[int]]:
        return [turn.token_ids for (turn,) in self.engine.generate(requests)]


def measure(cfg: Config) -> dict[str, object]:
    draw = random.Random(0)
    vocabulary = range(shape_config(cfg.shape).vocab_size)
    params = SamplingParams(max_tokens=cfg.reply_tokens)
    mask = [False] * cfg.prompt_tokens + [True] * cfg.reply_tokens
    folder, samples, parts = f"shape:{cfg.shape}", range(cfg.samples), []
    found = {"shape": cfg.shape, "copies": cfg.copies, "turns": cfg.turns}
    with Cluster("train=0 generate=0", cfg.device) as cluster:
        memory = DeviceMemory(cluster.device)
        roles = Roles(cluster, engines_sleep=cfg.turns, offload=cfg.turns)
        roles._has_one_copy = lambda: cfg.copies == "one"
        roles.policy = roles.add(
            "train", Trainer, folder=folder, loss=sft_loss, checkpointing="full",
            schedule=Schedule(lr=1e-5), lora=LoraOptions(rank=16),
        )  # fmt: skip
        roles.engines = roles.add_engines(folder=folder, kv_cache_gib=cfg.kv_cache_gib)
        sync = cluster.role("sync", Measured)
        found["weights_gib"] = sync.weight_bytes() / 2**30  # without what is offloaded
        with memory.watched(roles):
            for version in range(1, cfg.steps + 1):
                prompts = [draw.choices(vocabulary, k=cfg.prompt_tokens) for _ in samples]
                begin = time.perf_counter()
                replies = sync.rollout([Request(prompt_ids=p, params=params) for p in prompts])
                seconds = {"rollout": time.perf_counter() - begin}
                tokens = [p + reply for p, reply in zip(prompts, replies, strict=True)]
                sequences = [TrainingSequence(token_ids=ids, loss_mask=mask) for ids in tokens]
                batch = pack(sequences, 16384)
                roles.to_training()
                seconds["train"] = roles.policy.step(split(batch))[0]["time/train"]
                roles.sync(version, SimpleNamespace(set_version=int))
                parts.append(seconds | roles.seconds)
        times = run_times(lambda: sync.sync(version), SYNCS)
    found["sync_ms"] = 1000 * median(times[1:])
    found["seconds"] = {name: median(part[name] for part in parts[1:]) for name in parts[0]}
    return found | {"peaks_gib": {phase: peak / 2**30 for phase, peak in memory.peaks.items()}}


def main(cfg: Config) -> None:
    if cfg.copies != "both":
        print(json.dumps(measure(cfg)))
    for copies in ("one", "two") if cfg.copies == "both" else ():
        subprocess.run([sys.executable, *sys.argv, "--copies", copies], check=True)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
