"""The samples of a group: their states, their model calls as engine requests, how they end.

`RunningGroup` starts the samples of a prompt; `SampleRunner` has what all samples share, and counts
how they end. Everything here runs in the coordinator's event loop.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from roll_lite.chat import Chat
from roll_lite.engine.request import Request
from roll_lite.envs.env import Player
from roll_lite.envs.play import ONE_TURN, EpisodeOptions
from roll_lite.progress import ProgressBar
from roll_lite.rollout.engines import EngineClient, PendingRequest
from roll_lite.rollout.episode import Episode
from roll_lite.rollout.journal import Journal
from roll_lite.rollout.prompts import Visit
from roll_lite.types import LOST, Group, Prompt, Sample, SamplingParams, State, Turn


def derive_seed(*parts: int | str) -> int:
    """63 bits that depend on all parts and their order."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class StatesInFlight:
    """Which of the states that take time have samples; `listener` is told when that changes."""

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


class SampleRunner:
    """What all samples are run with, and counts of how they end."""

    def __init__(
        self,
        *,
        engines: EngineClient,
        chat: Chat,
        play: Player,
        seed: int,
        max_retries: int,
        deadline: float | None = None,
        max_length: int | None = None,
        episodes: EpisodeOptions = ONE_TURN,
    ):
        self.engines, self.chat, self.play, self.seed = engines, chat, play, seed
        self.max_retries, self.deadline = max_retries, deadline
        self.max_length, self.episodes = max_length, episodes
        self.version = engines.version
        self.counts: Counter[str] = Counter()
        """Samples by how they ended, and retries."""
        self.dropped: list[tuple[Sample, str]] = []
        """Samples that are in no group, or failed, each with the reason."""
        self.bar = ProgressBar(0, "", enabled=False)
        """Counts samples that end, for the caller that waits for them."""
        self.in_flight = StatesInFlight()
        self.journal: Journal | None = None

    def encode_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Encode prompts together, which is faster; tasks without messages write their own."""
        if len(prompts) > 1:
            self.chat.encode_ahead(prompt.messages for prompt in prompts if prompt.messages)

    def make_samples(self, visit: Visit, indices: Sequence[int]) -> list[Sample]:
        """Those that ended before a crash are done; the others are queued."""
        self.counts["started"] += len(indices)
        return [self._restored(visit, i) or self._queued(visit, i) for i in indices]

    def _restored(self, visit: Visit, index: int) -> Sample | None:
        sample = self.journal.restored(visit, index) if self.journal else None
        if sample:
            self.counts["restored"] += 1
            self.bar.advance(1, sample.num_sampled)
        return sample

    def _queued(self, visit: Visit, index: int) -> Sample:
        sample = Sample(prompt=visit.prompt, index=index)
        self.enter(sample, "queued")
        return sample

    def enter(self, sample: Sample, state: State) -> None:
        """What is lost stays lost: an environment may ignore that it was cancelled."""
        before = sample.state if sample.events else None
        if before not in LOST:
            self.in_flight.move(before, state)
            sample.enter(state, self.version.current)

    def retry(self, sample: Sample) -> None:
        self.enter(sample, "retried")
        self.counts["retried"] += 1

    def end(self, sample: Sample, visit: Visit) -> None:
        """The sample is scored."""
        self.enter(sample, "done")
        self.bar.advance(1, sample.num_sampled)
        if self.journal:
            self.journal.write(visit, sample)

    def fail(self, sample: Sample, error: str) -> None:
        sample.error = error
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
        """Those since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def _drop(self, sample: Sample, state: State, count: str, reason: str) -> None:
        if sample.state not in LOST:
            self.enter(sample, state)
            self.counts[count] += 1
            self.dropped.append((sample, reason))


