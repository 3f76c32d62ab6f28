"""Speed of role calls: latency, calls per second, and bandwidth of arguments and results.

torchrun --nproc-per-node 4 scripts/bench/cluster.py

Every number is a median. The last line is JSON.
"""

from dataclasses import dataclass

import torch
import tyro
from timing import median_seconds, print_results

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle, split


@dataclass(kw_only=True)
class Config:
    calls: int = 500
    """Empty calls, one after another."""
    in_flight: int = 200
    """Empty calls that are started before the first result is awaited."""
    megabytes: tuple[int, ...] = (1, 4, 16, 64)
    """Total sizes of the tensors that are scattered and gathered."""
    repeats: int = 7
    """Runs per measurement."""
    device: str = "cpu"
    """auto, cpu or cuda."""


class Echo:
    """Keeps the tensor that it receives, so that each direction can be timed alone."""

    def nothing(self) -> None:
        pass

    def put(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get(self) -> torch.Tensor:
        return self.tensor

    def count(self, samples: list[list[int]]) -> int:
        return sum(map(len, samples))


def calls_in_flight(echo: RoleHandle, count: int) -> None:
    for future in [echo.nothing.start() for _ in range(count)]:
        future.result()


def main(cfg: Config) -> dict[str, float]:
    with Cluster("bench=all", cfg.device) as cluster:
        echo = cluster.role("bench", Echo)
        results = {"ranks": cluster.world_size}
        results["latency_ms"] = 1e3 * median_seconds(echo.nothing, cfg.calls)
        pipelined = median_seconds(lambda: calls_in_flight(echo, cfg.in_flight), cfg.repeats)
        results["calls_per_second"] = cfg.in_flight / pipelined
        for size in cfg.megabytes:
            tensor = torch.zeros(size * 2**20, dtype=torch.uint8)
            put = median_seconds(lambda t=tensor: echo.put(split(t)), cfg.repeats)
            get = median_seconds(echo.get.options(collect="replicas"), cfg.repeats)
            results[f"scatter_{size}mb_gb_per_s"] = size * 2**20 / put / 1e9
            results[f"gather_{size}mb_gb_per_s"] = size * 2**20 / get / 1e9
        samples = [list(range(1000)) for _ in range(1024)]
        put = median_seconds(lambda: echo.count(split(samples)), cfg.repeats)
        results["token_lists_million_per_s"] = 1024 * 1000 / put / 1e6
    return {name: round(value, 3) for name, value in results.items()}


if __name__ == "__main__":
    print_results(main(tyro.cli(Config, description=__doc__.split("\n\n")[0])))
