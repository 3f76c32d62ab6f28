"""Environment workers: what asynchronous episodes win, their rate, and the event loop's pauses.

python scripts/bench/envs.py

The model replies after a constant time. Steps take lognormal times (sigma 1), in which the
environment waits. With a barrier, no episode goes on before all have taken their turn. The bound is
(model + E[max of n steps]) / (model + E[step]). The last line is JSON.
"""

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import tyro
from timing import median_seconds

from roll_lite.envs.env import Conversation
from roll_lite.envs.play import EpisodeOptions, player
from roll_lite.types import Message, Prompt
from roll_lite.workers.pool import EnvWorkers

SIGMA = 1.0
RESET_SECONDS = 0.006
"""About that of a small Sokoban."""
BEAT_SECONDS = 0.005


@dataclass(kw_only=True)
class Config:
    workers: int = 2
    """Worker processes."""
    at_once: tuple[int, ...] = (16, 64)
    """Numbers of episodes that run at the same time."""
    rounds: int = 4
    """Episodes, as a multiple of those that run at the same time."""
    turns: int = 10
    """Turns of an episode."""
    step_ms: float = 100.0
    """Mean time of a step."""
    model_ms: tuple[float, ...] = (0.0, 100.0)
    """Times of a reply."""
    quick_episodes: int = 500
    """Episodes whose steps and replies take no time."""
    resets: int = 1024
    """Resets of 6 ms, all requested at once."""
    repeats: int = 3
    """Timed runs of the quick episodes after a warm-up run; the median counts."""


@dataclass
class Quick:
    """An environment that does nothing, for some turns."""

    turns: int

    def reset(self, seed: int) -> tuple[str, dict]:
        self.num_left = self.turns
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.num_left -= 1
        return f"{self.num_left} left", 0.0, self.num_left == 0, False, {}


@dataclass
class Slow(Quick):
    """Its steps wait for lognormal times."""

    mean_seconds: float

    def reset(self, seed: int) -> tuple[str, dict]:
        self.random = random.Random(seed)
        return super().reset(seed)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        mu = math.log(self.mean_seconds) - SIGMA**2 / 2
        await asyncio.sleep(self.random.lognormvariate(mu, SIGMA))
        return super().step(action)


class Busy(Quick):
    """Its reset needs the processor."""

    def reset(self, seed: int) -> tuple[str, dict]:
        end = time.thread_time() + RESET_SECONDS
        while time.thread_time() < end:
            pass
        return super().reset(seed)


class Model:
    """Replies after a constant time, and with a barrier only when all have asked."""

    finish_reason = "stop"

    def __init__(self, seconds: float = 0.0, barrier: asyncio.Barrier | None = None):
        self.seconds, self.barrier = seconds, barrier

    async def __call__(self, messages: list[Message], **options: object) -> Message:
        if self.barrier:
            await self.barrier.wait()
        await asyncio.sleep(self.seconds)
        return {"role": "assistant", "content": "on"}

    def result(self, reward: float = 0.0, **measurements: object) -> None:
        pass


def workers_for(num_workers: int, kind: type, *arguments: float) -> EnvWorkers:
    made = player(partial(kind, *arguments), "env", EpisodeOptions())
    return EnvWorkers({"env": made}, num_workers=num_workers, seconds=60.0)


Play = Callable[[Conversation, int], Awaitable[object]]


def play_with(workers: EnvWorkers) -> Play:
    def play(model: Conversation, seed: int) -> Awaitable[object]:
        task = Prompt(id=f"p{seed}", messages=(), domain="env", ground_truth="", seed=seed)
        return workers.play(model, task)

    return play


async def play_freely(play: Play, num_episodes: int, at_once: int, seconds: float) -> None:
    """A place that becomes free is taken by the next episode."""
    seeds = iter(range(num_episodes))

    async def take_place() -> None:
        for seed in seeds:
            await play(Model(seconds), seed)

    await asyncio.gather(*(take_place() for _ in range(at_once)))


