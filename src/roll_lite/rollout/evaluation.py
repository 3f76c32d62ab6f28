"""Evaluation during training: pass rates on held-out prompts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll_lite.checks import at_least, finite
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.groups import refuse_all_failed
from roll_lite.rollout.metrics import pass_rates
from roll_lite.stopping import Stopped
from roll_lite.types import Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Evaluation on held-out prompts during training."""

    eval_every: int = 10
    """Steps between evaluations; there is also one before the first step and after the last."""
    eval_data: tuple[str, ...] = ()
    """Prompt files or tasks to evaluate on; by default held-out questions of the tasks in data."""
    eval_prompts: int = 256
    """Most prompts to use of each file or task."""
    eval_samples: int = 1
    """Samples per prompt: 1 is greedy, more are sampled at `temperature` (pass@1 and pass@k)."""
    pass_reward: float = 1.0
    """Smallest reward with which a sample passes."""

    def __post_init__(self):
        at_least(1, self, "eval_prompts", "eval_samples", "eval_every")
        finite(self, "pass_reward")


class Evaluation:
    """Evaluates on the same prompts every time, whatever the seed of the run."""

    def __init__(
        self, prompts: Sequence[Prompt], options: EvaluationOptions, params: SamplingParams
    ):
        """`params` are those of training; with one sample per prompt the temperature is 0."""
        self._prompts, self._options = prompts, options
        self._params = params if options.eval_samples > 1 else replace(params, temperature=0.0)
        self.rates: list[float] = []
        """Pass rates of all evaluations so far."""

    def run(self, rollout: Coordinator) -> dict[str, float]:
        """Pass rates and seconds; empty without prompts, and when the run is to stop."""
        if not self._prompts:
            return {}
        start = time.perf_counter()
        num_samples = self._options.eval_samples
        try:
            groups = rollout.answer(self._prompts, num_samples=num_samples, params=self._params)
        except Stopped:  # the step itself is complete; its end notices the request
            return {}
        refuse_all_failed(groups)
        metrics = pass_rates(groups, self._options.pass_reward)
        self.rates.append(metrics["eval/pass@1"])
        return metrics | {"time/evaluate": time.perf_counter() - start}
