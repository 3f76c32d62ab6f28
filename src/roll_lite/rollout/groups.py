"""Groups of samples: started as room allows, filtered when they end, kept until a step takes them.

`Slots` say which domain comes next, and `Groups` fill them, in the coordinator's event loop.
"""

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from roll_lite.rollout.episode import EpisodeContext, RunningGroup
from roll_lite.rollout.event_loop import Signal
from roll_lite.rollout.prompts import PromptQueue, Visit
from roll_lite.rollout.record import read_group, write_group
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.stopping import Ended
from roll_lite.types import LOST, Group, Prompt, SamplingParams
from roll_lite.workers.failures import user_frames

Keep = Callable[[Group], bool]
"""Whether to train on a complete group; its samples are all done."""


class NothingLeft(Ended):
    """All groups of a step were dropped, each because too few of its samples were left."""

    def __init__(self, text: str, *, has_raised: bool):
        super().__init__(text)
        self.has_raised = has_raised
        """A reward or an environment raised when the last of them failed."""


class EmptyStep(NamedTuple):
    """A step without groups: all were dropped, as there was nothing to learn from them."""

    why: str
    """Numbers of groups and reasons, and what to change."""
    has_passed: bool
    """Whether every scored sample has passed."""


class Slots:
    """Which domains to train on, in the order in which prompts were drawn.

    Every prompt that is drawn adds a slot of its domain; the groups of that domain fill its oldest
    slots. When a group is dropped its slot stays, so neither filters nor slow samples change the
    domains' shares.

    There may be a hundred thousand slots. Nothing here walks over them while samples end: slots
    have numbers that grow, so those of a domain are a sorted list, searched by bisection.
    """

    def __init__(self, domains: Iterable[str] = (), given_up: Collection[int] = ()):
        """`given_up` are indices of slots whose groups were dropped and are not replaced."""
        self._slots: list[tuple[int, str]] = []
        """Number and domain of all slots, oldest first."""
        self._kept: defaultdict[str, list[int]] = defaultdict(list)
        """Numbers of the slots that were not given up, by domain."""
        self._given_up: list[tuple[int, str]] = []
        """Number and domain of the slots that were given up, oldest first."""
        self._groups: defaultdict[str, list[int]] = defaultdict(list)
        """Numbers of the groups that fill slots, by domain."""
        self._num_added = 0
        for index, domain in enumerate(domains):
            self.add(domain)
            if index in given_up:
                self._give_up(domain, -1)

    @property
    def domains(self) -> list[str]:
        """The domain of each slot, oldest first."""
        return [domain for _, domain in self._slots]

    @property
    def given_up(self) -> list[int]:
        """Indices of the slots that were given up."""
        return [self._index(slot) for slot, _ in self._given_up]

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, domain: str) -> None:
        """Append a vacant slot."""
        self._slots.append((self._num_added, domain))
        self._kept[domain].append(self._num_added)
        self._num_added += 1

    def fill(self, domain: str, group: int) -> None:
        """A group, whose number is larger than those of earlier ones, takes a vacant slot."""
        self._groups[domain].append(group)

    def vacate(self, domain: str, group: int) -> int:
        """A group is gone; another may take its slot. Returns its place among the groups."""
        place = bisect_left(self._groups[domain], group)
        del self._groups[domain][place]
        return place

    def give_up(self, domain: str, group: int) -> None:
        """A group is gone, and the slot that it filled stays empty."""
        self._give_up(domain, self.vacate(domain, group))

    def give_up_last(self, domain: str, group: int) -> None:
        """A group is gone, and the newest slot of its domain stays empty."""
        self.vacate(domain, group)
        self._give_up(domain, -1)

    def revive(self) -> None:
        """Slots that were given up may be filled again."""
        for slot, domain in self._given_up:
            insort(self._kept[domain], slot)
        self._given_up.clear()

    def close(self, index: int) -> None:
        """Remove a vacant slot that nothing can fill."""
        slot, domain = self._slots.pop(index)
        kept = self._kept[domain]
        del kept[bisect_left(kept, slot)]

    def first_vacant(self) -> tuple[int, str | None]:
        """Index and domain of the first vacant slot; the end and None if there is none."""
        vacant = [
            (kept[num_filled], domain)
            for domain, kept in self._kept.items()
            if (num_filled := len(self._groups[domain])) < len(kept)
        ]
        if not vacant:
            return len(self._slots), None
        slot, domain = min(vacant)
        return self._index(slot), domain

    def first_kept(self) -> int | None:
        """Index of the oldest slot that was not given up."""
        oldest = [kept[0] for kept in self._kept.values() if kept]
        return self._index(min(oldest)) if oldest else None

    def match(self, num_slots: int, ready: Mapping[str, Sequence[int]]) -> list[int] | None:
        """The oldest group of its domain for each of the oldest slots; None if one is missing.

        `ready` has the sorted numbers of complete groups by domain.
        """
        counts = {domain: self._num_among(num_slots, domain) for domain in self._kept}
        if any(len(ready.get(domain, ())) < count for domain, count in counts.items()):
            return None
        oldest = {domain: iter(ready.get(domain, ())) for domain in counts}
        given_up = set(self._given_up)
        wanted = [slot for slot in self._slots[:num_slots] if slot not in given_up]
        return [next(oldest[domain]) for _, domain in wanted]

    def release(self, num_slots: int, taken: Collection[int] = ()) -> int:
        """Remove the oldest slots, and the groups that `match` gave for them.

        Returns how many of the slots had been given up.
        """
        gone = set(taken)
        for domain, kept in self._kept.items():
            del kept[: self._num_among(num_slots, domain)]
            self._groups[domain] = [n for n in self._groups[domain] if n not in gone]
        released = self._slots[:num_slots]
        del self._slots[:num_slots]
        num_given_up = bisect_right(self._given_up, released[-1]) if released else 0
        del self._given_up[:num_given_up]
        return num_given_up

    def _give_up(self, domain: str, place: int) -> None:
        insort(self._given_up, (self._kept[domain].pop(place), domain))

    def _index(self, slot: int) -> int:
        return bisect_left(self._slots, (slot,))

    def _num_among(self, num_slots: int, domain: str) -> int:
        """Slots of a domain that were not given up, among the oldest `num_slots`."""
        if num_slots >= len(self._slots):
            return len(self._kept[domain])
        first_left, _ = self._slots[num_slots]
        return bisect_left(self._kept[domain], first_left)


