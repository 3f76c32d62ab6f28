"""How much better the answers of one evaluation are than those of another to the same prompts.

Prompts differ more than two checkpoints do on one of them. So the difference is taken prompt by
prompt, over all samples of a prompt, and the interval is that of the mean of these differences.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, fmean, stdev, variance
from typing import NamedTuple

from roll_lite.report.reader import RunFolder
from roll_lite.report.records import opening, read_prompt
from roll_lite.types import Score

FEWEST = 5
"""Prompts, below which an interval would say little."""


class Improvement(NamedTuple):
    """A mean difference of shares that pass, and half of its 95% interval."""

    mean: float
    half: float
    half_unpaired: float
    """What it would be if the prompts were not the same."""
    num_prompts: int

    def __str__(self) -> str:
        low, high = self.mean - self.half, self.mean + self.half
        wider = f"{self.half_unpaired / self.half:.1f} times as wide" if self.half else "wider"
        return (
            f"{self.mean:+.3f} (95% interval {low:+.3f} to {high:+.3f}, by {self.num_prompts} "
            f"prompts; unpaired it would be {wider})"
        )


def improvement(before: Mapping[str, float], after: Mapping[str, float]) -> Improvement | None:
    """Of shares by prompt, over the prompts that both have; None for too few, and
    where nothing passes."""
    shared = sorted(before.keys() & after.keys())
    num = len(shared)
    old, new = ([shares[prompt] for prompt in shared] for shares in (before, after))
    if num < FEWEST or not any(old + new):
        return None
    differences = [b - a for a, b in zip(old, new, strict=True)]
    half = students_t(num - 1) * stdev(differences) / math.sqrt(num)
    apart = students_t(2 * num - 2) * math.sqrt((variance(old) + variance(new)) / num)
    return Improvement(fmean(differences), half, apart, num)


def students_t(freedom: int) -> float:
    """The quantile at 0.975, by the expansion in 1/freedom (Abramowitz and Stegun 26.7.5)."""
    x = NormalDist().inv_cdf(0.975)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, 1))


def improvement_since_first(run: RunFolder) -> Improvement | None:
    """At the last evaluation of a run."""
    names = [name for name in run.names if name.startswith("eval_")]
    if len(names) < 2:
        return None
    return improvement(pass_shares(run, names[0]), pass_shares(run, names[-1]))


def improvement_over(other: RunFolder, run: RunFolder) -> Improvement | None:
    """Of the last evaluation of a run over that of another; None if they share few prompts."""
    names = [_last_evaluation(each) for each in (other, run)]
    if not all(names):
        return None
    return improvement(pass_shares(other, names[0]), pass_shares(run, names[1]))


def _last_evaluation(run: RunFolder) -> str | None:
    """Its name; the samples of evaluate.py are those of step 0."""
    names = [name for name in run.names if name.startswith("eval_") or name == "step_00000"]
    return names[-1] if names else None


def pass_shares(run: RunFolder, name: str) -> dict[str, float]:
    """By prompt, the share of the samples that pass, in the evaluation of a name."""
    path = run.folder / "rollouts" / f"{name}.jsonl"
    least = run.options.get("pass_reward")
    return _pass_shares(path, path.stat().st_mtime_ns, 1.0 if least is None else least)


@lru_cache(maxsize=32)
def _pass_shares(path: Path, changed: int, least: float) -> dict[str, float]:
    passed: dict[str, list[bool]] = {}
    for row in RunFolder(path.parents[1]).all_samples(path.stem):
        with suppress(KeyError, TypeError, ValueError):  # a line of another shape
            has_passed = Score(value=row["reward"], parts=row["parts"]).passes(least)
            if row["state"] == "done":
                passed.setdefault(opening(read_prompt(row)), []).append(has_passed)
    return {prompt: fmean(found) for prompt, found in passed.items()}
