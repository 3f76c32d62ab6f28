"""Asynchronous and synchronous rollouts on the same four ranks, compared with a model.

torchrun --nproc-per-node 4 scripts/bench/staleness.py

The coordinator, its ranks and their messages are real; engines and trainer sleep. A sample occupies
one of an engine's slots for a lognormal time. Training on four ranks takes `train_ratio` times the
time of a batch with all slots of four ranks always busy or, with --train-time-of collect, times the
simulated mean time of a synchronous collect. New weights arrive as soon as they are trained, and
running samples continue under them. async_model.py has the formulas. The last line is JSON.
"""

import heapq
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import tyro
from async_model import (
    NUM_RANKS,
    SPLITS,
    SYNCHRONOUS,
    Layout,
    Pace,
    Stale,
    Workload,
    expected_step,
    ideal_seconds,
    makespan_bounds,
    simulate,
)

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.places import Place
from roll_lite.cluster.role import RoleHandle
from roll_lite.engine.request import EngineReport, Load, Request
from roll_lite.envs.play import question_player
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import Message, Prompt, SamplingParams, Turn

NAP_SECONDS = 0.002  # how often an engine polls its mailbox


@dataclass(kw_only=True)
class Config(Workload):
    steps: int = 20
    """Timed steps."""
    warm_up: int = 3
    """Steps before the timed ones, until generation ahead of training is in its steady state."""
    splits: tuple[int, ...] = (2, 3)
    """Number of generating ranks in the asynchronous runs; the other ranks train."""
    staleness: tuple[int, ...] = (0, 1, 2)
    """max_staleness of the asynchronous runs. With 0, generation and training take turns."""
    stale: Stale = "keep"
    """What becomes of samples that are staler: trained on (keep), or dropped (drop)."""
    train_ratio: float = 0.5
    """Training time on four ranks, as a share of the generation time."""
    train_time_of: Literal["ideal", "collect"] = "ideal"
    """Generation time of train_ratio: with all slots always busy, or of a synchronous collect."""
    long_run: int = 1000
    """Steps of the simulation that computes expected values."""


class SleepingEngine:
    """The interface of EngineService. The reply is one token: the sample's microseconds."""

    def __init__(self, work: Workload, *, place: Place):
        self._work, self._place = work, place
        self._version, self._reported_version = 0, 0
        self._waiting: deque[tuple[int, Request, int]] = deque()
        self._running: list[tuple[float, int, int, Turn]] = []  # end, key, index, answer
        self._busy_seconds, self._counted_until = 0.0, time.monotonic()

    def version(self) -> int:
        return self._version

    def load(self, version: int) -> None:
        self._version = version

    def busy_seconds(self) -> float:
        """Busy time of all slots together, so far."""
        self._count(time.monotonic())
        return self._busy_seconds

    def receive(self, name: str, key: int, request: Request | None = None) -> None:
        if name == "submit":
            self._waiting.extend((key, request, index) for index in request.indices)
            return
        self._count(time.monotonic())  # an abort, which needs no answer
        self._waiting = deque(item for item in self._waiting if item[0] != key)
        self._running = [item for item in self._running if item[1] != key]
        heapq.heapify(self._running)

    def work(self) -> bool:
        now = time.monotonic()
        self._count(now)
        turns = []
        while self._running and self._running[0][0] <= now:
            turns.append(heapq.heappop(self._running)[1:])
        is_new = self._version != self._reported_version
        begun = [(*sample[1:3], sample[3].versions[0][1]) for sample in self._running if is_new]
        while self._waiting and len(self._running) < self._work.slots:
            self._begin(now, *self._waiting.popleft())
        if turns or is_new:
            load = Load(len(self._running), len(self._waiting), 0)
            self._place.report("answers", EngineReport(turns, [], load, self._version, begun))
            self._reported_version = self._version
        if self._running:
            time.sleep(min(NAP_SECONDS, max(0.0, self._running[0][0] - time.monotonic())))
        return bool(self._running)

    def _begin(self, now: float, key: int, request: Request, index: int) -> None:
        seconds = self._work.seconds(request.prompt_ids[0], index)
        turn = Turn(
            prompt_ids=request.prompt_ids,
            token_ids=[round(1e6 * seconds)],
            logprobs=[0.0],
            finish_reason="stop",
            versions=[(0, self._version)],
        )
        heapq.heappush(self._running, (now + seconds, key, index, turn))

    def _count(self, now: float) -> None:
        self._busy_seconds += len(self._running) * (now - self._counted_until)
        self._counted_until = now


