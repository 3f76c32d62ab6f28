"""The shell of every recipe's loop: resume, stop, checkpoints, journal, profiler, timing,
evaluation and records.

    with Loop(cfg, roles, rollout, evaluation) as loop:
        for step in loop:
            ...
            loop.end(step, metrics, groups, sequences)

A run that ends early, by Ctrl-C or an error that leaves its weights whole, writes a checkpoint. One
that comes to its end exports its model: after the last step, or when nothing is left to learn.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from roll_lite import data
from roll_lite.checks import UserError
from roll_lite.options import flatten, where
from roll_lite.profiling import Profiler
from roll_lite.progress import StepTimer
from roll_lite.report.config_file import note_end, to_json
from roll_lite.report.contract import make_contract
from roll_lite.report.run import Run
from roll_lite.report.trackers import OpenTracker
from roll_lite.roles import Roles
from roll_lite.rollout.coordinator import Coordinator, NothingLeft
from roll_lite.rollout.evaluation import describe_groups
from roll_lite.rollout.event_loop import rare_collections
from roll_lite.rollout.journal import fingerprint
from roll_lite.rollout.recorded import RecordedSamples
from roll_lite.stopping import Ended
from roll_lite.train.checkpoint import Resumable, RunState
from roll_lite.train.checkpoint_folders import is_finished
from roll_lite.train.sample_rows import AdvantageState
from roll_lite.train.sequences import TrainingSequence, sample_runs, sampled_numbers
from roll_lite.types import Group, Prompt
from roll_lite.workers.failures import TooManyFailures

NO_PARTS: Mapping[str, Resumable] = {}
GroupMetric = Callable[[Sequence[Group]], float]
NO_METRICS: Mapping[str, GroupMetric] = {}
MAX_EMPTY_STEPS = 5
"""In a row: then nothing is left to learn, and the run ends."""


class Measurement(Protocol):
    """What is measured now and then during training, such as `Evaluation` on held-out prompts."""

    every: int
    """Steps between two; the last step has one in any case."""
    best: str
    """The metric by which the best checkpoint is chosen."""
    is_lower_better: bool

    def run(self, rollout: Coordinator | None) -> dict[str, float]: ...


class Validation:
    """Measures held-out rows with a function that returns metrics."""

    def __init__(
        self,
        measure: Callable[[], dict[str, float]],
        every: int,
        *,
        best: str,
        is_lower_better: bool = False,
    ):
        self.every = every
        self.best = best
        self.is_lower_better = is_lower_better
        self._measure = measure

    def run(self, rollout: Coordinator | None) -> dict[str, float]:
        return self._measure()


class TokenCounts:
    """Tokens that a run has generated and trained on so far, over resumes too."""

    def __init__(self):
        self._so_far = {"rollout/tokens": 0, "train/tokens": 0}

    def add(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Count those of a step; returns the totals that the run has."""
        for name in self._so_far:
            self._so_far[name] += int(metrics.get(name, 0))
        return {f"{name}_total": count for name, count in self._so_far.items() if count}

    def state_dict(self) -> dict[str, int]:
        return dict(self._so_far)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._so_far |= state


