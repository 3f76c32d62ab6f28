"""How a policy does on prompts that it is not trained on, while it is trained."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll_lite.checks import at_least, finite
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.filters import refuse_all_failed
from roll_lite.rollout.metrics import pass_rates
from roll_lite.types import Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Flat, so that the Config of a recipe can inherit them."""

    eval_data: tuple[str, ...] = ()
    """Files of prompts, or tasks, to evaluate on; if none, held-out questions of data's tasks."""
    eval_prompts: int = 256
    """At most so many of each."""
    eval_samples: int = 1
    """Replies to each: one is greedy, more are sampled at `temperature` (pass@1 and pass@k)."""
    pass_reward: float = 1.0
    """A reply passes with at least this reward."""
    eval_every: int = 10
    """Evaluate after every so many steps, before the first and after the last."""

    def __post_init__(self):
        at_least(1, self, "eval_prompts", "eval_samples", "eval_every")
        finite(self, "pass_reward")


class Evaluation:
    """Always of the same prompts, whatever the seed of the run."""

    def __init__(
        self, prompts: Sequence[Prompt], options: EvaluationOptions, params: SamplingParams
    ):
        """`params` are those that the policy is trained with; one reply alone is greedy."""
        self._prompts, self._options = prompts, options
        self._params = params if options.eval_samples > 1 else replace(params, temperature=0.0)
        self.rates: list[float] = []
        """Pass rates of all evaluations so far."""

    def run(self, rollout: Coordinator) -> dict[str, float]:
        """Pass rates and how long it took; nothing where there are no prompts."""
        if not self._prompts:
            return {}
        start = time.perf_counter()
        num_samples = self._options.eval_samples
        groups = rollout.answer(self._prompts, num_samples=num_samples, params=self._params)
        refuse_all_failed(groups)
        metrics = pass_rates(groups, self._options.pass_reward)
        self.rates.append(metrics["eval/pass@1"])
        return metrics | {"time/evaluate": time.perf_counter() - start}
