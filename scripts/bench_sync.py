"""Time of a weight sync from the trainer to the engines; the last line is JSON.

python scripts/bench_sync.py --shape qwen3-0.6b
torchrun --nproc-per-node 4 scripts/bench_sync.py --device-map "train=0-1 generate=2-3"
"""

import json
import statistics
from dataclasses import dataclass
from itertools import count

import tyro
from timing import run_times

from roll_lite.cluster.cluster import Cluster
from roll_lite.engine.service import EngineService
from roll_lite.models.presets import shape_config
from roll_lite.sync import WeightSync
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.trainer import Trainer


@dataclass(kw_only=True)
class Config:
    shape: str = "qwen3-0.6b"
    """Random weights of this shape."""
    device_map: str = "train=all generate=all"
    """Ranks of the trainer and of the engines."""
    kv_cache_gib: float = 1.0
    """KV cache of each engine."""
    repeats: int = 5
    """Timed syncs after a warm-up sync; the median counts."""
    device: str = "auto"
    """auto, cpu or cuda."""


def main(cfg: Config) -> None:
    config = shape_config(cfg.shape)
    with Cluster(cfg.device_map, cfg.device, config=config) as cluster:
        folder = f"shape:{cfg.shape}"
        options = {"loss": sft_loss, "schedule": Schedule(lr=0.0)}
        trainer = cluster.role("train", Trainer, folder=folder, **options)
        cluster.role("generate", EngineService, folder=folder, kv_cache_gib=cfg.kv_cache_gib)
        sync = cluster.role("sync", WeightSync)
        versions = count(1)
        seconds = run_times(lambda: sync.sync(next(versions)), cfg.repeats)
        num_parameters = sum(tensor.numel() for tensor in trainer.state().values())
        result = {
            "shape": cfg.shape,
            "device_map": cfg.device_map,
            "ranks": cluster.world_size,
            "parameters": num_parameters,
            "seconds": round(statistics.median(seconds[1:]), 4),
            "first_seconds": round(seconds[0], 4),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
