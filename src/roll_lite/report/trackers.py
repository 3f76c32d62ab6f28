"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, trackers of your own."""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from roll_lite.checks import UserError, check_choice
from roll_lite.own_code import find_own_code
from roll_lite.types import Group

MAX_SAMPLES = 32
"""Samples of a step that trackers get, at equal distances."""
SampleRow = dict[str, Any]


class TrackedRun(NamedTuple):
    """What a tracker knows of the run when it is opened."""

    id: str
    """The same whenever the run is resumed, and that of no other run."""
    folder: Path
    options: dict[str, Any]
    resumed_at: int | None
    """The step from which the run goes on; None if it is new."""


class Tracker(Protocol):
    """Gets the metrics of every step once: steps that a resumed run repeats are left out, unless
    it has an attribute `rewinds` that is true and drops those that it had itself. One that has a
    method `log_samples(step, name, rows)` gets samples too, before the metrics of their step: by
    the name samples or eval_samples, with the fields of `sample_rows`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


OpenTracker = Callable[[TrackedRun], Tracker]
"""A class of trackers, or a function."""


class TensorBoard:
    """Files in the run's folder."""

    rewinds = True

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if run.resumed_at is None else run.resumed_at + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, with a table of samples. Its project is WANDB_PROJECT, or
    roll_lite; WANDB_MODE=offline needs no network."""

    def __init__(self, run: TrackedRun):
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "roll_lite"), id=run.id, name=run.folder.name,
            dir=str(run.folder), resume="allow", config=run.options,
        )  # fmt: skip

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, name: str, rows: Sequence[SampleRow]) -> None:
        columns = list(rows[0])
        data = [list(row.values()) for row in rows]
        self._run.log({name: self._table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, OpenTracker] = {"tensorboard": TensorBoard, "wandb": Wandb}
EXTRAS = {"tensorboard": "report", "wandb": "trackers"}


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """Where metrics go besides metrics.jsonl."""

    tracker: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Send metrics and a table of samples to Weights & Biases (wandb), or insist on TensorBoard
    files, which are written wherever that package is installed."""

    def __post_init__(self):
        for name in self.tracker:
            check_choice("tracker", name, tuple(TRACKERS))
            if not is_installed(name):
                raise UserError(
                    f"tracker={name} needs the package {name}: pip install {name}, or "
                    f'pip install ".[{EXTRAS[name]}]" in a clone'
                )

    @property
    def openers(self) -> list[OpenTracker]:
        """The named trackers, without TensorBoard, which is opened wherever it is installed."""
        return [TRACKERS[name] for name in dict.fromkeys(self.tracker) if name != "tensorboard"]


def is_installed(package: str) -> bool:
    """A folder of that name, such as wandb makes for its files, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def sample_rows(groups: Sequence[Group]) -> list[SampleRow]:
    """Some samples of a step, as text."""
    samples = [sample for group in groups for sample in group.samples]
    every = -(-len(samples) // MAX_SAMPLES) or 1
    return [
        {
            "prompt_id": sample.prompt.id,
            "index": sample.index,
            "prompt": str(sample.prompt.messages[-1]["content"]) if sample.prompt.messages else "",
            "reply": sample.reply,
            "reward": float(sample.score.value) if sample.score else None,
            "reason": str(sample.score.reason) if sample.score else "",
            "end": sample.end,
            "tokens": sample.num_sampled,
            "error": sample.error or "",
        }
        for sample in samples[::every]
    ]


class Trackers:
    """All trackers of a run. One that raises does not end the run: it is named once."""

    def __init__(self, openers: Sequence[OpenTracker], run: TrackedRun, last_step: int):
        """`last_step` is the last that was logged before the run was resumed; -1 if it is new."""
        self._failed: set[str] = set()
        self._trackers: dict[str, Tracker] = {}
        self._last_step = last_step
        self._resumed_at = run.resumed_at or -1
        tensorboard = [TensorBoard] if is_installed("tensorboard") else []
        for number, open_tracker in enumerate([*tensorboard, *openers]):
            name = f"{number}: {_name(open_tracker)}"
            if tracker := self._try(name, partial(open_tracker, run)):
                self._trackers[name] = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in self._trackers.items():
            if self._is_due(tracker, step):
                self._try(name, partial(tracker.log, step, metrics))

    def log_samples(self, step: int, name: str, groups: Sequence[Group]) -> None:
        """For those that have a `log_samples`."""
        due = {
            number: tracker.log_samples
            for number, tracker in self._trackers.items()
            if hasattr(tracker, "log_samples") and self._is_due(tracker, step)
        }
        rows = sample_rows(groups) if due else []
        for number, log_samples in due.items():
            self._try(number, partial(log_samples, step, name, rows))

    def _is_due(self, tracker: Tracker, step: int) -> bool:
        is_repeated = self._resumed_at < step <= self._last_step
        return not is_repeated or getattr(tracker, "rewinds", False)

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            self._try(name, tracker.close)

    def _try(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # any kind: trackers are user code, and use the network
            if name not in self._failed:
                self._failed.add(name)
                own = find_own_code(error)
                print(
                    f"warning: the tracker {name.partition(': ')[2]} raised {error!r}; the run "
                    "goes on, and further errors of it are not shown",
                    *(own.frames[:1] if own else ()),
                    sep="\n", file=sys.stderr, flush=True,
                )  # fmt: skip
            return None


def _name(open_tracker: OpenTracker) -> str:
    while isinstance(open_tracker, partial):
        open_tracker = open_tracker.func
    return getattr(open_tracker, "__name__", type(open_tracker).__name__)
