"""Evaluation during training: pass rates on held-out prompts."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from roll_lite import data
from roll_lite.checks import at_least, finite, unread_with
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.metrics import pass_rates
from roll_lite.stopping import Stopped
from roll_lite.types import Group, Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Evaluation on held-out prompts during training."""

    eval_every: int = 10
    """Steps between evaluations; there is also one before the first step and after the last. 0 is
    never."""
    eval_data: tuple[str, ...] = ()
    """Prompt files or tasks to evaluate on; by default held-out questions of the tasks in data."""
    eval_share: float = 0.0
    """Share of the rows of each file in data that is evaluated on and never trained on."""
    eval_prompts: int = 256
    """Most prompts to use of each file or task."""
    eval_samples: int = 1
    """Samples per prompt: 1 is greedy, more are sampled at `temperature` (pass@1 and pass@k)."""
    pass_reward: float = 1.0
    """Smallest reward with which a sample passes."""

    def __post_init__(self):
        at_least(1, self, "eval_prompts", "eval_samples")
        at_least(0, self, "eval_every")
        finite(self, "pass_reward")
        if not 0 <= self.eval_share < 1:
            raise ValueError(f"eval_share={self.eval_share} must be at least 0 and below 1")
        if self.eval_data:
            unread_with("eval_data", self, "eval_share")

    def prompts(self, entries: Sequence[str], envs: Collection[str] = ()) -> list[Prompt]:
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
        return data.held_out(sources, self.eval_prompts, share=share, envs=envs)


class Evaluation:
    """Evaluates on the same prompts every time, whatever the seed of the run."""

    best = "eval/pass@1"
    is_lower_better = False

    def __init__(
        self, prompts: Sequence[Prompt], options: EvaluationOptions, params: SamplingParams
    ):
        """`params` are those of training; with one sample per prompt the temperature is 0."""
        self._prompts, self._options = prompts, options
        self.every = options.eval_every
        self._params = params if options.eval_samples > 1 else replace(params, temperature=0.0)
        self.rates: list[float] = []
        """Pass rates of all evaluations so far."""
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
        metrics = pass_rates(answers, self._options.pass_reward)
        self.rates.append(metrics["eval/pass@1"])
        return metrics | {"time/evaluate": time.perf_counter() - start}


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
