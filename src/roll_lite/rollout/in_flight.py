"""Groups under way: started as room allows, judged when they end, kept until somebody takes them.

Everything here runs in the coordinator's event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from roll_lite.rollout.options import RolloutOptions
from roll_lite.rollout.runner import LOST, SampleRunner, Visit
from roll_lite.rollout.slots import Slots
from roll_lite.rollout.turns import GroupTurns
from roll_lite.types import Group, Sample, SamplingParams


class NothingLeft(RuntimeError):
    """All groups of a step were dropped. Nothing is broken: others may teach more."""


@dataclass(frozen=True, slots=True)
class Running:
    visit: Visit
    samples: list[Sample]
    turns: GroupTurns
    task: asyncio.Task


class InFlight:
    """Groups that are generated, and those that are complete and not yet taken."""

    def __init__(
        self,
        runner: SampleRunner,
        options: RolloutOptions,
        params: SamplingParams,
        next_visit: Callable[[str | None], Visit | None],
        version: Callable[[], int],
    ):
        """`next_visit` gives the prompt to go on with; None when there are no more.

        It is told the domain of the slot that is to be filled, or None for a new slot. `version` is
        the policy version that groups are used under.
        """
        self._runner, self._options, self._params = runner, options, params
        self._next_visit, self._version = next_visit, version
        self._min_samples = options.min_samples  # once: a recipe may derive it from many options
        self._num_started = 0
        self.running: dict[int, Running] = {}
        self.ready: dict[int, Group] = {}
        """Complete groups, by the order in which their prompts came."""
        self.rewards: list[float] = []
        """Of all samples scored since the last metrics, those of dropped groups too."""
        self._checked: dict[int, int] = {}
        """The policy version at which a ready group was last found to be young enough."""
        self.slots = Slots()
        self.goes_on = False
        """Whether groups are started without anybody waiting for them."""
        self._num_asked = 0
        """Groups that somebody waits for."""
        self._num_taken: Counter[int] = Counter()
        """Slots by policy version: those of the present one are being trained on, or given up."""
        self._num_refills = 0
        """Since groups were last taken."""
        self._dropped: Counter[tuple[str, str]] = Counter()
        """Since groups were last taken, by domain and reason."""
        self._last_error = ""
        self._fault: BaseException | None = None
        self._changed, self._failed = asyncio.Event(), asyncio.Event()

    async def take(self, num_groups: int, progress: Callable[[int], None]) -> list[Group]:
        """The oldest complete groups for the oldest slots.

        Fewer when the prompts have ended, or when too many groups were dropped to replace them all.
        `progress` is told how many there are so far.
        """
        self._num_asked = num_groups
        try:
            while True:
                if self._fault:
                    raise self._fault
                self._drop_stale()
                self.feed()
                num_slots = self._num_due(num_groups)
                if (numbers := self.slots.match(num_slots, self.ready)) is not None:
                    break
                self._changed.clear()
                progress(len(self.ready))
                await self._changed.wait()
        finally:
            self._num_asked = 0
        taken = [self.ready.pop(number) for number in numbers]
        num_given_up = self.slots.release(num_slots)
        self._runner.counts["missing"] += num_given_up
        self._runner.counts["done"] += sum(len(group.samples) for group in taken)
        self._dropped.clear()
        self._num_refills = 0
        version, num_used = self._version(), len(taken) + num_given_up
        self._num_taken = Counter({version: self._num_taken[version] + num_used})
        if not self.goes_on:
            if self._options.surplus == "abort":
                await self._abort_rest()
            self.slots.revive()  # the next step begins anew
        self.feed()
        return taken

    def feed(self) -> None:
        """Start groups while there is room, and in any case those that are waited for."""
        while not self._fault:
            index, domain = self.slots.first_vacant()
            if index >= self._num_wanted():
                return
            visit = self._next_visit(domain)
            if visit is None and domain is None:
                return
            if domain is not None and (visit is None or visit.prompt.domain != domain):
                self.slots.close(index)
            if visit is not None:
                if visit.prompt.domain != domain:
                    self.slots.add(visit.prompt.domain)
                self._start(visit)

    def renew(self) -> None:
        """There is a new policy version, or news of what goes on under it: end what is too old."""
        self._drop_stale()
        self._abort_stale()
        self.feed()
        self._changed.set()

    def stop(self) -> None:
        """Start no more groups beside others, not even for one that ends at this moment."""
        self.goes_on = False

    def restore(self, groups: list[Group], slots: Slots) -> None:
        """Complete groups, and slots of all groups, of an earlier run; they come first."""
        self.ready = dict(enumerate(groups))
        self._num_started = len(groups)
        self.slots = slots
        for group in groups:
            self.slots.fill(group.prompt.domain)

    def fail(self, error: BaseException) -> None:
        """Whoever waits for groups, now or later, gets the error."""
        self._fault = self._fault or error
        self._changed.set()
        self._failed.set()

    async def unless_failed(self, future: asyncio.Future) -> Any:
        """What the future brings, or the error that keeps it from ever doing so."""
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait([future, failed], return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise self._fault
            return future.result()
        finally:
            failed.cancel()
            future.cancel()
            await asyncio.gather(future, return_exceptions=True)

    def _num_wanted(self) -> int:
        if self.goes_on:
            in_training = self._num_taken[self._version()]
            return max(self._num_asked, self._options.max_in_flight - in_training)
        return self._num_asked + self._options.extra_prompts if self._num_asked else 0

    def _start(self, visit: Visit) -> None:
        number, self._num_started = self._num_started, self._num_started + 1
        samples = self._runner.make_samples(visit.prompt, self._options.samples_per_prompt)
        turns = self._runner.make_turns(visit, len(samples), self._params)
        run = self._runner.run_group(samples, turns)
        task = asyncio.get_running_loop().create_task(run)
        self.running[number] = Running(visit, samples, turns, task)
        self.slots.fill(visit.prompt.domain)
        task.add_done_callback(lambda _: self._on_end(number))

    def _on_end(self, number: int) -> None:
        ended = self.running.pop(number, None)
        if ended is None:  # it was too old
            return
        if ended.task.cancelled():
            self.slots.vacate(ended.visit.prompt.domain)
            self._runner.abort(ended.samples)
            self._runner.discard(ended.samples, "aborted")
            return
        if error := ended.task.exception():
            self.fail(error)
            return
        group = Group(prompt=ended.visit.prompt, samples=ended.samples)
        rewards = [s.score.value for s in group.samples if s.state == "done"]
        self.rewards += rewards
        if reason := self._objection(group, rewards):
            self._drop(number, group, reason)
        else:
            group.samples = [s for s in group.samples if s.state == "done"]
            self.ready[number] = group
        self.feed()
        self._changed.set()

    def _objection(self, group: Group, rewards: list[float]) -> str | None:
        """Why a group is not to be trained on."""
        low, high = self._options.min_group_reward, self._options.max_group_reward
        if len(rewards) < self._min_samples:
            is_late = any(sample.state == "aborted" for sample in group.samples)
            return f"had too few samples left{' at the deadline' if is_late else ''}"
        if self._options.drop_equal and len(set(rewards)) == 1:
            return "had equal rewards"
        if low is not None and fmean(rewards) < low:
            return f"had a mean reward below {low}"
        if high is not None and fmean(rewards) > high:
            return f"had a mean reward above {high}"
        return None

    def _drop(self, number: int, group: Group, reason: str) -> None:
        """Another group may take its slot, as long as the step has refills."""
        domain = group.prompt.domain
        if self._num_refills < self._options.max_refills * self._options.prompts_per_step:
            self._num_refills += 1
            self._runner.counts["refilled"] += 1
            self.slots.vacate(domain)
        elif self.goes_on:  # it is its own step that has one less
            self.slots.give_up(domain, self._rank(number, domain))
        else:  # a surplus group may stand in for it
            self.slots.give_up(domain)
        self._runner.discard(group.samples, "filtered", f"its group {reason}")
        self._dropped[domain, reason] += 1
        errors = [sample.error for sample in group.samples if sample.error]
        self._last_error = errors[-1] if errors else self._last_error

    def _rank(self, number: int, domain: str) -> int:
        """Among the groups of a domain, by the order in which their prompts came."""
        running = [n for n, group in self.running.items() if group.visit.prompt.domain == domain]
        ready = [n for n, group in self.ready.items() if group.prompt.domain == domain]
        return sum(other < number for other in running + ready)

    def _num_due(self, num_groups: int) -> int:
        """How many slots are waited for, those that were given up included.

        Groups of later slots stay there, so that what is slow or filtered does not lose its share
        to others; only when all were given up does the next one have its turn. Where none is left,
        all are released: whoever goes on begins anew.
        """
        first = self.slots.first_kept()
        if first is None and len(self.slots):
            self._runner.counts["missing"] += self.slots.release(len(self.slots))
            raise self._refill_error()
        return max(num_groups, (first or 0) + 1)

    def _refill_error(self) -> NothingLeft:
        has_domains = len({domain for domain, _ in self._dropped} | set(self.slots.domains)) > 1
        reasons = ", ".join(
            f"{count} {f'of {domain} ' if has_domains else ''}{reason}"
            for (domain, reason), count in self._dropped.most_common()
        )
        text = (
            f"all {self._dropped.total()} groups of one step were dropped: {reasons}; "
            f"max_refills={self._options.max_refills} allows "
            f"{self._options.max_refills * self._options.prompts_per_step}. "
            "Raise it, filter less, or choose prompts of another difficulty"
        )
        error = f". The last error:\n{self._last_error}" if self._last_error else ""
        return NothingLeft(text + error)

    def _oldest(self) -> int:
        """The policy version of the oldest first token that may be used."""
        return self._version() - self._options.max_version_gap

    def _drop_stale(self) -> None:
        version, oldest = self._version(), self._oldest()
        for number, group in list(self.ready.items()):
            if self._checked.get(number) == version:
                continue
            self._checked[number] = version
            stale = [s for s in group.samples if s.first_version < oldest]
            self._runner.discard(stale, "stale", "too old")
            group.samples = [s for s in group.samples if s.state == "done"]
            if len(group.samples) < self._min_samples:
                self._runner.discard(group.samples, "filtered", "the others were too old")
                self.slots.vacate(group.prompt.domain)
                del self.ready[number]
        self._checked = {number: self._checked[number] for number in self.ready}

    def _abort_stale(self) -> None:
        """Groups that could not be used when complete. A sample that has not begun is not old."""
        oldest = self._oldest()
        for number, group in list(self.running.items()):
            left = [s for s in group.samples if s.state not in LOST]
            versions = [group.turns.first_version(s) for s in left]
            stale = [s for s, v in zip(left, versions, strict=True) if v is not None and v < oldest]
            is_enough = len(left) - len(stale) >= self._min_samples
            if not stale or is_enough or group.task.done():
                continue
            self._runner.discard(stale, "stale", "too old")
            self._runner.discard(left, "filtered", "the others were too old")
            self.slots.vacate(group.visit.prompt.domain)
            del self.running[number]
            group.task.cancel()

    async def _abort_rest(self) -> None:
        tasks = [running.task for running in self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for group in self.ready.values():
            self._runner.discard(group.samples, "aborted", "one too many")
            self.slots.vacate(group.prompt.domain)
        self.ready.clear()
