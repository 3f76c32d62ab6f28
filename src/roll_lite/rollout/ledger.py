"""The ledger of samples: which state each is in, and how it ended.

It is kept in the coordinator's event loop. Training has one, and evaluation another.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from roll_lite.envs.play import EnvError
from roll_lite.progress import ProgressBar
from roll_lite.rollout.engines import PolicyVersion
from roll_lite.rollout.journal import Journal
from roll_lite.rollout.prompts import Visit
from roll_lite.rollout.recorded import RecordedSamples
from roll_lite.types import LOST, Sample, State
from roll_lite.workers.failures import RewardError


class StatesInFlight:
    """Which of the states that take time have samples; `listener` is called when that changes."""

    WATCHED = ("generating", "stepping", "scoring")

    def __init__(self):
        self._counts = dict.fromkeys(self.WATCHED, 0)
        self.listener: Callable[[list[str]], None] = lambda states: None

    def move(self, before: State | None, now: State) -> None:
        """A sample has changed its state."""
        has_changed = False
        if before in self._counts:
            self._counts[before] -= 1
            has_changed = self._counts[before] == 0
        if now in self._counts:
            self._counts[now] += 1
            has_changed |= self._counts[now] == 1
        if has_changed:
            self.listener([state for state, count in self._counts.items() if count])


class Ledger:
    """The events of samples, counts of how they end, and those that were dropped."""

    def __init__(self, version: PolicyVersion, in_flight: StatesInFlight | None = None):
        self.version = version
        self.in_flight = in_flight or StatesInFlight()
        self.counts: Counter[str] = Counter()
        """Samples by how they ended, and retries."""
        self.num_tokens = 0
        """Sampled tokens of samples that ended."""
        self.last_error = ""
        """Why a sample failed."""
        self.has_raised = False
        """It was a reward or an environment that raised."""
        self.dropped: list[tuple[Sample, str]] = []
        """Samples that are in no group, or failed, each with the reason."""
        self.bar = ProgressBar(0, "", enabled=False)
        """Counts samples that end, for the caller that waits for them."""
        self.journal: Journal | None = None
        self.recorded: RecordedSamples | None = None

    def open_samples(self, visit: Visit, seed: int, indices: Sequence[int]) -> list[Sample]:
        """The samples of a group. Those that ended before a crash are done, others are queued."""
        self.counts["started"] += len(indices)
        return [self._restored(visit, i) or self._queued(visit, seed, i) for i in indices]

    def _restored(self, visit: Visit, index: int) -> Sample | None:
        version = self.version.current
        sample = self.recorded.restored(visit, index, version) if self.recorded else None
        if sample is None and self.journal:
            sample = self.journal.restored(visit, index)
        if sample:
            self.counts["restored"] += 1
            self.num_tokens += sample.num_sampled
            self.bar.advance(1, sample.num_sampled)
        return sample

    def _queued(self, visit: Visit, seed: int, index: int) -> Sample:
        sample = Sample(prompt=visit.prompt, index=index, visit=visit.number, seed=seed)
        self.enter(sample, "queued")
        return sample

    def enter(self, sample: Sample, state: State) -> None:
        """A lost sample stays lost: an environment may ignore that it was cancelled."""
        before = sample.state if sample.events else None
        if before not in LOST:
            self.in_flight.move(before, state)
            sample.enter(state, self.version.current)

    def retry(self, sample: Sample) -> None:
        self.enter(sample, "retried")
        self.counts["retried"] += 1

    def end(self, sample: Sample) -> None:
        """The sample is scored."""
        self.enter(sample, "done")
        self.num_tokens += sample.num_sampled
        self.bar.advance(1, sample.num_sampled)
        if self.journal:
            self.journal.write(sample)

    def fail(self, sample: Sample, error: Exception) -> None:
        sample.error = self.last_error = "".join(traceback.format_exception(error))
        self.has_raised = isinstance(error, RewardError | EnvError)
        self.bar.advance(1, sample.num_sampled)
        self._drop(sample, "failed", "failed", "failed")

    def abort(self, samples: Iterable[Sample]) -> None:
        """Drop the samples that have not ended."""
        for sample in samples:
            if sample.state != "done":
                self._drop(sample, "aborted", "aborted", "aborted")

    def discard(self, samples: Iterable[Sample], count: str, reason: str = "") -> None:
        """Drop the samples that are done or still running; they count as `count`."""
        for sample in samples:
            self._drop(sample, "filtered", count, reason or count)

    def take_dropped(self) -> list[tuple[Sample, str]]:
        """Samples that were dropped since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def _drop(self, sample: Sample, state: State, count: str, reason: str) -> None:
        if sample.state not in LOST:
            self.num_tokens += sample.num_sampled if sample.state != "done" else 0
            self.enter(sample, state)
            self.counts[count] += 1
            self.dropped.append((sample, reason))
