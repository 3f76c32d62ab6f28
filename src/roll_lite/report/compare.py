"""Runs side by side as text: options that differ, metrics at equal steps and at equal seconds."""

from collections.abc import Sequence
from typing import Any

from roll_lite.report.overview import differences, elapsed
from roll_lite.report.reader import Row, RunFolder

COMPARED = (
    "eval/pass@1", "eval/loss", "eval/accuracy", "eval/kl", "reward/mean", "loss/loss",
    "loss/entropy", "loss/kl", "loss/clip_fraction", "loss/grad_norm", "mismatch/logprob_mean",
    "rollout/reply_tokens", "rollout/truncated", "rollout/staleness", "train/tokens_per_second",
    "time/step",
)  # fmt: skip


def comparison(runs: Sequence[RunFolder]) -> str:
    """Three tables. Metrics that are not of every step are those of the last step that has them."""
    names = [str(run.folder) for run in runs]
    differing = [[name, *map(_text, values)] for name, values in differences(runs).items()]
    parts = [_table(["options that differ", *names], differing or [["none", *["" for _ in runs]]])]
    have = [run for run in runs if run.rows]
    if len(have) < len(runs):
        return "\n\n".join([*parts, "a run has no metrics yet, so none are compared"])
    step = min(run.rows[-1]["step"] for run in runs)
    at_step = [[row for row in run.rows if row["step"] <= step] for run in runs]
    parts.append(_metrics(f"at step {step}", names, at_step))
    seconds = min(elapsed(run)[-1] for run in runs)
    in_time = [_rows_within(run, seconds) for run in runs]
    reached = ["step", *(str(rows[-1]["step"]) if rows else "-" for rows in in_time)]
    parts.append(_metrics(f"after {seconds:.1f} s of running", names, in_time, reached))
    return "\n\n".join(parts)


def _rows_within(run: RunFolder, seconds: float) -> list[Row]:
    return [row for row, at in zip(run.rows, elapsed(run), strict=True) if at <= seconds]


def _metrics(title: str, names: list[str], rows: list[list[Row]], *first: list[str]) -> str:
    values = [[metric, *(_text(latest(part, metric)) for part in rows)] for metric in COMPARED]
    known = [line for line in values if any(cell != "-" for cell in line[1:])]
    return _table([title, *names], [*first, *known])


def latest(rows: Sequence[Row], metric: str) -> float | None:
    """The metric in the last row that has it."""
    return next((row[metric] for row in reversed(rows) if metric in row), None)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(head: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    rows = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in [head, *lines]
    ]
    return "\n".join("  ".join(row).rstrip() for row in rows)
