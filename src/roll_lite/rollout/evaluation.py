"""Evaluation on held-out prompts: when and on what, its pass rates, and the file of its answers.

The metrics of a training step's groups are here too: they share most formulas with pass rates.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from roll_lite import data
from roll_lite.checks import UserError, at_least, finite, refuse_changes, unread_with
from roll_lite.files import own_content
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.record import read_group, write_group
from roll_lite.stopping import Stopped
from roll_lite.types import Group, Prompt, Sample, SamplingParams


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Evaluation on held-out prompts during training."""

    eval_every: int = 10
    """Steps between evaluations; there is also one before the first step and after the last. 0 is
    never."""
    eval_data: tuple[str, ...] = ()
    """Prompt files or tasks to evaluate on; by default held-out prompts of the tasks in data."""
    eval_share: float = 0.0
    """Share of the rows of each file in data that is evaluated on and never trained on."""
    eval_prompts: int = 256
    """Most prompts to use of each file or task."""
    eval_samples: int = 1
    """Samples per prompt: 1 is greedy, more are sampled at `temperature` (pass@1 and pass@k)."""
    pass_reward: float | None = None
    """Smallest reward with which a sample passes; None is 1.0, and if no sample of the first
    evaluation passes, the best checkpoint is that of the highest mean reward instead."""

    def __post_init__(self):
        at_least(1, self, "eval_prompts", "eval_samples")
        at_least(0, self, "eval_every")
        finite(self, "pass_reward")
        if not 0 <= self.eval_share < 1:
            raise UserError(f"eval_share={self.eval_share} must be at least 0 and below 1")
        if self.eval_data:
            unread_with("eval_data", self, "eval_share")

    @property
    def least_to_pass(self) -> float:
        return 1.0 if self.pass_reward is None else self.pass_reward

    def prompts(
        self,
        entries: Sequence[str],
        envs: Collection[str] = (),
        read: Callable[[str], list[Prompt]] = data.read_prompts,
    ) -> list[Prompt]:
        """Held-out questions of the tasks and tasks of the environments in `entries` and, with
        eval_share, rows of the files, unless eval_data names others."""
        share = self.eval_share or None
        sources = self.eval_data or tuple(
            entry.source
            for entry in data.parse_mixture(entries, envs)
            if entry.kind != "file" or share
        )
        if not sources or self.eval_every == 0:
            return []
        return data.held_out(sources, self.eval_prompts, share=share, envs=envs, read=read)


class Evaluation:
    """Evaluates on the same prompts every time, whatever the seed of the run."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        options: EvaluationOptions,
        params: SamplingParams,
        *,
        kl_to_teacher: Callable[[list[Group]], float] | None = None,
    ):
        """`params` are those of training; with one sample per prompt the temperature is 0.

        Where a teacher is the only signal, `kl_to_teacher` of the samples is what counts.
        """
        self._prompts = prompts
        self._options = options
        self._kl_to_teacher = kl_to_teacher
        self.every = options.eval_every
        self.best = "eval/kl" if kl_to_teacher else "eval/pass@1"
        self.is_lower_better = kl_to_teacher is not None
        self._is_decided = bool(kl_to_teacher) or options.pass_reward is not None
        """Whether `best` is what it will be until the end of the run."""
        is_greedy = options.eval_samples == 1 and not kl_to_teacher
        self._params = params.greedy if is_greedy else params
        self.rates: list[float] = []
        """Pass rates of all evaluations so far."""
        self.rewards: list[float] = []
        """Mean rewards of them."""
        self.groups: list[Group] = []
        """Answers of the last evaluation, if it came to its end."""

    def run(self, rollout: Coordinator) -> dict[str, float]:
        """Pass rates and seconds; empty without prompts, and when the run is to stop."""
        self.groups = []
        if not self._prompts:
            return {}
        start = time.perf_counter()
        num_samples = self._options.eval_samples
        try:
            answers = rollout.answer(self._prompts, num_samples=num_samples, params=self._params)
        except Stopped:  # the step itself is complete; its end notices the request
            return {}
        self.groups = answers
        refuse_all_failed(answers)
        metrics = pass_rates(answers, self._options.least_to_pass)
        if self._kl_to_teacher:
            metrics["eval/kl"] = self._kl_to_teacher(answers)
        else:
            self.rates.append(metrics["eval/pass@1"])
            self.rewards.append(metrics["eval/reward"])
        self._decide(metrics, answers)
        return metrics | {"time/evaluate": time.perf_counter() - start}

    def _decide(self, metrics: dict[str, float], answers: list[Group]) -> None:
        """Where no answer passes, rewards are graded, and pass rates would say nothing; unless
        environments measure success, which comes with time."""
        samples = [sample for group in answers for sample in group.samples if sample.score]
        measures_success = any("success" in sample.score.parts for sample in samples)
        if not (self._is_decided or measures_success or metrics["eval/pass@1"]):
            self.best = "eval/reward"
        self._is_decided = True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "is_decided": self._is_decided}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was decided stays, so that scores of checkpoints can be compared."""
        if self._options.pass_reward is not None and state["best"] == "eval/reward":
            raise UserError(
                f"pass_reward={self._options.pass_reward} with --resume: the best checkpoint of "
                "this run is chosen by eval/reward; leave it out, or start another run with "
                "--config RUN/config.json"
            )
        self.best = state["best"]
        self._is_decided = state["is_decided"]