async def play_in_step(play: Play, num_episodes: int, at_once: int, seconds: float) -> None:
    for first in range(0, num_episodes, at_once):
        model = Model(seconds, asyncio.Barrier(at_once))
        await asyncio.gather(*(play(model, seed) for seed in range(first, first + at_once)))


def expected_max(count: int, sigma: float = SIGMA) -> float:
    """E[max of `count` lognormal numbers] / E[one], by integrating 1 - F(x)^count."""
    normal, width = NormalDist(), 1e-3
    points = [-10 + width * i for i in range(int(20 / width))]  # x = exp(sigma z)
    rest = (sigma * math.exp(sigma * z) * (1 - normal.cdf(z) ** count) * width for z in points)
    return math.fsum(rest) / math.exp(sigma**2 / 2)


def compare(cfg: Config, at_once: int, model_ms: float) -> dict[str, float]:
    count, taken = at_once * cfg.rounds, {}
    with workers_for(cfg.workers, Slow, cfg.turns, cfg.step_ms / 1e3) as workers:
        for name, run in (("asynchronous", play_freely), ("barrier", play_in_step)):
            start = time.perf_counter()
            asyncio.run(run(play_with(workers), count, at_once, model_ms / 1e3))
            taken[name] = time.perf_counter() - start
    mean, slowest = cfg.step_ms, cfg.step_ms * expected_max(at_once)
    ideal = cfg.rounds * cfg.turns / 1e3
    return {
        "episodes at once": at_once,
        "model ms": model_ms,
        "asynchronous s": taken["asynchronous"],
        "ideal s": ideal * (model_ms + mean),
        "barrier s": taken["barrier"],
        "expected s": ideal * (model_ms + slowest),
        "speed-up": taken["barrier"] / taken["asynchronous"],
        "bound": (model_ms + slowest) / (model_ms + mean),
    }


def rates(cfg: Config) -> dict[str, float]:
    with workers_for(cfg.workers, Quick, cfg.turns) as workers:
        count, most = cfg.quick_episodes, max(cfg.at_once)
        taken = median_seconds(
            lambda: asyncio.run(play_freely(play_with(workers), count, most, 0.0)), cfg.repeats
        )
    return {"episodes/s": count / taken, "turns/s": count * cfg.turns / taken}


async def longest_pause(play: Play, num_resets: int) -> float:
    """How late the event loop was at most, in ms, while many environments were reset."""
    late = 0.0

    async def beat() -> None:
        nonlocal late
        while True:
            start = time.perf_counter()
            await asyncio.sleep(BEAT_SECONDS)
            late = max(late, time.perf_counter() - start - BEAT_SECONDS)

    heart = asyncio.ensure_future(beat())
    await asyncio.sleep(0)
    await play_freely(play, num_resets, num_resets, 0.0)
    await asyncio.sleep(BEAT_SECONDS)
    heart.cancel()
    return 1e3 * late


def pauses(cfg: Config) -> dict[str, float]:
    found = {}
    for name, num_workers in (("workers", cfg.workers), ("inline", 0)):
        with workers_for(num_workers, Busy, 1) as workers:
            pause = asyncio.run(longest_pause(play_with(workers), cfg.resets))
        found[f"longest pause, {name}, ms"] = pause
    return found


def main(cfg: Config) -> None:
    rows = []
    for at_once, model_ms in itertools.product(cfg.at_once, cfg.model_ms):
        rows.append(compare(cfg, at_once, model_ms))
        if len(rows) == 1:
            print(" | ".join(rows[0]))
        print(" | ".join(f"{v:{len(n)}.4g}" for n, v in rows[-1].items()), flush=True)
    others = rates(cfg) | pauses(cfg)
    for name, value in others.items():
        print(f"{name:>28}  {value:.1f}")
    print(json.dumps({"asynchrony": rows} | others))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
