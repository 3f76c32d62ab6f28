"""How fast role calls are: latency, calls a second, and bandwidth of arguments and results.

torchrun --nproc-per-node 4 scripts/bench_cluster.py

Every number is a median; the last line is JSON.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import tyro

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle, split


@dataclass(kw_only=True)
class Config:
    calls: int = 500
    """Empty calls, one after the other."""
    in_flight: int = 200
    """Empty calls started before the first is waited for."""
    megabytes: tuple[int, ...] = (1, 4, 16, 64)
    """Sizes of tensors scattered and gathered, over all ranks together."""
    repeats: int = 7
    """Measurements of each size and of the calls in flight."""
    device: str = "cpu"
    """auto, cpu or cuda."""


class Echo:
    """Holds what it got, so that both directions can be timed alone."""

    def nothing(self) -> None:
        pass

    def put(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get(self) -> torch.Tensor:
        return self.tensor

    def count(self, samples: list[list[int]]) -> int:
        return sum(map(len, samples))


def seconds(action: Callable[[], object], repeats: int) -> float:
    """Median time of an action, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def calls_in_flight(echo: RoleHandle, count: int) -> None:
    for future in [echo.nothing.start() for _ in range(count)]:
        future.result()


def main(cfg: Config) -> dict[str, float]:
    with Cluster("bench=all", cfg.device) as cluster:
        echo = cluster.role("bench", Echo)
        results = {"ranks": cluster.world_size}
        results["latency_ms"] = 1e3 * seconds(echo.nothing, cfg.calls)
        pipelined = seconds(lambda: calls_in_flight(echo, cfg.in_flight), cfg.repeats)
        results["calls_per_second"] = cfg.in_flight / pipelined
        for size in cfg.megabytes:
            tensor = torch.zeros(size * 2**20, dtype=torch.uint8)
            put = seconds(lambda t=tensor: echo.put(split(t)), cfg.repeats)
            get = seconds(echo.get.options(collect="replicas"), cfg.repeats)
            results[f"scatter_{size}mb_gb_per_s"] = size * 2**20 / put / 1e9
            results[f"gather_{size}mb_gb_per_s"] = size * 2**20 / get / 1e9
        samples = [list(range(1000)) for _ in range(1024)]
        put = seconds(lambda: echo.count(split(samples)), cfg.repeats)
        results["token_lists_million_per_s"] = 1024 * 1000 / put / 1e6
    return {name: round(value, 3) for name, value in results.items()}


if __name__ == "__main__":
    results = main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
    for name, value in results.items():
        print(f"{name:32} {value:>10}")
    print(json.dumps(results))