def refuse_all_failed(groups: list[Group]) -> None:
    """Raise the first error if no sample is scored: there is nothing to measure."""
    samples = [sample for group in groups for sample in group.samples]
    if any(sample.state == "done" for sample in samples):
        return
    errors = [sample.error for sample in samples if sample.error]
    raise RuntimeError(
        f"no sample is left: {len(errors)} samples failed. The first error:\n"
        + (errors[0] if errors else "(none)")
    )


class AnswerFile:
    """Answers of an evaluation, written as they come, so that a killed one continues.

    JSON lines: first the options that the answers depend on, then groups in any order.
    """

    def __init__(self, path: str | Path, prompts: Sequence[Prompt], fixed: dict[str, Any]):
        """Reads an existing file, which must have been started with the same `fixed` options."""
        self._path = Path(path)
        self._num_prompts = len(prompts)
        self.groups: dict[int, Group] = {}
        """By the place of their prompt."""
        rows = self._read()
        if rows:
            refuse_changes(self._path.parent, rows[0], fixed)
        for row in rows[1:]:
            place = row["place"]
            group = read_group(row)
            # The prompt may have changed since, and failed samples may succeed now.
            is_wanted = place < len(prompts) and prompts[place] == group.prompt
            if is_wanted and all(sample.state == "done" for sample in group.samples):
                self.groups[place] = group
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        if not rows:
            self._write(fixed)

    @property
    def missing(self) -> list[int]:
        """Places of the prompts that have no answers yet."""
        return [place for place in range(self._num_prompts) if place not in self.groups]

    def keep(self, place: int, group: Group) -> None:
        self.groups[place] = group
        self._write({"place": place, **write_group(group)})

    def remove(self) -> None:
        self._file.close()
        self._path.unlink()

    def _read(self) -> list[dict[str, Any]]:
        """All complete lines; a last line that was cut short is removed from the file."""
        if not self._path.exists():
            return []
        whole, end, _ = self._path.read_bytes().rpartition(b"\n")
        own_content(self._path)
        os.truncate(self._path, len(whole + end))
        return [json.loads(line) for line in whole.splitlines()]

    def _write(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), file=self._file, flush=True)


def describe_groups(groups: list[Group]) -> dict[str, float]:
    """Rewards and lengths of all samples, and the same for each of several domains and files.

    A group is solved if any of its rewards is above 0, and equal if all its rewards are.
    """
    samples = [sample for group in groups for sample in group.samples]
    done = [sample for sample in samples if sample.state == "done"]
    rewards = [[s.score.value for s in g.samples if s.score] for g in groups]
    values = [sample.score.value for sample in done] or [0.0]
    return {
        **_parts("reward", done),
        "reward/mean": fmean(values),
        "reward/std": pstdev(values),
        "reward/min": min(values),
        "reward/max": max(values),
        "reward/solved_groups": fmean(any(r > 0 for r in group) for group in rewards),
        "reward/equal_groups": fmean(len(set(group)) < 2 for group in rewards),
        **_by_subset(groups),
        **_lengths([sample.num_sampled for sample in samples]),
        "rollout/truncated": fmean(s.is_cut for s in samples),
        **_episodes("rollout", samples),
    }


