"""Runs groups of samples to their end: one coroutine per sample, engine replicas under all of them.

    with Coordinator(engines=engines, prompts=prompts, ...) as rollout:
        rollout.start()                      # go on beside training; without it, between collects
        for step in range(100):              # nothing is generated
            groups = rollout.collect()

The coroutines run in a thread of their own on rank 0. In a world of one there is no thread: they
run inside `collect`, which pumps the engine; what has ended is scored between two steps.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean
from types import TracebackType
from typing import Any

from roll_lite.chat import Chat
from roll_lite.cluster.role import RoleHandle
from roll_lite.envs.env import Env
from roll_lite.progress import ProgressBar
from roll_lite.rollout.asking import Asking
from roll_lite.rollout.in_flight import InFlight
from roll_lite.rollout.loops import LoopThread, PumpedLoop
from roll_lite.rollout.options import RolloutOptions
from roll_lite.rollout.record import read_group, read_prompt, write_group, write_prompt
from roll_lite.rollout.replicas import Replicas
from roll_lite.rollout.runner import SampleRunner, Visit
from roll_lite.rollout.slots import Slots
from roll_lite.types import Group, Prompt, Sample, SamplingParams

COUNTED = ("started", "done", "filtered", "aborted", "failed", "retried", "refilled", "stale")


class Coordinator:
    """Generates, scores and hands out groups, over all replicas of an engine role."""

    def __init__(
        self,
        *,
        engines: RoleHandle,
        chat: Chat,
        make_env: Callable[[Prompt], Env],
        prompts: Iterator[Prompt],
        params: SamplingParams,
        options: RolloutOptions,
        seed: int,
        asked: Sequence[Asking] = (),
        min_samples: int | None = None,
    ):
        """`prompts` may have `state_dict` and `load_state_dict`, to go on where a run stopped.

        And `next_of(domain)`: then a group that is dropped is replaced by one of its domain; and
        `comes_again(prompt)`, where visits of some prompts need not be counted.
        `asked` are further engine roles that rewards ask, such as a judge.
        """
        self._roles = [engines, *(asking.engines for asking in asked)]
        self._prompts = prompts
        self._comes_again = getattr(prompts, "comes_again", lambda prompt: True)
        self._visits: Counter[str] = Counter()
        self._num_answered: Counter[str] = Counter()
        self._unfinished: list[Visit] = []
        """Were under way when a run stopped, and are generated again."""
        self._replicas = Replicas(engines, options, self._fail, self._renew)
        self._replicas.policy_version = engines.version()
        runner = partial(
            SampleRunner,
            replicas=self._replicas, chat=chat, make_env=make_env, seed=seed,
            max_retries=options.max_retries,
        )  # fmt: skip
        self._runner = runner(deadline=options.deadline)
        self._answerer = runner()  # an evaluation is of all samples, however long they take
        self._groups = InFlight(self._runner, options, params, self._next_visit, self._version)
        self._groups._min_samples = options.min_samples if min_samples is None else min_samples
        self._options = options
        self._version_gaps: list[int] = []
        self._loop = (
            PumpedLoop(self._pump, self._fail) if engines.is_alone else LoopThread(self._fail)
        )
        self._replicas.listen(self._loop)
        for asking in asked:
            asking.join(self._loop, self._fail)

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is under way, and end the thread."""
        for role in self._roles:
            role.stop_listening()
        self._loop.call(self._groups.stop)
        self._loop.close()

    def start(self) -> None:
        """From now on keep generating, as far ahead as max_staleness allows."""
        self._loop.run(self._start())

    def collect(self, num_groups: int | None = None) -> list[Group]:
        """So many complete groups (prompts_per_step), in the order of their prompts.

        Of each domain there are as many as were drawn, whatever was dropped or takes long. Fewer
        only when the prompts have ended, or more groups were dropped than max_refills replaces. All
        samples in them are done and scored.
        """
        return self._loop.run(self._collect(num_groups or self._options.prompts_per_step))

    def answer(
        self,
        prompts: Iterable[Prompt],
        *,
        num_samples: int,
        params: SamplingParams,
        on_group: Callable[[int, Group], None] = lambda place, group: None,
    ) -> list[Group]:
        """One group for each prompt, in order, failed samples included: to evaluate.

        `on_group` is told the place and the group of a prompt as soon as it is complete.
        """
        return self._loop.run(self._answer(list(prompts), num_samples, params, on_group))

    def set_version(self, policy_version: int) -> None:
        """Say that engines have new weights: what is collected from now on is used under them."""
        self._loop.run(self._set_version(policy_version))

    def metrics(self) -> dict[str, float]:
        """What became of samples since the last time, and how things stand."""
        return self._loop.run(self._metrics())

    def dropped(self) -> list[tuple[Sample, str]]:
        """Samples that ended since the last time and teach nothing, each with the reason."""
        return self._loop.run(self._dropped())

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON. What is under way is kept as prompts, and generated again."""
        return self._loop.run(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; before anything was started."""
        self._visits = Counter(state["visits"])
        self._num_answered = Counter(state["answered"])
        self._unfinished = [Visit(read_prompt(p), number) for p, number in state["unfinished"]]
        ready = [read_group(group) for group in state["ready"]]
        self._groups.restore(ready, Slots(state["slots"], state.get("given_up", ())))
        if state["prompts"] is not None:
            self._prompts.load_state_dict(state["prompts"])

    async def _start(self) -> None:
        self._groups.goes_on = True
        self._groups.feed()

    async def _collect(self, num_groups: int) -> list[Group]:
        with ProgressBar(num_groups, "rollout") as bar:
            groups = await self._groups.take(num_groups, bar.reach)
        version = self._version()
        samples = [sample for group in groups for sample in group.samples]
        self._version_gaps += [version - sample.first_version for sample in samples]
        return groups

    async def _answer(
        self,
        prompts: list[Prompt],
        num_samples: int,
        params: SamplingParams,
        on_group: Callable[[int, Group], None],
    ) -> list[Group]:
        groups = [
            Group(prompt=prompt, samples=self._answerer.make_samples(prompt, num_samples))
            for prompt in prompts
        ]
        with ProgressBar(len(groups), "answers") as bar:

            async def answer(place: int, group: Group) -> None:
                self._num_answered[group.prompt.id] += 1
                # Numbers that no visit has: questions to evaluate on may be trained on as well.
                visit = Visit(group.prompt, -self._num_answered[group.prompt.id])
                turns = self._answerer.make_turns(visit, num_samples, params)
                await self._answerer.run_group(group.samples, turns)
                on_group(place, group)
                bar.advance()

            answers = (answer(place, group) for place, group in enumerate(groups))
            await self._groups.unless_failed(asyncio.gather(*answers))
        self._runner.dropped += self._answerer.dropped  # they are in their groups, and noted
        self._answerer.dropped.clear()
        return groups

    async def _set_version(self, policy_version: int) -> None:
        self._replicas.policy_version = max(self._replicas.policy_version, policy_version)
        self._groups.renew()

    async def _metrics(self) -> dict[str, float]:
        counts, gaps, rewards = self._runner.counts, self._version_gaps, self._groups.rewards
        metrics: dict[str, float] = {f"rollout/{name}": counts[name] for name in COUNTED}
        metrics["rollout/groups_in_flight"] = len(self._groups.running)
        metrics["rollout/groups_ready"] = len(self._groups.ready)
        if rewards:  # of what the policy samples; reward/mean is of what is trained on
            metrics["rollout/reward"] = fmean(rewards)
        if gaps:
            metrics |= {"rollout/staleness": fmean(gaps), "rollout/max_staleness": max(gaps)}
        if counts["missing"]:
            metrics["rollout/missing_groups"] = counts["missing"]
        if loads := [load for load in self._replicas.loads if load]:
            metrics["rollout/engine_running"] = sum(load.num_running for load in loads)
            metrics["rollout/engine_waiting"] = sum(load.num_waiting for load in loads)
            metrics["rollout/engine_free_pages"] = min(load.num_free_pages for load in loads)
        for seen in (counts, gaps, rewards):
            seen.clear()
        return metrics

    async def _dropped(self) -> list[tuple[Sample, str]]:
        samples, self._runner.dropped = self._runner.dropped, []
        return samples

    async def _state(self) -> dict[str, Any]:
        running = [running.visit for _, running in sorted(self._groups.running.items())]
        under_way = [*running, *self._unfinished]
        has_state = hasattr(self._prompts, "state_dict")
        return {
            "visits": dict(self._visits),
            "answered": dict(self._num_answered),
            "unfinished": [[write_prompt(visit.prompt), visit.number] for visit in under_way],
            "ready": [write_group(group) for _, group in sorted(self._groups.ready.items())],
            "slots": self._groups.slots.domains,
            "given_up": self._groups.slots.given_up,
            "prompts": self._prompts.state_dict() if has_state else None,
        }

    def _pump(self) -> bool:
        """In a world of one: let every engine do a piece of work."""
        is_busy = [role.pump() for role in self._roles]  # all of them, whatever the first says
        return any(is_busy)

    def _fail(self, error: BaseException) -> None:
        self._groups.fail(error)

    def _renew(self) -> None:
        self._groups.renew()

    def _version(self) -> int:
        return self._replicas.policy_version

    def _next_visit(self, domain: str | None) -> Visit | None:
        """Of a domain, to fill a slot that groups have left, or of whichever comes next."""
        for place, visit in enumerate(self._unfinished):
            if domain in (None, visit.prompt.domain):
                return self._unfinished.pop(place)
        if domain is not None and hasattr(self._prompts, "next_of"):
            prompt = self._prompts.next_of(domain)
        else:
            prompt = next(self._prompts, None)
        return self._visit(prompt) if prompt else None

    def _visit(self, prompt: Prompt) -> Visit:
        if not self._comes_again(prompt):
            return Visit(prompt, 0)
        self._visits[prompt.id] += 1
        return Visit(prompt, self._visits[prompt.id] - 1)
