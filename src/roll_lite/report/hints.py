"""Hints for runs that cannot learn: each is printed once, with the remedy."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

Metrics = Mapping[str, float]


class Hint(NamedTuple):
    applies: Callable[[Metrics], bool]
    metric: str
    """The metric that shows it."""
    text: str
    """May name metrics, as in {rollout/truncated}."""
    num_steps: int = 1
    """It is printed when it has applied to this many steps in a row."""


HINTS = (
    Hint(
        lambda m: m.get("rollout/truncated", 0) > 0.9,
        "rollout/truncated",
        "{rollout/truncated:.0%} of the replies were cut at their longest: raise --max-tokens, or "
        "check that the model's template ends replies with a token that stops it",
        2,
    ),
    Hint(
        lambda m: m.get("reward/equal_groups", 0) == 1 and m.get("reward/mean", 1) == 0,
        "reward/mean",
        "every reward was 0 for 5 steps, so nothing is learnt: choose easier prompts, begin with "
        "sft.py, or check the reward with `python -m roll_lite.rewards try`",
        5,
    ),
    Hint(
        lambda m: m.get("reward/equal_groups", 0) == 1 and m.get("reward/mean", 1) != 0,
        "reward/equal_groups",
        "no group had unequal rewards for 5 steps, so nothing is learnt: choose easier or harder "
        "prompts, a reward with more levels, or more --samples-per-prompt",
        5,
    ),
    Hint(
        lambda m: m.get("reward/timeouts", 0) > 0,
        "reward/timeouts",
        "{reward/timeouts:.0f} rewards timed out: raise --reward-seconds or make the reward faster",
    ),
    Hint(
        lambda m: 0 <= m.get("loss/entropy", 1) < 0.01 and "reward/mean" in m,
        "loss/entropy",
        "entropy fell to {loss/entropy:.2g}: samples are nearly equal, and exploration is over; "
        "lower --lr, raise --clip-high, or add --entropy-coef",
        2,
    ),
    Hint(
        lambda m: m.get("loss/skipped_steps", 0) > 0,
        "loss/skipped_steps",
        "an update was skipped because its gradient is not finite: look at the loss, the rewards "
        "and the advantages for nan and inf",
    ),
    Hint(
        lambda m: m.get("rollout/failed", 0) > 0.1 * (m.get("rollout/done", 0) + 1),
        "rollout/failed",
        "{rollout/failed:.0f} samples failed, {rollout/done:.0f} did not: events.jsonl says why",
    ),
    Hint(
        lambda m: m.get("mismatch/outside", 0) > 0.1,
        "mismatch/outside",
        "{mismatch/outside:.0%} of the tokens are more than twice or less than half as likely to "
        "the trainer as when they were sampled: use fewer updates per step or a smaller "
        "--max-staleness, or --denominator old with --correction token",
        2,
    ),
)


class Hints:
    """Reads the metrics of each step."""

    def __init__(self):
        self._in_a_row: Counter[Hint] = Counter()
        self._given: set[Hint] = set()

    def read(self, metrics: Metrics) -> list[str]:
        """Hints that apply now and have not been given."""
        found = []
        for hint in HINTS:
            self._in_a_row[hint] = self._in_a_row[hint] + 1 if hint.applies(metrics) else 0
            if self._in_a_row[hint] >= hint.num_steps and hint not in self._given:
                self._given.add(hint)
                found.append(hint.text.format_map(metrics))
        return found