class SleepingTrainer:
    def step(self, seconds: float) -> None:
        time.sleep(seconds)


class NumberChat:
    """A conversation is its prompt's number."""

    def encode(self, messages: tuple[Message, ...]) -> list[int]:
        return [int(messages[0]["content"])]

    def encode_ahead(self, conversations: Iterable[Sequence[Message]]) -> None:
        pass

    def decode(self, token_ids: list[int]) -> str:
        return str(token_ids[0])


def numbered_prompts() -> Iterator[Prompt]:
    for number in itertools.count():
        messages = ({"role": "user", "content": str(number)},)
        yield Prompt(id=str(number), messages=messages, domain="bench", ground_truth="")


def make_coordinator(cfg: Config, engines: RoleHandle, max_staleness: int) -> Coordinator:
    return Coordinator(
        engines=engines,
        chat=NumberChat(),
        play=question_player({"bench": lambda prompt, reply: int(reply) / 1e6}),
        prompts=numbered_prompts(),
        params=SamplingParams(max_tokens=1),
        options=RolloutOptions(
            prompts_per_step=cfg.prompts_per_step,
            samples_per_prompt=cfg.samples_per_prompt,
            # One more group is submitted just before a slot becomes free.
            samples_per_replica=cfg.slots + cfg.samples_per_prompt,
            max_staleness=max_staleness,
            stale=cfg.stale if max_staleness else "keep",
        ),
        seed=0,
    )


class Measurement:
    """The recipe's loop; all but the warm-up steps count."""

    def __init__(self, cfg: Config, layout: Layout, engines: RoleHandle, trainer: RoleHandle):
        self.cfg, self.layout = cfg, layout
        self.engines, self.trainer = engines, trainer
        self.version = engines.version()
        self.gaps: Counter[int] = Counter()
        self.scores: list[float] = []

    def run(self, max_staleness: int, train_seconds: float) -> Pace:
        seconds = self.layout.train_seconds(train_seconds)
        with make_coordinator(self.cfg, self.engines, max_staleness) as rollout:
            if max_staleness:
                rollout.start()
            self.run_steps(rollout, seconds, self.cfg.warm_up)
            self.gaps.clear()
            self.scores.clear()
            rollout.metrics()
            busy, start = self.busy_seconds(), time.monotonic()
            self.run_steps(rollout, seconds, self.cfg.steps)
            elapsed, busy = time.monotonic() - start, self.busy_seconds() - busy
            metrics = rollout.metrics()
        num_dropped = metrics["rollout/stale"] + metrics["rollout/filtered"]
        training = self.cfg.steps * seconds * self.layout.is_shared
        num_slots = self.cfg.slots * self.layout.num_generate
        return Pace(
            step_seconds=elapsed / self.cfg.steps,
            idle_slots=1 - busy / (num_slots * (elapsed - training)),
            gaps=dict(self.gaps),
            dropped=num_dropped / (num_dropped + len(self.scores)),
            trained_seconds=sum(self.scores) / len(self.scores),
        )

    def run_steps(self, rollout: Coordinator, train_seconds: float, num_steps: int) -> None:
        for _ in range(num_steps):
            samples = [sample for group in rollout.collect() for sample in group.samples]
            self.gaps.update(self.version - sample.first_version for sample in samples)
            self.scores += [sample.score.value for sample in samples]
            self.trainer.step(train_seconds)
            self.version += 1
            self.engines.load(self.version)
            rollout.set_version(self.version)

    def busy_seconds(self) -> float:
        return sum(self.engines.busy_seconds.options(collect="replicas")())


