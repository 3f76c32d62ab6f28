"""How much better the answers of one evaluation are than those of another to the same prompts.

Prompts differ more than two checkpoints do on one of them. So the shares of samples that pass are
subtracted prompt by prompt, and the interval is that of the mean of these differences.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import sqrt
from statistics import NormalDist, fmean, stdev, variance
from typing import NamedTuple

from roll_lite.report.reader import RunFolder
from roll_lite.report.records import opening, read_prompt
from roll_lite.types import Score

FEWEST = 10
"""Prompts, below which an interval would say little."""


class Improvement(NamedTuple):
    mean: float
    half: float
    """Half of the 95% interval."""
    half_unpaired: float
    """The same if the prompts were not the same."""
    num_prompts: int

    def __str__(self) -> str:
        low, high = self.mean - self.half, self.mean + self.half
        return (
            f"{self.mean:+.3f} (95% interval {low:+.3f} to {high:+.3f}, by {self.num_prompts} "
            f"prompts; ±{self.half:.3f}, and unpaired ±{self.half_unpaired:.3f})"
        )


def improvement(before: Mapping[str, float], after: Mapping[str, float]) -> Improvement | None:
    """Of shares by prompt; None for few prompts that both have, and where nothing passes."""
    shared = sorted(before.keys() & after.keys())
    old, new = ([shares[prompt] for prompt in shared] for shares in (before, after))
    num = len(shared)
    if num < FEWEST or not any(old + new):
        return None
    differences = [b - a for a, b in zip(old, new, strict=True)]
    spread = students_t(num - 1) * stdev(differences) / sqrt(num)
    half = spread or 3 / num  # the rule of three: no prompt differs from the others
    apart = students_t(2 * num - 2) * sqrt((variance(old) + variance(new)) / num)
    return Improvement(fmean(differences), half, apart, num)


def students_t(freedom: int) -> float:
    """The quantile at 0.975, by the expansion in 1/freedom (Abramowitz and Stegun 26.7.5)."""
    x = NormalDist().inv_cdf(0.975)
    second = (5 * x**5 + 16 * x**3 + 3 * x) / 96
    third = (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384
    return x + (x**3 + x) / 4 / freedom + second / freedom**2 + third / freedom**3


def improvement_over(before: RunFolder, after: RunFolder) -> Improvement | None:
    """Of the last evaluation of a run over that of another or, of one run, over its first."""
    names = [_evaluations(run) for run in (before, after)]
    if not all(names) or (before is after and len(names[0]) < 2):
        return None
    first = names[0][0 if before is after else -1]
    given = after.options.get("pass_reward")
    least = 1.0 if given is None else given
    old = pass_shares(before, first, least)
    return improvement(old, pass_shares(after, names[1][-1], least))


def _evaluations(run: RunFolder) -> list[str]:
    """Their names; the samples of evaluate.py are those of step 0."""
    return [name for name in run.names if name.startswith("eval_") or name == "step_00000"]


def pass_shares(run: RunFolder, name: str, least: float) -> dict[str, float]:
    """By prompt, the share of its samples that pass."""
    passed: dict[str, list[bool]] = {}
    for row in run.all_samples(name):
        with suppress(KeyError, TypeError, ValueError):  # a line of another shape
            has_passed = Score(value=row["reward"], parts=row["parts"]).passes(least)
            if row["state"] == "done":
                passed.setdefault(opening(read_prompt(row)), []).append(has_passed)
    return {prompt: fmean(found) for prompt, found in passed.items()}