class RunningGroup:
    """The samples of one visit to a prompt, and their model calls as engine requests.

    All samples open alike, so one request reads the opening and forks it. A later turn prefers the
    replica of the one before, which has the conversation in its cache. With `num_extra` more
    samples than are wanted, those that are still running when enough are done are aborted.
    """

    task: asyncio.Task
    """Set by the caller that runs the group as a task."""
    number: int | None = None
    """Set by the caller that knows groups by number."""

    def __init__(
        self,
        runner: SampleRunner,
        visit: Visit,
        num_samples: int,
        params: SamplingParams,
        num_extra: int = 0,
        only: int | None = None,
    ):
        """`only` is the index of a single sample of the group to run."""
        self.visit, self._num_wanted = visit, num_samples if only is None else 1
        self._num_samples = num_samples + num_extra
        indices = range(self._num_samples) if only is None else (only,)
        self.samples = runner.make_samples(visit, indices)
        self._episodes: dict[int, asyncio.Task] = {}
        """By the index of the sample."""
        self.seed = derive_seed(runner.seed, visit.prompt.id, visit.number)
        for sample in self.samples:
            sample.visit, sample.seed = visit.number, self.seed
        self.params, self._runner = params, runner
        known = visit.prompt.seed
        self.prompt = replace(visit.prompt, seed=self.seed if known is None else known)
        """The prompt as its environment gets it, with the seed that all samples share."""
        self._wanted: tuple[int, ...] | None = None
        """The samples to generate; None is all of them."""
        self._first: PendingRequest | None = None
        self._last: dict[int, PendingRequest] = {}
        """The request of each sample's last turn, if it was not the first."""

    @property
    def domain(self) -> str:
        return self.visit.prompt.domain

    async def run(self) -> Group:
        """Run all samples to their end."""
        self.on_done()  # a journal may have had enough of them
        queued = [sample for sample in self.samples if sample.state == "queued"]
        self._wanted = tuple(s.index for s in queued) if len(queued) < self._num_samples else None
        for sample in queued:
            episode = Episode(self._runner, sample, self)
            self._episodes[sample.index] = asyncio.create_task(episode.run())
        await asyncio.gather(*self._episodes.values())
        return Group(prompt=self.visit.prompt, samples=self.samples)

    def on_done(self) -> None:
        """A sample is done. If it is the last that is wanted, abort those that are running."""
        if self._num_wanted == len(self.samples):
            return
        if sum(sample.state == "done" for sample in self.samples) < self._num_wanted:
            return
        for sample in self.samples:
            if sample.state not in ("done", *LOST):
                self._runner.discard([sample], "aborted", "one too many")
                if episode := self._episodes.get(sample.index):
                    episode.cancel()

    async def generate(
        self, episode: Episode, token_ids: list[int], params: SamplingParams
    ) -> Turn:
        """The next turn of a sample."""
        sample = episode.sample
        if sample.turns:
            pending, index = self._continue(sample, token_ids, params), 0
        else:
            pending, index = self._open(sample, token_ids, params), sample.index
        turn = await pending.join(index, episode)
        turn.replica = pending.replica
        return turn

    def _open(self, sample: Sample, token_ids: list[int], params: SamplingParams) -> PendingRequest:
        """The request of the first turn, which is one for all samples."""
        if self._first is None:
            self._first = self._submit(
                token_ids, params, self._num_samples, self.seed, wanted=self._wanted
            )
        elif (token_ids, params) != (self._first.request.prompt_ids, self._first.request.params):
            raise ValueError(
                f"sample {sample.index} of {sample.prompt.id} opens differently from its "
                "group; an environment must depend on nothing but the prompt and the seed"
            )
        return self._first

    def _continue(
        self, sample: Sample, token_ids: list[int], params: SamplingParams
    ) -> PendingRequest:
        """A request for a later turn."""
        seed = derive_seed(self.seed, sample.index, len(sample.turns))
        last = self._last.get(sample.index, self._first)
        self._last[sample.index] = pending = self._submit(token_ids, params, 1, seed, last)
        return pending

    def first_version(self, sample: Sample) -> int | None:
        """Policy version of a sample's first token; None if no engine has reported one."""
        if sample.first_version is None and self._first is not None:
            return self._first.first_versions.get(sample.index)
        return sample.first_version

    def _submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        num_samples: int,
        seed: int,
        last: PendingRequest | None = None,
        wanted: tuple[int, ...] | None = None,
    ) -> PendingRequest:
        request = Request(
            prompt_ids=token_ids, params=params, num_samples=num_samples, seed=seed, wanted=wanted
        )
        pending = self._runner.engines.submit(request, same_replica_as=last)
        pending.group_number = self.number
        return pending
