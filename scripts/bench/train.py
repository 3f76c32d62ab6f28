"""Training speed of a shape with random weights on packed random data.

    python scripts/bench/train.py --shape qwen3-0.6b --tokens 32768
    torchrun --nproc-per-node 8 scripts/bench/train.py --shape qwen3-8b --tp 2

Prints the phases of a step, the logprob pass, and peak memory with the planner's estimate. The last
line is JSON.
"""

import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import tyro
from timing import median_seconds, print_results

from roll_lite.checks import at_least
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.models.config import shape_config
from roll_lite.models.memory import train_memory
from roll_lite.train.batch import MicroBatch, pack
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.trainer import Trainer


@dataclass(kw_only=True)
class Config:
    shape: str = "smollm2-135m"
    """smollm2-135m, qwen3-0.6b, qwen3-1.7b, qwen3-8b, ...; qwen3-30b-a3b/8 is eight of its layers.
    What 4 layers take less is the time of 4 blocks, without the head."""
    tokens: int = 32768
    """Tokens of each data-parallel rank in one update."""
    tokens_per_microbatch: int = 32768
    """Tokens of one forward and backward pass."""
    length: int = 2048
    """Tokens of each sequence."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Which activations the backward pass recomputes."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Data type of the optimizer's moments."""
    tp: int = 1
    """Tensor-parallel ranks."""
    offload: bool = False
    """Also measure offloading the trainer's memory and reloading it."""
    repeats: int = 3
    """Timed updates after two warm-up updates; the median counts."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def __post_init__(self):
        shape_config(self.shape)
        at_least(1, self, "tokens", "tokens_per_microbatch", "length", "tp", "repeats")


class TimedTrainer(Trainer):
    """Reports the time of each part of a step."""

    def __init__(self, *, place, **options):
        super().__init__(place=place, **options)
        self.optimizer.step = partial(self._timed, "optimizer", self.optimizer.step)

    def step(self, batch):
        self.seconds = {}
        return super().step(batch) | {f"seconds/{k}": v for k, v in self.seconds.items()}

    def _forward(self, *args, **kwargs):
        return self._timed("forward", super()._forward, *args, **kwargs)

    def _accumulate(self, batch):
        totals = self._timed("backward", super()._accumulate, batch)
        self.seconds["backward"] -= self.seconds["forward"]
        return totals

    def _clip(self):
        return self._timed("clip", super()._clip)

    def _timed(self, name, function, *args, **kwargs):
        self._wait()
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        self._wait()
        seconds = vars(self).setdefault("seconds", {})
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin
        return result

    def _wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed_offload(self) -> dict[str, float]:
        self.seconds = {}
        for _ in range(2):  # the first round also pins the pages
            held = torch.cuda.memory_allocated()
            self._timed("offload", self.offload)
            freed = held - torch.cuda.memory_allocated()
            self._timed("reload", self.reload)
            result, self.seconds = self.seconds, {}
        return {"freed_gib": freed / 2**30, **{f"{k}_seconds": v for k, v in result.items()}}


def make_batch(cfg: Config, vocab_size: int, num_replicas: int) -> list[MicroBatch]:
    draw = random.Random(0)
    sequences = [
        TrainingSequence(
            token_ids=[draw.randrange(vocab_size) for _ in range(cfg.length + 1)],
            loss_mask=[True] * (cfg.length + 1),
        )
        for _ in range(num_replicas * max(1, cfg.tokens // cfg.length))
    ]
    return pack(sequences, cfg.tokens_per_microbatch, num_shards=num_replicas)


def throughput(cfg: Config, trainer: RoleHandle, batch: list[MicroBatch]) -> dict[str, float]:
    """Speed of updates and of the logprob pass, and peak memory."""
    updates = [trainer.step(split(batch))[0] for _ in range(cfg.repeats)]
    tokens = sum(len(micro.token_ids_T) for micro in batch)
    seconds = statistics.median(update["time/train"] for update in updates)
    scoring = median_seconds(lambda: trainer.logprobs(split(batch)), cfg.repeats)
    result = {
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds),
        "logprob_tokens_per_second": round(tokens / scoring),
    }
    if "train/mfu" in updates[0]:
        result["mfu"] = round(statistics.median(u["train/mfu"] for u in updates), 3)
    if "train/peak_gib" in updates[0]:
        result["peak_gib"] = round(max(u["train/peak_gib"] for u in updates), 1)
        result["planned_gib"] = round(planned_gib(cfg, len(trainer.role.ranks)), 1)
    return result


def planned_gib(cfg: Config, num_ranks: int) -> float:
    planned = train_memory(
        shape_config(cfg.shape), num_ranks, cfg.tp, cfg.tokens_per_microbatch, 2,
        checkpointing=cfg.checkpointing, moments=cfg.moments,
    )  # fmt: skip
    return planned.total / 2**30


def phase_times(trainer: RoleHandle, batch: list[MicroBatch]) -> dict[str, float]:
    """Milliseconds of the parts of the second step."""
    for _ in range(2):
        metrics = trainer.step(split(batch))[0]
    return {
        f"{name.removeprefix('seconds/')}_ms": round(1000 * value, 1)
        for name, value in metrics.items()
        if name.startswith("seconds/")
    }


def main(cfg: Config) -> None:
    with Cluster(f"train=all,tp={cfg.tp}", cfg.device) as cluster:
        num_replicas = cluster.device_map["train"].num_replicas
        batch = make_batch(cfg, shape_config(cfg.shape).vocab_size, num_replicas)
        result = {"shape": cfg.shape, "ranks": cluster.world_size, "tp": cfg.tp}
        result |= {"checkpointing": cfg.checkpointing, "moments": cfg.moments}
        options = {"loss": sft_loss, "schedule": Schedule(lr=1e-6), "moments": cfg.moments}
        options |= {"checkpointing": cfg.checkpointing, "folder": f"shape:{cfg.shape}"}
        begin = time.perf_counter()
        plain = cluster.role("train", Trainer, **options)
        for _ in range(2):
            plain.step(split(batch))
        result["startup_seconds"] = round(time.perf_counter() - begin, 1)
        result |= throughput(cfg, plain, batch)
        timed = cluster.role("train", TimedTrainer, **options)
        result |= phase_times(timed, batch)
        if cfg.offload:
            result |= {k: round(v, 2) for k, v in timed.timed_offload().items()}
        print_results(result)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