def _lengths(counts: list[int]) -> dict[str, float]:
    """Mean, longest and percentiles of replies; a percentile is the length of a reply."""
    counts = sorted(counts)
    shares = {f"p{p}": counts[ceil(p / 100 * len(counts)) - 1] for p in (50, 90, 99)}
    return {
        "rollout/reply_tokens": fmean(counts),
        **{f"rollout/reply_tokens_{name}": count for name, count in shares.items()},
        "rollout/longest_reply": counts[-1],
    }


def _parts(prefix: str, done: list[Sample]) -> dict[str, float]:
    """Mean of each part of the reward, over the samples that have it."""
    values: dict[str, list[float]] = {}
    for sample in done:
        for name, value in sample.score.parts.items():
            values.setdefault(name, []).append(value)
    return {f"{prefix}/{name}": fmean(values[name]) for name in sorted(values)}


def _episodes(prefix: str, samples: list[Sample]) -> dict[str, float]:
    """Turns, and shares of the reasons why episodes ended, if there are episodes."""
    ended = [sample.end for sample in samples if sample.end not in ("", "returned")]
    if not ended and all(len(sample.turns) < 2 for sample in samples):
        return {}
    return {
        f"{prefix}/turns": fmean(len(sample.turns) for sample in samples),
        f"{prefix}/sequences": fmean(len(sample.sequences) for sample in samples),
        **{f"{prefix}/end_{end}": ended.count(end) / len(samples) for end in sorted(set(ended))},
    }


def _by_subset(groups: list[Group]) -> dict[str, float]:
    """Reward, its parts and the share of groups."""
    metrics: dict[str, float] = {}
    for name, members in subsets_of(groups).items():
        done = [s for group in members for s in group.samples if s.state == "done"]
        metrics[f"rollout/{name}/share"] = len(members) / len(groups)
        if done:
            metrics |= _parts(f"reward/{name}", done)
            metrics[f"reward/{name}/mean"] = fmean(s.score.value for s in done)
    return metrics


def pass_rates(groups: list[Group], pass_reward: float = 1.0) -> dict[str, float]:
    """Share of samples that pass (pass@1), and of prompts with one that does (pass@k).

    An episode passes with a `success` of 1, if it measures that; any other sample with a reward of
    at least `pass_reward`. Failed samples count neither as passed nor as not passed. Several
    domains, and several files of one domain, also have metrics of their own.
    """
    metrics = _pass_rates("eval", groups, pass_reward)
    for name, members in subsets_of(groups).items():
        metrics |= _pass_rates(f"eval/{name}", members, pass_reward)
    samples = [sample for group in groups for sample in group.samples]
    return metrics | {
        "eval/failed": sum(sample.state != "done" for sample in samples),
        "eval/reply_tokens": fmean(sample.num_sampled for sample in samples),
        "eval/truncated": fmean(sample.is_cut for sample in samples),
    }


def _pass_rates(prefix: str, groups: list[Group], pass_reward: float) -> dict[str, float]:
    done = [[s for s in g.samples if s.state == "done"] for g in groups]
    passed = [[s.score.passes(pass_reward) for s in samples] for samples in done if samples]
    if not passed:
        return {}
    num_samples = max(len(group.samples) for group in groups)
    finished = [sample for samples in done for sample in samples]
    metrics = {
        f"{prefix}/reward": fmean(s.score.value for s in finished),
        # The mean of the groups' means: every prompt has the same weight.
        f"{prefix}/pass@1": fmean(map(fmean, passed)),
    }
    if episodes := _episodes(prefix, finished):
        metrics = _parts(prefix, finished) | episodes | metrics
    return metrics | (
        {f"{prefix}/pass@{num_samples}": fmean(map(any, passed))} if num_samples > 1 else {}
    )


def subsets_of(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Groups by domain, if there are several, and by file, where a domain has several."""
    by_domain: dict[str, list[Group]] = {}
    for group in groups:
        by_domain.setdefault(group.prompt.domain, []).append(group)
    subsets = dict(sorted(by_domain.items())) if len(by_domain) > 1 else {}
    for domain, members in sorted(by_domain.items()):
        files: dict[str, list[Group]] = {}
        for group in members:
            files.setdefault(group.prompt.source, []).append(group)
        for source, own in sorted(files.items()) if len(files) > 1 else ():
            name = source or "generated"
            subsets[f"{domain}-{name}" if name in subsets or name in by_domain else name] = own
    return subsets