@dataclass(slots=True, kw_only=True)
class Row:
    """One layout and max_staleness: the step as expected and as measured."""

    layout: str
    max_staleness: int
    formula: float
    expected: Pace
    """From the long simulation."""
    simulated: Pace
    """From a simulation of the measured samples."""
    measured: Pace

    @property
    def step_seconds(self) -> list[float]:
        paces = self.expected, self.simulated, self.measured
        return [self.formula, *(pace.step_seconds for pace in paces)]


def map_text(layouts: list[Layout]) -> str:
    """The roles of all layouts; only those of the layout being measured are busy."""
    last = NUM_RANKS - 1
    return " ".join(
        f"train{i}=0-{layout.num_train - 1} generate{i}={NUM_RANKS - layout.num_generate}-{last}"
        for i, layout in enumerate(layouts)
    )


def measure_all(
    cfg: Config, cluster: Cluster, layouts: list[Layout], train_seconds: float
) -> list[Row]:
    """The first row is the synchronous run."""
    rows: list[Row] = []
    for i, layout in enumerate(layouts):
        engines = cluster.role(f"generate{i}", SleepingEngine, work=cfg)
        trainer = cluster.role(f"train{i}", SleepingTrainer)
        for staleness in (0,) if layout.is_shared else cfg.staleness:
            job, stale = (layout, staleness, train_seconds), cfg.stale
            row = Row(
                layout=str(layout),
                max_staleness=staleness,
                formula=expected_step(cfg, *job),
                expected=simulate(cfg, *job, warm_up=cfg.warm_up, steps=cfg.long_run, stale=stale),
                simulated=simulate(cfg, *job, warm_up=cfg.warm_up, steps=cfg.steps, stale=stale),
                measured=Measurement(cfg, layout, engines, trainer).run(staleness, train_seconds),
            )
            rows.append(row)
            print_row(row, rows[0])
    return rows


def print_row(row: Row, base: Row) -> None:
    """`base` is the synchronous run."""
    pace, expected = row.measured, row.expected
    pairs = zip(row.step_seconds, base.step_seconds, strict=True)
    num_trained = sum(pace.gaps.values())
    gaps = " ".join(f"{gap}:{n / num_trained:.3f}" for gap, n in sorted(pace.gaps.items()))
    cells = [f"{seconds:6.3f} {of_base / seconds:5.2f}x" for seconds, of_base in pairs]
    print(
        f"{row.layout:11} {row.max_staleness:2}  {'  '.join(cells)}  idle {pace.idle_slots:.2f} "
        f"({expected.idle_slots:.2f})  dropped {pace.dropped:.3f} ({expected.dropped:.3f})  "
        f"mean {1e3 * pace.trained_seconds:.0f} ms ({1e3 * expected.trained_seconds:.0f})  {gaps}",
        flush=True,
    )


def main(cfg: Config) -> dict[str, Any]:
    layouts = [SYNCHRONOUS, *(layout for layout in SPLITS if layout.num_generate in cfg.splits)]
    with Cluster(map_text(layouts), "cpu") as cluster:
        makespan, ideal = expected_step(cfg, SYNCHRONOUS, 0, 0.0), ideal_seconds(cfg, NUM_RANKS)
        train_seconds = cfg.train_ratio * (ideal if cfg.train_time_of == "ideal" else makespan)
        low, high = makespan_bounds(cfg)
        bounds = {str(layout): expected_step(cfg, layout, 1, train_seconds) for layout in SPLITS}
        print(
            f"a batch: ideally {ideal:.3f} s, simulated {makespan:.3f}, by formula {low:.3f} to "
            f"{high:.3f}; training on four ranks {train_seconds:.3f}\n"
            f"asynchronous by formula: {', '.join(f'{k} {v:.3f} s' for k, v in bounds.items())}\n"
            "seconds per step and speed-up: by formula, by a long simulation (other figures in "
            "brackets), by a simulation of the measured samples, and measured"
        )
        rows = measure_all(cfg, cluster, layouts, train_seconds)
    results = {"ideal": ideal, "makespan": makespan, "train_seconds": train_seconds}
    return results | {"bounds": bounds, "rows": [asdict(row) for row in rows]}


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))))
