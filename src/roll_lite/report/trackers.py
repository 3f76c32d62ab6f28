"""Where metrics go besides metrics.jsonl: TensorBoard, and trackers of your own."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from roll_lite.own_code import find_own_code


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
    it has an attribute `rewinds` that is true and drops those that it had itself."""

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


class Trackers:
    """All trackers of a run. One that raises does not end the run: it is named once."""

    def __init__(self, openers: Sequence[OpenTracker], run: TrackedRun, last_step: int):
        """`last_step` is the last that was logged before the run was resumed; -1 if it is new."""
        self._failed: set[str] = set()
        self._trackers: dict[str, Tracker] = {}
        self._last_step = last_step
        self._resumed_at = run.resumed_at or -1
        has_tensorboard = importlib.util.find_spec("tensorboard") is not None
        for number, open_tracker in enumerate([*([TensorBoard] * has_tensorboard), *openers]):
            name = f"{number}: {_name(open_tracker)}"
            if tracker := self._try(name, partial(open_tracker, run)):
                self._trackers[name] = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        is_repeated = self._resumed_at < step <= self._last_step
        for name, tracker in self._trackers.items():
            if not is_repeated or getattr(tracker, "rewinds", False):
                self._try(name, partial(tracker.log, step, metrics))

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
