"""Time of a weight sync from the trainer to the engines, beside what its bytes would take alone.

python scripts/bench/sync.py --shape qwen3-0.6b
torchrun --nproc-per-node 4 scripts/bench/sync.py --device-map "train=0-1 generate=2-3"

The lower bound is that of the slowest rank: masters read and the engine's weights written at the
rate of a copy on the device, and bytes from other ranks at the rates of the collectives that bring
them, measured with messages of a bucket's size. Checksums are not part of it. The last line is
JSON.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
import tyro
from timing import median_seconds, run_times

from roll_lite.cluster.cluster import Cluster
from roll_lite.engine.service import EngineService
from roll_lite.models.config import shape_config
from roll_lite.models.cost import count_parameters
from roll_lite.models.fsdp import BUCKET_PARAMETERS, num_shards
from roll_lite.sync import Feed, WeightSync
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


class MeasuredSync(WeightSync):
    """Knows its bytes, and the rates at which they could travel."""

    def traffic(self) -> dict[str, float]:
        """Bytes of this rank and the seconds that they take alone."""
        trainer, engine = self.trainer, self.engine
        held = sum(p.to_local().nbytes for p in trainer.model.parameters()) if trainer else 0
        taken = sum(p.nbytes for p in engine.model.parameters()) if engine else 0
        found = {"copied_bytes": held + taken, "gathered_bytes": 0, "fed_bytes": 0}
        seconds = (held + taken) / self._copy_rate()
        length = BUCKET_PARAMETERS[self._device.type] // 4
        message = torch.empty(length, dtype=self.place.dtype, device=self._device)
        shards = trainer.place.shards if trainer else None
        if trainer and (size := num_shards(shards)) > 1:
            whole = self.place.dtype.itemsize * self._num_parameters() // trainer.place.tp
            found["gathered_bytes"] = whole * (size - 1) // size
            group = shards.get_group(shards.ndim - 1)
            parts = [torch.empty_like(message) for _ in range(size)]
            gather = self._seconds(lambda: dist.all_gather(parts, message, group=group))
            seconds += found["gathered_bytes"] / (size - 1) / message.nbytes * gather
        if self.feeds:
            found["fed_bytes"] = taken * (trainer is None)
            fed = sum(self._feeding(feed, message) for feed in self.feeds.values())
            seconds = max(seconds, fed)  # at the same time
        return found | {"lower_bound_seconds": seconds}

    def _feeding(self, feed: Feed, message: torch.Tensor) -> float:
        options = {"group_src": feed.source, "group": feed.place.group}
        fed = sum(shape.numel() for shape in feed.cut.shapes.values()) * message.itemsize
        return fed / message.nbytes * self._seconds(lambda: dist.broadcast(message, **options))

    def _num_parameters(self) -> int:
        """Parameters of the whole model."""
        config = self.trainer.config if self.trainer else self.engine.model.config
        return count_parameters(config).total

    def _copy_rate(self) -> float:
        """Bytes per second, read and written."""
        source = torch.empty(2**28 if self._device.type == "cuda" else 2**24, device=self._device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    @property
    def _device(self) -> torch.device:
        return self.place.device

    def _seconds(self, action: Callable[[], object]) -> float:
        def wait() -> None:
            action()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return median_seconds(wait, 5)


def main(cfg: Config) -> None:
    config = shape_config(cfg.shape)
    with Cluster(cfg.device_map, cfg.device, config=config) as cluster:
        folder = f"shape:{cfg.shape}"
        options = {"loss": sft_loss, "schedule": Schedule(lr=0.0)}
        trainer = cluster.role("train", Trainer, folder=folder, **options)
        cluster.role("generate", EngineService, folder=folder, kv_cache_gib=cfg.kv_cache_gib)
        sync = cluster.role("sync", MeasuredSync)
        versions = count(1)
        seconds = run_times(lambda: sync.sync(next(versions)), cfg.repeats)
        num_parameters = sum(tensor.numel() for tensor in trainer.state().values())
        traffic = sync.traffic.options(collect="all")()
        result = {
            "shape": cfg.shape,
            "device_map": cfg.device_map,
            "ranks": cluster.world_size,
            "parameters": num_parameters,
            "seconds": round(statistics.median(seconds[1:]), 4),
            "first_seconds": round(seconds[0], 4),
        }
        result |= {name: sum(t[name] for t in traffic) for name in traffic[0]}
        slowest = max(t["lower_bound_seconds"] for t in traffic)
        result["lower_bound_seconds"] = round(slowest, 5)
        result["times_lower_bound"] = round(result["seconds"] / slowest, 2)
        print(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