class Groups:
    """Groups that are running, and complete groups that no step has taken yet."""

    def __init__(
        self,
        context: EpisodeContext,
        prompts: PromptQueue,
        options: RolloutOptions,
        params: SamplingParams,
        min_samples: int,
        signal: Signal,
        keep: Keep | None,
        nothing_to_learn: Keep | None,
    ):
        """A group with fewer than `min_samples` left is dropped."""
        self._context = context
        self._ledger = context.ledger
        self._version = context.ledger.version
        self._prompts = prompts
        self._options = options
        self._params = params
        self._min_samples = min_samples
        self._signal = signal
        self._keep = keep
        self._nothing_to_learn = nothing_to_learn
        self._num_started = 0
        self.running: dict[int, RunningGroup] = {}
        self.ready: dict[int, Group] = {}
        """Complete groups, by the order in which their prompts were drawn."""
        self.rewards: list[float] = []
        """Rewards of all samples scored since the last metrics, also in dropped groups."""
        self._ready_of: defaultdict[str, list[int]] = defaultdict(list)
        """Sorted numbers of the complete groups, by domain."""
        self._unchecked: list[int] = []
        """Complete groups that were not checked for stale samples since they ended."""
        self._checked_version = -1
        """The policy version at which all groups were last checked for stale samples."""
        self._slots = Slots()
        self.is_continuous = False
        """Whether groups are started while no `take` waits for them."""
        self._num_awaited = 0
        """Groups that a `take` waits for."""
        self._num_taken: Counter[int] = Counter()
        """Slots by policy version: those of the current one are in training, or given up."""
        self._num_refills = 0
        """Dropped groups that were replaced since the last `take`."""
        self._dropped: Counter[tuple[str, str]] = Counter()
        """Groups dropped since the last `take`, by domain and reason."""
        self._dropped_passes: list[bool] = []
        """Whether each scored sample passed, in groups that a filter dropped since."""
        self.empty_steps: list[EmptyStep] = []
        """The last steps, if they were empty: a step with groups clears it."""

    def start(self) -> None:
        """Keep groups running from now on, as many as max_staleness allows."""
        self.is_continuous = True
        self._feed()

    def stop(self) -> None:
        """Start no more groups, not even for one that ends at this moment."""
        self.is_continuous = False

    def abandon(self) -> None:
        """Drop samples that failed and were to be tried again, because the run ends."""
        for group in self.running.values():
            self._ledger.abort(sample for sample in group.samples if sample.error)

    @property
    def num_ready(self) -> int:
        """Samples of complete groups."""
        return sum(len(group.samples) for group in self.ready.values())

    async def take(self) -> list[Group]:
        """The oldest complete groups for the oldest slots: those of one step.

        Fewer when the prompts have ended, or when too many groups were dropped to replace them all.
        None at all makes an empty step, unless samples failed: that raises NothingLeft.
        """
        self._num_awaited = self._options.prompts_per_step
        try:
            num_slots, numbers = await self._wait_for_step()
        finally:
            self._num_awaited = 0
        taken = self._release(num_slots, numbers)
        if not self.is_continuous:
            await self._abort_surplus()
            self._slots.revive()  # the next step starts afresh
        self._feed()
        return taken

    def refresh(self, numbers: Collection[int | None] | None = None) -> None:
        """Drop what is too stale: after a new policy version, or after news about some groups."""
        self._drop_stale()
        self._abort_stale(self.running if numbers is None else numbers)
        self._feed()
        self._signal.notify()

    def state_dict(self) -> dict[str, Any]:
        return {
            "ready": [write_group(group) for _, group in sorted(self.ready.items())],
            "slots": self._slots.domains,
            "given_up": self._slots.given_up,
            "empty_steps": list(self.empty_steps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Complete groups of an earlier run, which come first, and the slots of all its groups."""
        self.ready = {number: read_group(record) for number, record in enumerate(state["ready"])}
        self._num_started = len(self.ready)
        self._slots = Slots(state["slots"], state["given_up"])
        self.empty_steps = [EmptyStep(*step) for step in state["empty_steps"]]
        for number, group in self.ready.items():
            self._slots.fill(group.prompt.domain, number)
            self._ready_of[group.prompt.domain].append(number)

    async def _wait_for_step(self) -> tuple[int, list[int]]:
        """How many slots to release, and the numbers of the groups that fill them."""
        while True:
            if self._signal.error:
                raise self._signal.error
            self._drop_stale()
            self._feed()
            num_slots = self._num_due()
            if (numbers := self._slots.match(num_slots, self._ready_of)) is not None:
                return num_slots, numbers
            await self._signal.wait()

    def _release(self, num_slots: int, numbers: list[int]) -> list[Group]:
        if self._prompts.choose:  # slots of several domains depend on which groups ended first
            numbers = sorted(numbers)
        taken = [self._pop_ready(number) for number in numbers]
        num_given_up = self._slots.release(num_slots, numbers)
        self._ledger.counts["missing"] += num_given_up
        self._ledger.counts["done"] += sum(len(group.samples) for group in taken)
        if taken:
            self.empty_steps.clear()
        elif num_given_up:
            has_passed = bool(self._dropped_passes) and all(self._dropped_passes)
            self.empty_steps.append(EmptyStep(self._why_empty(), has_passed))
        self._dropped.clear()
        self._dropped_passes.clear()
        self._num_refills = 0
        version = self._version.current
        num_used = self._num_taken[version] + len(taken) + num_given_up
        self._num_taken = Counter({version: num_used})
        self._prompts.history.step += 1
        self._prompts.history.update()
        return taken

    def _feed(self) -> None:
        """Start groups while there is room, and in any case those that a `take` waits for."""
        started: list[Prompt] = []
        while not self._signal.error:
            index, domain = self._slots.first_vacant()
            if index >= self._num_wanted():
                break
            visit = self._prompts.draw(domain)
            if visit is None and domain is None:
                break
            if domain is not None and (visit is None or visit.prompt.domain != domain):
                self._slots.close(index)
            if visit is not None:
                if visit.prompt.domain != domain:
                    self._slots.add(visit.prompt.domain)
                self._start(visit)
                started.append(visit.prompt)
        self._context.encode_ahead(started)

    def _num_wanted(self) -> int:
        if self.is_continuous:
            in_training = self._num_taken[self._version.current]
            return max(self._num_awaited, self._options.max_in_flight - in_training)
        return self._num_awaited + self._options.extra_groups if self._num_awaited else 0

    def _start(self, visit: Visit) -> None:
        number = self._num_started
        self._num_started += 1
        group = RunningGroup(
            self._context,
            visit,
            self._options.samples_per_prompt,
            self._params,
            num_extra=self._options.extra_samples,
            number=number,
        )
        group.task = asyncio.get_running_loop().create_task(group.run())
        self.running[number] = group
        self._slots.fill(group.domain, number)
        group.task.add_done_callback(lambda _: self._on_end(number))

    def _on_end(self, number: int) -> None:
        ended = self.running.pop(number, None)
        if ended is None:  # it was too stale
            return
        if ended.task.cancelled():
            self._slots.vacate(ended.domain, number)
            self._ledger.abort(ended.samples)
            self._ledger.discard(ended.samples, "aborted")
        elif error := ended.task.exception():
            self._ledger.abort(sample for sample in ended.samples if sample.error)
            self._signal.fail(error)
        else:
            self._keep_or_drop(number, ended.task.result())
            self._feed()
            self._signal.notify()

    def _keep_or_drop(self, number: int, group: Group) -> None:
        done = [sample for sample in group.samples if sample.state == "done"]
        self.rewards += [sample.score.value for sample in done]
        left = Group(prompt=group.prompt, samples=done)
        if self._prompts.choose:
            self._prompts.history.note(number, left)
        if reason := self._reason_to_drop(group, left):
            self._drop(number, group, reason)
            if len(done) >= self._min_samples:
                self._dropped_passes += map(self._prompts.history.passes, done)
        else:
            self.ready[number] = left
            insort(self._ready_of[group.prompt.domain], number)
            self._unchecked.append(number)

    def _pop_ready(self, number: int) -> Group:
        group = self.ready.pop(number)
        numbers = self._ready_of[group.prompt.domain]
        del numbers[bisect_left(numbers, number)]
        return group

    def _reason_to_drop(self, group: Group, left: Group) -> str | None:
        """Why not to train on a group, if there is a reason; `left` has only its done samples."""
        rewards = [sample.score.value for sample in left.samples]
        low = self._options.min_group_reward
        high = self._options.max_group_reward
        if len(rewards) < self._min_samples:
            is_late = any(sample.state == "aborted" for sample in group.samples)
            return f"had too few samples left{' at the deadline' if is_late else ''}"
        if self._options.drop_equal and self._nothing_to_learn(left):
            return "had equal rewards" if len(set(rewards)) == 1 else "had nothing to learn from"
        if low is not None and fmean(rewards) < low:
            return f"had a mean reward below {low}"
        if high is not None and fmean(rewards) > high:
            return f"had a mean reward above {high}"
        if self._keep is not None and not self._keep(left):
            return "was not kept by keep()"
        return None

    def _drop(self, number: int, group: Group, reason: str) -> None:
        """Leave the slot to another group, as long as the step has refills."""
        domain = group.prompt.domain
        if self._num_refills < self._options.max_refills * self._options.prompts_per_step:
            self._num_refills += 1
            self._ledger.bar.total += len(group.samples)
            self._ledger.counts["refilled"] += 1
            self._slots.vacate(domain, number)
        elif self.is_continuous:  # the step that the group was for gets one less
            self._slots.give_up(domain, number)
        else:  # a surplus group may take its place
            self._slots.give_up_last(domain, number)
        self._ledger.discard(group.samples, "filtered", f"its group {reason}")
        self._dropped[domain, reason] += 1

    def _num_due(self) -> int:
        """How many slots a step releases, including those that were given up.

        Groups of later slots wait for their own step, so a domain that is slow or often filtered
        keeps its share. Only if all slots of the step were given up does it take the next group.
        If none is left at all, every slot is released, and the step is empty.
        """
        first = self._slots.first_kept()
        if first is None and len(self._slots):
            if self._dropped and not self._dropped_passes:
                self._ledger.counts["missing"] += self._slots.release(len(self._slots))
                self._prompts.history.update()
                raise NothingLeft(self._why_empty(), has_raised=self._ledger.has_raised)
            return len(self._slots)
        return max(self._options.prompts_per_step, (first or 0) + 1)

    def _why_empty(self) -> str:
        has_domains = len({domain for domain, _ in self._dropped} | set(self._slots.domains)) > 1
        reasons = ", ".join(
            f"{count} {f'of {domain} ' if has_domains else ''}{reason}"
            for (domain, reason), count in self._dropped.most_common()
        )
        text = (
            f"all {self._dropped.total()} groups of one step were dropped: {reasons}; "
            f"max_refills={self._options.max_refills} allows "
            f"{self._options.max_refills * self._options.prompts_per_step}. "
        )
        if (error := self._ledger.last_error) and not self._dropped_passes:
            return f"{text}Samples failed. The last error:\n{user_frames(error).rstrip()}"
        return f"{text}Raise it, filter less, or choose prompts of another difficulty"

    @property
    def _oldest_version(self) -> int:
        """The oldest version of a first token that may be used, with stale="drop"."""
        return self._version.current - self._options.max_version_gap

    def _drop_stale(self) -> None:
        """Drop stale samples of complete groups, and groups with too few samples left."""
        if self._options.stale == "keep":
            return
        version = self._version.current
        numbers = self._unchecked if self._checked_version == version else list(self.ready)
        self._unchecked = []
        self._checked_version = version
        for number in numbers:
            if number in self.ready:
                self._drop_stale_samples(number)

    def _drop_stale_samples(self, number: int) -> None:
        group = self.ready[number]
        stale = [s for s in group.samples if s.first_version < self._oldest_version]
        self._ledger.discard(stale, "stale", "too stale")
        group.samples = [s for s in group.samples if s.state == "done"]
        if len(group.samples) < self._min_samples:
            self._ledger.discard(group.samples, "filtered", "its group became too stale")
            self._slots.vacate(group.prompt.domain, number)
            self._pop_ready(number)

    def _abort_stale(self, numbers: Collection[int | None]) -> None:
        """Abort running groups that will have too few samples that are young enough."""
        if self._options.stale == "drop":
            for number in list(numbers):
                if (group := self.running.get(number)) and not group.task.done():
                    self._abort_if_stale(number, group)

    def _abort_if_stale(self, number: int, group: RunningGroup) -> None:
        """A sample without a first token is not stale."""
        left = [s for s in group.samples if s.state not in LOST]
        versions = [group.first_version(s) for s in left]
        oldest = self._oldest_version
        stale = [s for s, v in zip(left, versions, strict=True) if v is not None and v < oldest]
        if not stale or len(left) - len(stale) >= self._min_samples:
            return
        self._ledger.discard(stale, "stale", "too stale")
        self._ledger.discard(left, "filtered", "its group became too stale")
        self._slots.vacate(group.domain, number)
        del self.running[number]
        group.task.cancel()

    async def _abort_surplus(self) -> None:
        tasks = [running.task for running in self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for number, group in self.ready.items():
            self._ledger.discard(group.samples, "aborted", "one too many")
            self._slots.vacate(group.prompt.domain, number)
        self.ready.clear()
        self._ready_of.clear()
