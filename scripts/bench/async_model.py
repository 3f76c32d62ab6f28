"""Predicted step times of asynchronous and synchronous rollouts: two formulas and a simulation.

N samples of mean time m make a batch; g of four ranks generate, with K slots each; training takes t
on four ranks, and t * 4 / n on n of them.

Synchronous, four ranks generate, then four train: E[makespan] + t. The makespan is at least
max(N m / 4K, E[longest of N]) and at most N m / 4K + (1 - 1/4K) E[longest of N] (Graham).
Asynchronous, g ranks generate while 4 - g train: max(N m / gK, t * 4 / (4 - g)), if all slots are
always busy and no generated sample is dropped.
"""

import heapq
import itertools
import math
import random
from collections import Counter, deque
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Literal

Stale = Literal["keep", "drop"]
NUM_RANKS = 4
MAKESPANS = 1000  # simulated for their mean: it has no closed form


@dataclass(kw_only=True)
class Workload:
    prompts_per_step: int = 16
    """Prompts per collect."""
    samples_per_prompt: int = 8
    """Group size."""
    slots: int = 16
    """Samples that one engine generates at the same time."""
    mean_seconds: float = 0.1
    """Mean time of a sample."""
    sigma: float = 1.0
    """Sigma of the lognormal distribution of times."""

    @property
    def num_samples(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    def seconds(self, prompt: int, index: int) -> float:
        """Time of one sample; it depends on nothing else."""
        mu = math.log(self.mean_seconds) - self.sigma**2 / 2
        return random.Random(f"{prompt} {index}").lognormvariate(mu, self.sigma)


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of ranks that generate and that train: all do both in turn, or each does one."""

    num_generate: int
    num_train: int

    @property
    def is_shared(self) -> bool:
        return self.num_generate + self.num_train > NUM_RANKS

    def train_seconds(self, on_all_ranks: float) -> float:
        """Training time on this layout, with perfect data-parallel scaling."""
        return on_all_ranks * NUM_RANKS / self.num_train

    def __str__(self) -> str:
        return "synchronous" if self.is_shared else f"{self.num_generate}+{self.num_train}"


SYNCHRONOUS = Layout(NUM_RANKS, NUM_RANKS)
SPLITS = [Layout(n, NUM_RANKS - n) for n in range(1, NUM_RANKS)]


@dataclass(slots=True, kw_only=True)
class Pace:
    """Statistics of some steps, measured or simulated."""

    step_seconds: float
    idle_slots: float
    """Share of slots without a sample, over the time in which their ranks do not train."""
    gaps: dict[int, int]
    """Trained samples by staleness: versions between their first token and their use."""
    dropped: float
    """Share of samples that were dropped, finished or not."""
    trained_seconds: float
    """Mean time of the trained samples."""


def expected_longest(work: Workload) -> float:
    """Mean of a batch's longest sample: the integral of 1 - F(x)^N, with x = exp(mu + sigma u)."""
    mu, width = math.log(work.mean_seconds) - work.sigma**2 / 2, 1e-3
    total = math.exp(mu - 10 * work.sigma)  # below it, F is 0
    for i in range(int(20 / width)):
        u = -10 + (i + 0.5) * width
        x = math.exp(mu + work.sigma * u)
        total += (1 - NormalDist().cdf(u) ** work.num_samples) * x * work.sigma * width
    return total


def ideal_seconds(work: Workload, num_ranks: int) -> float:
    """Time of a batch if all slots of `num_ranks` ranks are always busy."""
    return work.num_samples * work.mean_seconds / (work.slots * num_ranks)


def makespan_bounds(work: Workload) -> tuple[float, float]:
    """Lower and upper bound of the mean time of a batch on the slots of all ranks."""
    ideal, longest = ideal_seconds(work, NUM_RANKS), expected_longest(work)
    return max(ideal, longest), ideal + (1 - 1 / (work.slots * NUM_RANKS)) * longest


def asynchronous_bound(work: Workload, layout: Layout, train_seconds: float) -> float:
    generating = ideal_seconds(work, layout.num_generate)
    return max(generating, layout.train_seconds(train_seconds))


class Simulation:
    """The coordinator's rules over one pool of slots; messages take no time."""

    def __init__(self, work: Workload, layout: Layout, max_staleness: int, stale: Stale = "keep"):
        self.work, self.layout, self.max_staleness = work, layout, max_staleness
        self.drops = stale == "drop"
        self.num_slots = work.slots * layout.num_generate
        self.now, self.busy_seconds, self.version = 0.0, 0.0, 0
        self.prompts = itertools.count()
        self.waiting: deque[tuple[int, int]] = deque()  # prompt, index
        self.running: list[tuple[float, int, float, int]] = []  # end, prompt, seconds, version
        self.ended: dict[int, list[tuple[float, int]]] = {}  # of incomplete prompts
        self.ready: dict[int, list[tuple[float, int]]] = {}  # seconds and versions of samples
        self.gaps: Counter[int] = Counter()
        self.trained: list[float] = []
        self.num_dropped = 0
        self.is_training = False
        """From the moment a batch is taken until its update is done."""

    def run(self, train_seconds: float, num_steps: int) -> Pace:
        start, busy = self.now, self.busy_seconds
        self.gaps, self.trained, self.num_dropped = Counter(), [], 0
        for _ in range(num_steps):
            self.collect()
            self.train(self.layout.train_seconds(train_seconds))
        elapsed = self.now - start
        training = num_steps * self.layout.train_seconds(train_seconds)
        slot_seconds = self.num_slots * (elapsed - training * self.layout.is_shared)
        return Pace(
            step_seconds=elapsed / num_steps,
            idle_slots=1 - (self.busy_seconds - busy) / slot_seconds,
            gaps=dict(self.gaps),
            dropped=self.num_dropped / (self.num_dropped + len(self.trained)),
            trained_seconds=fmean(self.trained),
        )

    def collect(self) -> None:
        num_groups = self.work.prompts_per_step
        while True:
            if self.drops:
                self.drop_stale()
            self.feed(num_groups)
            if len(self.ready) >= num_groups:
                break
            self.end_sample()
        for prompt in sorted(self.ready)[:num_groups]:
            for seconds, version in self.ready.pop(prompt):
                self.gaps[self.version - version] += 1
                self.trained.append(seconds)
        self.is_training = True
        self.feed(0)

    def train(self, seconds: float) -> None:
        end = self.now + seconds
        while self.running and self.running[0][0] <= end:
            self.end_sample()
        self.advance(end)
        self.version += 1
        self.is_training = False
        if self.drops:
            self.abort_stale()
        self.feed(0)

    def feed(self, num_asked: int) -> None:
        ahead = self.max_staleness * self.work.prompts_per_step  # besides the batch in training
        if self.max_staleness and not self.is_training:
            ahead += self.work.prompts_per_step
        while len(self.ended) + len(self.ready) < max(num_asked, ahead):
            prompt = next(self.prompts)
            self.ended[prompt] = []
            self.waiting.extend((prompt, index) for index in range(self.work.samples_per_prompt))
        while self.waiting and len(self.running) < self.num_slots:
            prompt, index = self.waiting.popleft()
            seconds = self.work.seconds(prompt, index)
            heapq.heappush(self.running, (self.now + seconds, prompt, seconds, self.version))

    def end_sample(self) -> None:
        self.advance(self.running[0][0])
        _, prompt, seconds, version = heapq.heappop(self.running)
        self.ended[prompt].append((seconds, version))
        if len(self.ended[prompt]) == self.work.samples_per_prompt:
            self.ready[prompt] = self.ended.pop(prompt)
        self.feed(0)

    def advance(self, now: float) -> None:
        self.busy_seconds += len(self.running) * (now - self.now)
        self.now = now

    def drop_stale(self) -> None:
        for prompt, samples in list(self.ready.items()):
            fresh = [s for s in samples if s[1] >= self.version - self.max_staleness]
            kept = fresh if len(fresh) > 1 else []  # a group of one has no baseline
            self.num_dropped += len(samples) - len(kept)
            self.ready[prompt] = kept
            if not kept:
                del self.ready[prompt]

    def abort_stale(self) -> None:
        """Drop incomplete groups that will have fewer than two fresh samples."""
        versions = {prompt: [s[1] for s in samples] for prompt, samples in self.ended.items()}
        for _, prompt, _, version in self.running:
            versions[prompt].append(version)
        num_samples, oldest = self.work.samples_per_prompt, self.version - self.max_staleness
        for prompt, begun in versions.items():
            if num_samples - sum(version < oldest for version in begun) < 2:
                self.num_dropped += num_samples
                del self.ended[prompt]
        self.waiting = deque(item for item in self.waiting if item[0] in self.ended)
        self.running = [item for item in self.running if item[1] in self.ended]
        heapq.heapify(self.running)


def simulate(
    work: Workload,
    layout: Layout,
    max_staleness: int,
    train_seconds: float,
    *,
    warm_up: int,
    steps: int,
    stale: Stale = "keep",
) -> Pace:
    """Simulate `steps` steps after a warm-up."""
    simulation = Simulation(work, layout, max_staleness, stale)
    simulation.run(train_seconds, warm_up)
    return simulation.run(train_seconds, steps)


def expected_step(
    work: Workload, layout: Layout, max_staleness: int, train_seconds: float
) -> float:
    """Seconds of a step by formula; only a synchronous makespan is simulated."""
    if max_staleness:
        return asynchronous_bound(work, layout, train_seconds)
    makespan = simulate(work, layout, 0, 0.0, warm_up=1, steps=MAKESPANS).step_seconds
    return makespan + layout.train_seconds(train_seconds)