class Loop:
    """The steps of a run, for `with` and `for`."""

    def __init__(
        self,
        cfg: Any,
        roles: Roles,
        rollout: Coordinator | None = None,
        evaluation: Measurement | None = None,
        *,
        parts: Mapping[str, Resumable] = NO_PARTS,
        trackers: Sequence[OpenTracker] = (),
        group_metrics: Mapping[str, GroupMetric] = NO_METRICS,
        passed_by_nothing: Callable[[], list[Prompt]] = list,
        is_measured_first: bool = True,
    ):
        """`cfg` is the recipe's Config; its FIXED are options that a resumed run must not change,
        its SHOWN metrics of the console.

        `parts` are parts of the controller with state that checkpoints keep, beside the rollout.
        `trackers` get all metrics, beside those of the options. `group_metrics` are computed from
        the groups of each step, by name, and shown on the console. `passed_by_nothing` returns
        prompts that every program passes, found since its last call, for events.
        `is_measured_first` measures before the first step too.
        """
        self._cfg = cfg
        self._roles = roles
        self._rollout = rollout
        self._evaluation = evaluation
        self._tokens = TokenCounts()
        self._parts = {"tokens": self._tokens, **parts}
        self._trackers = (*cfg.tracking.openers, *trackers)
        self._group_metrics = group_metrics
        self._passed_by_nothing = passed_by_nothing
        self._is_measured_first = is_measured_first
        self.state: AdvantageState | None = None
        """What advantages carry from step to step."""
        if rollout is not None:
            self.state = AdvantageState(cfg.kl)
            self._parts |= {"rollout": rollout, "advantages": self.state}
            if isinstance(evaluation, Resumable):
                self._parts["evaluation"] = evaluation
        self._recorded: RecordedSamples | None = None
        self._timer: StepTimer

    def __enter__(self) -> "Loop":
        with ExitStack() as exits:
            if self._rollout:
                exits.enter_context(self._rollout)
                exits.enter_context(rare_collections(self._cfg.rollout.max_samples_in_flight))
            self._resume()
            opened = exits.enter_context(ExitStack())
            opened.callback(self._run.close)  # unless the loop begins, which closes it at its end
            if self._rollout:
                self._begin_rollout()
            try:
                self._measure_first()
            except TooManyFailures as error:
                self._blame_code(error)
                raise
            if self._rollout and self._cfg.runs_ahead:
                self._rollout.start()
            self._stop = self._roles.cluster.stop_request()
            if self._rollout:
                self._stop.listen(self._rollout.stop)
            exits.enter_context(self._stop)
            opened.pop_all()
            self._exits = exits.pop_all()
        return self

    def __iter__(self) -> Iterator[int]:
        """The steps that are left."""
        roles = [*self._roles.trained, *([self._roles.engines] if self._roles.engines else [])]
        self._profiler = Profiler(self._cfg.profile, self._cfg.run_dir, roles)
        self._roles.on_phase = self.phase
        self._counted_at = time.monotonic()
        for step in range(self._saved.step + 1, self._cfg.steps + 1):
            if self._has_learnt_all:
                break
            self._profiler.at(step)
            self._timer = StepTimer(self._run.phase, step)
            self.phase("rollout" if self._rollout else "train")
            yield step
        self._profiler.close()

    def phase(self, name: str) -> None:
        """Enter a phase of the step: rollout, prepare, train ..., timed as time/NAME."""
        self._timer.begin(name)

    def end(
        self,
        step: int,
        metrics: dict[str, float],
        groups: Sequence[Group] = (),
        sequences: Sequence[TrainingSequence] = (),
    ) -> None:
        """The step is complete: record it, evaluate and write a checkpoint where these are due.

        Raises Stopped if the run is to stop.
        """
        self._saved.step = step
        self.phase("records")
        digests = self._roles.digests()
        if self._rollout:
            metrics = metrics | self._describe(step, groups, sequences)
        metrics = metrics | self._timer.metrics() | {"time/digests": self._roles.digest_seconds}
        metrics |= self._recorded.note(metrics) if self._recorded else {}
        metrics |= self._tokens.add(metrics) | self._generation_speed(metrics)
        is_last = self._has_learnt_all
        if self._evaluation and (is_last or self._run.is_due(step, self._evaluation.every)):
            metrics = metrics | self._measure(step)  # not part of the step's time
        self._run.log(step, metrics)
        self._run.write_digests(step, digests, metrics)
        for prompt in self._passed_by_nothing():
            self._run.note("passed_by_nothing", step, prompt_id=prompt.id, domain=prompt.domain)
        if (every := self._cfg.checkpoints.export_every) and step % every == 0:
            self._run.phase.enter("export", step)
            path = f"{self._cfg.run_dir}/exports/step-{step:08d}"
            self._run.print(f"model of step {step}: {self._roles.policy.export(path)}")
        score = self._score(metrics)
        self._saved.end_step(self._run, self._stop, step, score, is_last=is_last)

    def _generation_speed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Tokens per second of the rollout phase or, beside training, of the time since the last
        step; none for a step with samples from the journal."""
        seconds = time.monotonic() - self._counted_at
        self._counted_at += seconds
        if not self._rollout or "rollout/restored" in metrics:
            return {}
        seconds = seconds if self._cfg.runs_ahead else metrics["time/rollout"]
        return {"rollout/tokens_per_second": metrics["rollout/tokens"] / seconds}

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        with self._exits:
            if error is not None:
                self._run.check_folder()
            if isinstance(error, Ended):
                self._note_dropped(self._saved.step + 1, with_filtered=True)
                self._saved.keep_last_step(self._run)
                self._run.close()
            elif error is None:
                if self._rollout:
                    self._rollout.end_journal()
                self._run.close()
                self._print_rates()
        if error is None:
            self._export()
        elif isinstance(error, TooManyFailures | NothingLeft):
            self._blame_code(error)

    def _blame_code(self, error: TooManyFailures | NothingLeft) -> None:
        """Rewards or environments that never worked: a restart would find them as they are."""
        if isinstance(error, NothingLeft):
            kind = "raised" if error.has_raised else ""
        else:
            kind = error.failure.kind if error.failure else ""
        if kind == "debugger" or (kind == "raised" and self._saved.step == 0):
            raise UserError(str(error)) from error

    def _export(self) -> None:
        """The model. Raises UserError if nothing is left to learn although samples fail."""
        ends_early = self._has_learnt_all and self._saved.step < self._cfg.steps
        has_passed = ends_early and all(step.has_passed for step in self._rollout.empty_steps)
        why = self._why_it_ends(has_passed) if ends_early else ""
        if ends_early:
            note_end(self._cfg.run_dir, self._saved.step, why, has_passed=has_passed)
        if Path(self._cfg.model).is_dir():  # or it is a shape without tokenizer
            print(f"model: {self._roles.policy.export(f'{self._cfg.run_dir}/model')}")
        if ends_early and not has_passed:
            raise UserError(why)
        print(why, end="\n" if why else "", flush=True)

    @property
    def _has_learnt_all(self) -> bool:
        """Whether the last steps were empty; a checkpoint has them too."""
        return bool(self._rollout) and len(self._rollout.empty_steps) >= MAX_EMPTY_STEPS

    def _why_it_ends(self, has_passed: bool) -> str:
        """Before its last step."""
        steps = self._rollout.empty_steps
        what = (
            "every sample passed" if has_passed else "there was nothing to learn, and samples fail"
        )
        return (
            f"the run ends at step {self._saved.step} of {self._cfg.steps}: in {len(steps)} steps "
            f"in a row {what}. In the last, {steps[-1].why}"
        )

    def _resume(self) -> None:
        """The newest checkpoint, if the run goes on, and the run folder."""
        cfg = self._cfg
        if self._rollout:
            options = flatten(cfg)
            fixed = {name: options[name] for name in cfg.FIXED}
        else:
            fixed = data.fixed_options(cfg, *cfg.FIXED)
        on_saved = self._rollout.forget if self._rollout else lambda step: None
        trained = self._roles.trained
        cluster = self._roles.cluster
        self._saved = RunState(cfg.run_dir, cfg.checkpoints, trained, self._parts, fixed, on_saved)
        if self._has_learnt_all and is_finished(cfg.run_dir, self._saved.step):
            self._rollout.empty_steps.clear()  # it is resumed to learn something else
        self._run = Run(
            cfg.run_dir, cfg, num_steps=cfg.steps, trackers=self._trackers,
            shown=cfg.SHOWN | {name: name for name in self._group_metrics},
            contract=make_contract(cfg, cluster.world_size, cluster.device.type),
            resumed_at=self._saved.resumed_at, ranks=cluster.device_map.replicas,
        )  # fmt: skip

    def _begin_rollout(self) -> None:
        """The weights of a checkpoint to the engines, and the journal of the run."""
        rollout = self._rollout
        step = self._saved.step
        rollout.on_states(self._run.phase.show_states)
        if self._saved.resumed_at:
            self._roles.to_training()
            self._roles.sync(step, rollout)
        if self._cfg.rollout.journal:
            made_with = fingerprint(flatten(self._cfg))
            folder = f"{self._cfg.run_dir}/journal"
            rollout.open_journal(folder, made_with, step, self._roles.digest)
        if self._cfg.rollout.recorded:
            self._recorded = RecordedSamples(self._cfg, to_json(self._cfg))
            rollout.take_recorded(self._recorded)

    def _measure_first(self) -> None:
        """Before the first step, and in a resumed run what was abandoned."""
        step = self._saved.step
        evaluation = self._evaluation
        metrics = {}
        if evaluation and (step or self._is_measured_first):
            every = 1 if self._has_learnt_all else evaluation.every
            if self._run.is_missing(evaluation.best, step, every):
                metrics = self._measure(step)
        if metrics:
            self._run.log(step, metrics)
            if self._saved.resumed_at:  # its checkpoint was written without this measurement
                self._saved.save_again(self._run, self._score(metrics))
        if metrics or step == 0:
            digests = {} if step else self._roles.digests(with_frozen=True)
            self._run.write_digests(step, digests, metrics)

    def _measure(self, step: int) -> dict[str, float]:
        """Metrics of held-out prompts or rows; answers are written to the run folder."""
        self._run.phase.enter("evaluate", step)
        best = self._evaluation.best
        try:
            metrics = self._evaluation.run(self._rollout)
        finally:
            if self._rollout:
                is_recorded = self._run.is_due(step, min(1, self._cfg.rollouts_every))
                self._run.write_answers(step, self._evaluation.groups, is_recorded=is_recorded)
                self._note_dropped(step, with_filtered=self._cfg.is_recorded(step))
                self._run.flush()
        if self._evaluation.best != best:
            self._say_best(step)
        return metrics

    def _say_best(self, step: int) -> None:
        best = self._evaluation.best
        self._run.note("best_by", step, metric=best)
        self._run.print(
            f"no sample of the first evaluation passes: the best checkpoint is chosen by {best}; "
            "--pass-reward, given at the start of a run, says which reward passes"
        )

    def _score(self, metrics: dict[str, float]) -> float | None:
        """The measurement by which the best checkpoint is kept; higher is better."""
        value = metrics.get(self._evaluation.best) if self._evaluation else None
        return -value if value is not None and self._evaluation.is_lower_better else value

    def _describe(
        self, step: int, groups: Sequence[Group], sequences: Sequence[TrainingSequence]
    ) -> dict[str, float]:
        """Metrics of a step's samples, which are recorded."""
        if not groups:
            return self._describe_empty(step)
        metrics = describe_groups(groups) | self._rollout.metrics()
        is_recorded = self._cfg.is_recorded(step)
        fields = ("advantages", "entropies", "mismatches")
        learnt = (sampled_numbers(sequences, name) for name in fields)
        self._run.write_rollouts(step, groups, *learnt, is_recorded=is_recorded)
        self._note_dropped(step, with_filtered=is_recorded)
        metrics |= self.state.metrics | self._roles.metrics
        for name, measure in self._group_metrics.items():
            if name in metrics:
                raise UserError(
                    f"{where(measure)}: METRICS has {name!r}, which is a metric of every run; give "
                    "it another name"
                )
            found = measure(groups)
            if not isinstance(found, SupportsFloat):
                raise UserError(
                    f"{where(measure)}: metric {name!r} returned {found!r}; return a number"
                )
            metrics[name] = float(found)
        return metrics | {"rollout/trained_samples": len(sample_runs(sequences))}

    def _describe_empty(self, step: int) -> dict[str, float]:
        """Metrics of a step that is skipped, as all its groups were dropped."""
        for empty in self._rollout.empty_steps[-1:]:  # none if the prompts have ended
            self._run.note("skipped", step, why=empty.why)
            self._run.print(f"step {step} is skipped: {empty.why}")
        self._note_dropped(step, with_filtered=self._cfg.is_recorded(step))
        return self._rollout.metrics() | self._roles.metrics | {"rollout/skipped_steps": 1.0}

    def _note_dropped(self, step: int, *, with_filtered: bool) -> None:
        if self._rollout:
            self._run.note_samples(step, self._rollout.dropped(), with_filtered=with_filtered)

    def _print_rates(self) -> None:
        is_graded = self._evaluation is not None and self._evaluation.best == "eval/reward"
        what, values = ("reward", "rewards") if is_graded else ("pass rate", "rates")
        found = getattr(self._evaluation, values, ())
        if len(found) > 1:
            resumed_at = self._saved.resumed_at
            since = f" since step {resumed_at}" if resumed_at else ""
            print(f"held-out {what} {found[0]:.3f} -> {found[-1]:.3f}{since}")
