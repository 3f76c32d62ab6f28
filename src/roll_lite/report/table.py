"""The steps of a run as a table for the terminal."""

import math
from collections.abc import Mapping, Sequence

HEADER_EVERY = 20
"""Rows between two headers."""
WIDTH = 8
"""Characters of a number."""
RARE = {
    "eval/failed", "rollout/failed", "rollout/missing_groups", "rollout/staleness", "env/errors",
    "loss/skipped_steps", "data/truncated",
}  # fmt: skip
"""Metrics that get a column once they are not 0."""


class StepTable:
    """Rows under a header that comes again now and then, and whenever the columns change."""

    def __init__(self, shown: Mapping[str, str]):
        """`shown` maps metrics to the titles of their columns, the most important first."""
        self._shown = shown
        self._seen: set[str] = set()
        self._columns: list[str] = []
        self._num_rows = 0

    def learn(self, metrics: Mapping[str, float]) -> None:
        """Have columns for these metrics from now on."""
        self._seen |= {name for name, value in metrics.items() if value or name not in RARE}

    def lines(self, step: int, metrics: Mapping[str, float], width: int) -> list[str]:
        """The row of a step, below a header if one is due; as many columns as fit the width."""
        self.learn(metrics)
        columns = self._fitting(width)
        row = _line(str(step), [(_width(self._shown[n]), cell(metrics.get(n))) for n in columns])
        is_due = self._num_rows % HEADER_EVERY == 0 or columns != self._columns
        self._num_rows = 1 if is_due else self._num_rows + 1
        self._columns = columns
        titles = [self._shown[name] for name in columns]
        return [_line("step", [(_width(t), t) for t in titles]), row] if is_due else [row]

    def _fitting(self, width: int) -> list[str]:
        columns, left = [], width - len(_line("step", [])) - 1
        for name, title in self._shown.items():
            if name in self._seen:
                left -= _width(title) + 1
                if left < 0:
                    break
                columns.append(name)
        return columns


def cell(value: float | None) -> str:
    """A number of at most WIDTH characters, or nothing."""
    if value is None:
        return ""
    size = abs(value)
    if not math.isfinite(value) or (size and not 1e-3 <= size < 1e6):
        return f"{value:.2g}"
    return f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"


def _width(title: str) -> int:
    return max(WIDTH, len(title))


def _line(step: str, cells: Sequence[tuple[int, str]]) -> str:
    return " ".join([f"{step:>6}", *(text.rjust(width) for width, text in cells)]).rstrip()
