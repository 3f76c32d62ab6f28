"""Runs groups of samples to their end: one coroutine per sample, over all engine replicas.

    with Coordinator(engines=engines, prompts=prompts, ...) as rollout:
        rollout.start()                      # optional: keep generating during training
        for step in range(100):
            groups = rollout.collect()

The coroutines run in a thread on rank 0. In a world of one there is no thread: they run inside
`collect`, which also pumps the engine. Calls go downwards:

    Coordinator -> Groups -> RunningGroup -> Episode -> EngineClient -> the engines' role handle

An engine's reply goes straight to the EngineClient, which wakes the sample that waits for it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from roll_lite.chat import Chat
from roll_lite.envs.env import Player
from roll_lite.envs.play import EpisodeOptions
from roll_lite.progress import ProgressBar
from roll_lite.rollout.engines import EngineClient
from roll_lite.rollout.episode import EpisodeContext, RunningGroup
from roll_lite.rollout.event_loop import LoopThread, PumpedLoop, Signal
from roll_lite.rollout.groups import EmptyStep, Groups, Keep, NothingLeft
from roll_lite.rollout.journal import Journal
from roll_lite.rollout.ledger import Ledger
from roll_lite.rollout.prompts import Choose, PromptQueue, PromptSource, Visit
from roll_lite.rollout.recorded import RecordedSamples
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.stopping import Ended, Stopped
from roll_lite.types import Group, Prompt, Sample, SamplingParams, has_equal_rewards

if TYPE_CHECKING:  # it imports torch, which --help does without
    from roll_lite.cluster.role import RoleHandle

__all__ = ["Coordinator", "NothingLeft"]
COUNTED = ("started", "done", "filtered", "aborted", "failed", "retried", "refilled", "stale")


class Coordinator:
    """Generates, scores and hands out groups, over all replicas of an engine role."""

    def __init__(
        self,
        *,
        engines: "RoleHandle",
        chat: Chat,
        play: Player,
        prompts: PromptSource | Iterator[Prompt],
        params: SamplingParams,
        options: RolloutOptions,
        seed: int,
        min_samples: int | None = None,
        reward_engines: Sequence[EngineClient] = (),
        max_length: int | None = None,
        episodes: EpisodeOptions | None = None,
        keep: Keep | None = None,
        nothing_to_learn: Keep | None = has_equal_rewards,
        choose: Choose | None = None,
        pass_reward: float = 1.0,
        play_metrics: Callable[[], dict[str, float]] = dict,
    ):
        """`play` takes a sample through its episode.

        A group with fewer than `min_samples` left is dropped; 2 where groups are larger than 1.
        `nothing_to_learn` says which groups drop_equal drops.

        `keep` is a filter of your own, for complete groups that pass the filters of the options;
        samples wait while it runs. An exception in it ends the run.

        `choose(source, history)` returns the prompt that comes next, also in place of a dropped
        group, whatever its domain: it alone decides the shares of domains. `source` is `prompts`,
        and `history` the pass rates so far, where a sample passes with `pass_reward`. A function
        that keeps no state of its own draws the same in a resumed run. Like `keep` it makes samples
        wait, and an exception in it ends the run.

        `max_length` is the context. A question that leaves no room in it for a whole reply fails. A
        task that would become longer ends or fails, as `episodes.at_limit` says; the other options
        of `episodes` are for tasks, too.

        `play_metrics` returns metrics of `play` since its last call; `metrics` includes them.

        `reward_engines` are engine roles that rewards ask, such as a judge. A plain iterator of
        prompts cannot be resumed, and replaces a dropped group by a prompt of any domain.
        """
        if min_samples is None:
            min_samples = min(2, options.samples_per_prompt)
        self._options = options
        self._signal = Signal()
        self._play_metrics = play_metrics
        self._engines = EngineClient(engines, options)
        self._engines.version.advance(engines.version())
        self._ledger = Ledger(self._engines.version)
        context = EpisodeContext(
            engines=self._engines, chat=chat, play=play, ledger=self._ledger, seed=seed,
            max_retries=options.max_retries, deadline=options.deadline,
            max_length=max_length, task_options=episodes or EpisodeOptions(),
        )  # fmt: skip
        answer_ledger = Ledger(self._engines.version, self._ledger.in_flight)
        # Without deadline: an evaluation needs every sample.
        self._answer_context = replace(context, ledger=answer_ledger, deadline=None)
        self._prompts = PromptQueue(prompts, choose, pass_reward)
        self._groups = Groups(
            context,
            self._prompts,
            options,
            params,
            min_samples,
            self._signal,
            keep,
            nothing_to_learn,
        )
        self._num_answered: Counter[str] = Counter()
        self._version_gaps: list[int] = []
        self._journal: Journal | None = None
        self._digest_weights: Callable[[], str]
        """Set with the journal."""
        self._resume_from: dict[str, Any] | None = None
        """The state before a step that was abandoned."""
        is_alone = engines.is_alone
        self._loop = PumpedLoop(self._pump, self._signal) if is_alone else LoopThread(self._signal)
        self._clients = [self._engines, *reward_engines]
        self._engines.listen(self._loop.call, self._signal.fail, self._groups.refresh)
        for client in reward_engines:
            client.listen(self._loop.call, self._signal.fail)

    def __enter__(self) -> "Coordinator":
        self._loop.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Abort all samples and end the thread."""
        for client in self._clients:
            client.stop_listening()
        self._loop.call(self._groups.stop)
        self._loop.close()
        if self._journal:
            self._journal.close()

    def open_journal(
        self, folder: str | Path, made_with: str, resumed_at: int, weights: Callable[[], str]
    ) -> None:
        """Keep finished samples in a folder until `forget`, and use those that are there already.

        `made_with` is the journal's `fingerprint` of the options. `weights` returns a digest of the
        engines' weights.
        """
        self._journal = Journal(folder, made_with, resumed_at)
        self._digest_weights = weights
        self._ledger.journal = self._journal
        self._answer_context.ledger.journal = self._journal
        self._journal.begin(self._engines.version.current, weights())

    def take_recorded(self, samples: RecordedSamples) -> None:
        """Train on recorded samples where there are any; evaluations sample their own."""
        self._ledger.recorded = samples

    def forget(self, saved_step: int) -> None:
        """A checkpoint has this step: the journal keeps what came after it."""
        if self._journal:
            before = saved_step - self._options.max_version_gap
            self._loop.run(_call(self._journal.forget, before))

    def end_journal(self) -> None:
        """Remove the journal: the run is complete."""
        if self._journal:
            self._loop.run(_call(self._journal.remove))

    def start(self) -> None:
        """From now on keep generating, as far ahead as max_staleness allows."""
        self._loop.run(_call(self._groups.start))

    def stop(self, error: Stopped) -> None:
        """Have the call that waits for samples, and every later one, raise the error."""
        self._loop.interrupt(self._signal.fail, error)

    def collect(self) -> list[Group]:
        """The next prompts_per_step complete groups, in the order of their prompts.

        Every domain has as many as were drawn, however many were dropped or are slow. There are
        fewer only when the prompts have ended, or more groups were dropped than max_refills
        replaces; `empty_steps` says why there is none. All samples in them are done and scored.

        Raises NothingLeft where too few samples are left in every group, because they failed.
        """
        before = None if self._groups.is_continuous else self.state_dict()
        try:
            return self._loop.run(self._collect())
        except NothingLeft:  # other prompts may give groups: those of this step are not repeated
            raise
        except Ended:
            self._resume_from = before
            raise

    @property
    def empty_steps(self) -> list[EmptyStep]:
        """The last calls of `collect` in a row whose groups were all dropped."""
        return self._groups.empty_steps

    def answer(
        self,
        prompts: Iterable[Prompt],
        *,
        num_samples: int,
        params: SamplingParams,
        on_group: Callable[[int, Group], None] = lambda place, group: None,
    ) -> list[Group]:
        """One group per prompt, in order, including failed samples: for evaluation.

        `on_group` gets the place of a prompt and its group as soon as the group is complete.
        """
        return self._loop.run(self._answer(list(prompts), num_samples, params, on_group))

    def repeat(self, visit: Visit, index: int, params: SamplingParams) -> Sample:
        """One sample of an earlier visit again, with the random numbers that it had."""
        group = self._loop.run(self._repeat(visit, index, params))
        return group.samples[0]

    def set_version(self, policy_version: int) -> None:
        """Announce new weights in the engines: groups collected from now on are used under them."""
        if self._journal:
            weights = self._digest_weights()
            self._loop.run(_call(self._journal.begin, policy_version, weights))
        self._loop.run(_call(self._set_version, policy_version))

    def on_states(self, listener: Callable[[list[str]], None]) -> None:
        """Call the listener, in any thread, with the states that samples are in as these change."""
        self._ledger.in_flight.listener = listener

    def metrics(self) -> dict[str, float]:
        """How samples ended since the last call, and how much is in flight."""
        return self._loop.run(_call(self._metrics)) | self._play_metrics()

    def dropped(self) -> list[tuple[Sample, str]]:
        """Samples since the last call that are in no group or failed, each with the reason."""
        return self._loop.run(_call(self._take_dropped))

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON. Running groups are kept as prompts, and generated again on resume.

        After a stop in a synchronous step it is the state before that step.
        """
        return self._resume_from or self._loop.run(_call(self._state_dict))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; only before anything was started."""
        self._num_answered = Counter(state["answered"])
        self._groups.load_state_dict(state)
        self._prompts.load_state_dict(state)

    async def _collect(self) -> list[Group]:
        num_samples = self._options.prompts_per_step * self._options.samples_per_prompt
        with ProgressBar(num_samples, "rollout", "samples", done=self._groups.num_ready) as bar:
            self._ledger.bar = bar
            groups = await self._groups.take()
        version = self._engines.version.current
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
        ledger = self._answer_context.ledger
        running = [self._running_answer(prompt, num_samples, params) for prompt in prompts]
        self._answer_context.encode_ahead(prompts)
        with ProgressBar(num_samples * len(running), "evaluation", "samples") as bar:
            ledger.bar = bar

            async def answer(place: int) -> Group:
                group = await running[place].run()
                on_group(place, group)
                return group

            answers = asyncio.gather(*map(answer, range(len(running))))
            try:
                return await self._signal.result_of(answers)
            except Ended:  # the same evaluation comes again
                self._num_answered.subtract(prompt.id for prompt in prompts)
                raise
            finally:
                for group in running:  # none has such a sample unless the run ends
                    self._answer_context.ledger.abort(
                        sample for sample in group.samples if sample.error
                    )
                self._ledger.dropped += self._answer_context.ledger.take_dropped()

    def _running_answer(
        self, prompt: Prompt, num_samples: int, params: SamplingParams
    ) -> RunningGroup:
        self._num_answered[prompt.id] += 1
        # Negative numbers, which no visit in training has: a prompt may be used for both.
        visit = Visit(prompt, -self._num_answered[prompt.id])
        return RunningGroup(self._answer_context, visit, num_samples, params)

    async def _repeat(self, visit: Visit, index: int, params: SamplingParams) -> Group:
        group = RunningGroup(self._answer_context, visit, index + 1, params, only=index)
        return await self._signal.result_of(asyncio.ensure_future(group.run()))

    def _take_dropped(self) -> list[tuple[Sample, str]]:
        if self._signal.error:
            self._groups.abandon()
        return self._ledger.take_dropped()

    def _set_version(self, policy_version: int) -> None:
        self._engines.version.advance(policy_version)
        self._groups.refresh()

    def _metrics(self) -> dict[str, float]:
        counts = self._ledger.counts
        gaps = self._version_gaps
        rewards = self._groups.rewards
        metrics: dict[str, float] = {f"rollout/{name}": counts[name] for name in COUNTED}
        metrics["rollout/tokens"] = self._ledger.num_tokens
        metrics["rollout/groups_in_flight"] = len(self._groups.running)
        metrics["rollout/groups_ready"] = len(self._groups.ready)
        if rewards:  # of all sampled groups; reward/mean is of those that are trained on
            metrics["rollout/reward"] = fmean(rewards)
        if gaps:
            metrics |= {"rollout/staleness": fmean(gaps), "rollout/max_staleness": max(gaps)}
        if counts["missing"]:
            metrics["rollout/missing_groups"] = counts["missing"]
        if counts["restored"]:
            metrics["rollout/restored"] = counts["restored"]
        metrics |= self._engines.metrics()
        counts.clear()
        self._ledger.num_tokens = 0
        gaps.clear()
        rewards.clear()
        return metrics

    def _state_dict(self) -> dict[str, Any]:
        running = [group.visit for _, group in sorted(self._groups.running.items())]
        return {
            "answered": dict(self._num_answered),
            **self._prompts.state_dict(running),
            **self._groups.state_dict(),
        }

    def _pump(self) -> bool:
        """In a world of one: let every engine do a piece of work."""
        is_busy = [client.engines.pump() for client in self._clients]  # each, whatever others say
        return any(is_busy)


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    """A function as a coroutine, to be run in the event loop."""
    return function(*args)
