"""Where a run stands: time left, best evaluation, warnings; and how the options of runs differ."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from roll_lite.report.reader import Row, RunFolder

Metrics = Mapping[str, float]

EVALUATIONS: dict[str, Callable] = {
    "eval/pass@1": max, "eval/reward": max, "eval/accuracy": max, "eval/loss": min, "eval/kl": min,
}  # fmt: skip
"""The first that a run has is its main evaluation, with the better of two values, unless the run
says which it is."""
RECENT = 10
"""Steps whose median time estimates the time left."""
GRAD_JUMP, BEFORE = 10.0, 20
"""A gradient norm this many times the median of this many steps before it is a warning."""
DROPPED_SHARE = 0.5
NOT_COMPARED = {"run_dir", "resume", "from_hub"}


class Hint(NamedTuple):
    """A message about a run that cannot learn, with the remedy; it is printed once."""

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
        "sft.py, or check the reward with `roll-lite rewards try`",
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
        "the trainer as when they were sampled, before any update: use a smaller --max-staleness, "
        "or --denominator old with --correction token",
        2,
    ),
    Hint(
        lambda m: m.get("policy/outside", 0) > 0.1 >= m.get("mismatch/outside", 0),
        "policy/outside",
        "the updates of a step made {policy/outside:.0%} of the tokens more than twice or less "
        "than half as likely: use fewer updates per step or epochs, or a lower --lr",
        2,
    ),
)


class Hints:
    """Reads the metrics of each step of a run that goes on."""

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


def overview(run: RunFolder) -> Row:
    """Plain data: step, steps, phase, seconds, time left, best evaluation, warnings."""
    seconds = elapsed(run)
    last = run.rows[-1] if run.rows else {}
    return {
        "step": last.get("step"),
        "num_steps": run.num_steps,
        "phase": run.phase,
        "seconds": seconds[-1] if seconds else None,
        "age": time.time() - last["time"] if "time" in last else None,
        "seconds_left": _seconds_left(run, seconds),
        "best": best_evaluation(run),
        "warnings": warnings(run.rows),
    }


def elapsed(run: RunFolder) -> list[float]:
    """Seconds of the run up to each row of its metrics, without the time between two starts."""
    resumes = [event.get("time", 0.0) for event in run.events if event.get("event") == "resumed"]
    seconds: list[float] = []
    total = 0.0
    before = None
    for row in run.rows:
        now = row.get("time", 0.0)
        is_first = before is None or any(before <= resume <= now for resume in resumes)
        total += row.get("time/step", 0.0) if is_first else max(0.0, now - before)
        seconds.append(total)
        before = now
    return seconds


def _seconds_left(run: RunFolder, seconds: list[float]) -> float | None:
    if not run.num_steps or len(seconds) < 2:
        return None
    pairs = list(zip(run.rows, seconds, strict=True))[-RECENT - 1 :]
    steps = pairs[-1][0]["step"] - pairs[0][0]["step"]
    if steps < 1:
        return None
    return (pairs[-1][1] - pairs[0][1]) / steps * max(0, run.num_steps - pairs[-1][0]["step"])


def best_evaluation(run: RunFolder) -> Row | None:
    rows = run.rows
    said = [event.get("metric") for event in run.events if event.get("event") == "best_by"]
    for name in sorted(EVALUATIONS, key=lambda name: name not in said[-1:]):
        better = EVALUATIONS[name]
        if found := [row for row in rows if name in row and row[name] == row[name]]:  # not nan
            best = better(found, key=lambda row: row[name])
            last = found[-1]
            return {
                "metric": name, "value": best[name], "step": best["step"],
                "first": found[0][name], "last": last[name], "last_step": last["step"],
            }  # fmt: skip
    return None


def warnings(rows: Sequence[Row]) -> list[Row]:
    """Hints that apply to the run's metrics, and jumps and shares that need its history."""
    found = [_hint_warning(hint, rows) for hint in HINTS]
    return [warning for warning in [*found, _grad_warning(rows), _dropped_warning(rows)] if warning]


def _warning(metric: str, rows: list[Row], text: str) -> Row:
    return {
        "metric": metric, "text": text, "num_steps": len(rows),
        "step": rows[0]["step"], "last_step": rows[-1]["step"],
    }  # fmt: skip


def _hint_warning(hint: Hint, rows: Sequence[Row]) -> Row | None:
    in_a_row = 0
    found = []
    for row in rows:
        in_a_row = in_a_row + 1 if hint.applies(row) else 0
        if in_a_row >= hint.num_steps:
            found.append(row)
    if not found:
        return None
    return _warning(hint.metric, found, hint.text.format_map(found[0]))


def _grad_warning(rows: Sequence[Row]) -> Row | None:
    name = "loss/grad_norm"
    before: list[float] = []
    found: list[Row] = []
    text = ""
    for row in rows:
        norm = row.get(name, 0.0)
        usual = median(before[-BEFORE:]) if len(before) >= BEFORE // 2 else 0.0
        if usual and norm > GRAD_JUMP * usual:
            found.append(row)
            text = text or f"the gradient norm jumped to {norm:.3g}, from a usual {usual:.3g}"
        if norm:
            before.append(norm)
    return _warning(name, found, text) if found else None


def _dropped_warning(rows: Sequence[Row]) -> Row | None:
    found = [row for row in rows if _dropped_share(row) > DROPPED_SHARE]
    if not found:
        return None
    text = f"{_dropped_share(found[0]):.0%} of the samples were filtered, aborted or failed"
    return _warning("rollout/filtered", found, f"{text}: see the dropped samples and their reasons")


def _dropped_share(row: Row) -> float:
    lost = sum(row.get(f"rollout/{state}", 0) for state in ("filtered", "aborted", "failed"))
    return lost / max(1, row.get("rollout/started", 0))


def differences(runs: Sequence[RunFolder]) -> dict[str, list[Any]]:
    """Options whose values differ where runs have them, with the value of each run; None where it
    has none. Those that more of the runs have come before others."""
    all_options = [run.options for run in runs if run.options]
    names = Counter(name for options in all_options for name in options if name not in NOT_COMPARED)
    found = {}
    for name, _ in names.most_common():
        values = [options[name] for options in all_options if name in options]
        if any(value != values[0] for value in values):
            found[name] = [run.options.get(name) for run in runs]
    return found
