"""Runs in a terminal: a table of steps, the end of a run, a curve, and runs compared."""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent
from typing import Any

from roll_lite.report.config_file import RECIPE
from roll_lite.report.overview import differences, elapsed, overview
from roll_lite.report.paired import improvement_over
from roll_lite.report.reader import Row, RunFolder, step_of

HEADER_EVERY = 20
"""Rows of the table between two headers."""
WIDTH = 8
"""Characters of a number in the table."""
RARE = {
    "eval/failed", "rollout/failed", "rollout/missing_groups", "rollout/staleness", "env/errors",
    "loss/skipped_steps", "data/truncated", "policy/clip_fraction",
}  # fmt: skip
"""Metrics that get a column once they are not 0."""
COMPARED = (
    "eval/pass@1", "eval/reward", "eval/loss", "eval/accuracy", "eval/kl", "reward/mean",
    "loss/loss", "loss/entropy", "loss/kl", "policy/clip_fraction", "loss/grad_norm",
    "mismatch/logprob_mean", "rollout/reply_tokens", "rollout/truncated", "rollout/staleness",
    "train/tokens_per_second", "time/step",
)  # fmt: skip
RUN_COLUMNS = ("reward/mean", "loss/loss", "loss/entropy", "rollout/reply_tokens", "time/step")
MAX_OPTIONS = 4
"""Options that differ, of a table of runs."""
MAX_VALUE = 32
"""Characters of an option's value in that table."""
BAR = 50
"""Characters of the longest bar of a curve."""
MAX_CHARACTERS = 600
"""Characters of a text of a sample that are shown; its middle is left out."""


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
        self._seen |= {
            name
            for name, value in metrics.items()
            if (value or name not in RARE) and not repeats(name, metrics)
        }

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
        columns: list[str] = []
        left = width - len(_line("step", [])) - 1
        for name, title in self._shown.items():
            if name in self._seen:
                left -= _width(title) + 1
                if left < 0:
                    break
                columns.append(name)
        return columns


def repeats(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether another metric says the same: rewards that are 0 or 1 are passed or not."""
    return name == "eval/reward" and metrics[name] == metrics.get("eval/pass@1")


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


def tail(run: RunFolder, num_steps: int) -> str:
    """The end of a run: where it stands, its last steps, the worst and the best sample."""
    width = shutil.get_terminal_size((100, 24)).columns
    return "\n".join([_title(run), *_step_table(run, num_steps, width), *_samples(run)])


def _title(run: RunFolder) -> str:
    stands = overview(run)
    step = f"step {stands['step']} of {stands['num_steps']}" if run.rows else "no steps yet"
    parts = [f"{run.folder}: {step}"]
    if left := stands["seconds_left"]:
        parts.append(f"{left:.0f} s left at this rate")
    if best := stands["best"]:
        parts.append(f"best {best['metric']} {best['value']:.4g} at step {best['step']}")
    return ", ".join(parts)


def _step_table(run: RunFolder, num_steps: int, width: int) -> Iterator[str]:
    shown = run.starts[-1].get("shown") if run.starts else None
    table = StepTable(shown or {name: name.partition("/")[2] for name in COMPARED})
    for row in run.rows[-num_steps:]:
        table.learn(row)
    for row in run.rows[-num_steps:]:
        yield from table.lines(row["step"], row, width)


def _samples(run: RunFolder) -> Iterator[str]:
    """The worst and the best scored sample of the newest step whose samples were written."""
    names = [name for name in run.names if name.startswith("step_")]
    rows = run.all_samples(names[-1]) if names else ()
    scored = [row for row in rows if row.get("reward") is not None]
    if not scored:
        yield "no scored samples are recorded"
        return
    worst, best = (choose(scored, key=lambda row: row["reward"]) for choose in (min, max))
    chosen = {"the worst": worst, "the best": best} if worst is not best else {"the first": best}
    for title, row in chosen.items():
        equal = "" if worst is not best else ", whose rewards are all equal"
        of = f"of {len(scored)} samples of step {step_of(names[-1])}{equal}"
        yield f"\n{title} {of}: {_describe(row)}"
        yield from shown_messages(row)


def _describe(row: Row) -> str:
    parts = "".join(f", {name} {value:.4g}" for name, value in row.get("parts", {}).items())
    return f"{row.get('prompt_id')}/{row.get('index')}, reward {row['reward']:.4g}{parts}"


def shown_messages(row: Row) -> Iterator[str]:
    """The text of a sample: who says what."""
    for message in _messages(row):
        yield f"  {message.get('role')}:\n{indent(readable(message.get('content')), '    ')}"


def _messages(row: Row) -> list[Row]:
    """The conversation; of a single reply, what it replies to and the reply."""
    if transcript := row.get("transcript"):
        return transcript
    return [*row.get("messages", ())[-1:], {"role": "reply", "content": row.get("reply")}]


def readable(text: object) -> str:
    """A text that does nothing to the terminal, whatever it holds, and is not too long."""
    text = str(text)
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        num_left_out = len(text) - MAX_CHARACTERS
        text = f"{text[:half]} ... {num_left_out:,} characters ... {text[-half:]}"
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def draw_curve(points: Sequence[tuple[int, float]]) -> str:
    """A bar for each step, scaled to the largest value."""
    top = max(*(value for _, value in points), 1e-12)
    return "\n".join(
        f"step {step:>5}  {value:8.4f}  {'#' * round(BAR * value / top)}" for step, value in points
    )


def runs_table(runs: Sequence[RunFolder]) -> str:
    """A row for each run: where it stands, and the last value of each metric."""
    metrics = [n for n in RUN_COLUMNS if any(n in row for run in runs for row in run.rows)]
    options = list(differences(runs))[:MAX_OPTIONS] if len(runs) > 1 else []
    head = ["run", "recipe", "step", "running", "best evaluation", *metrics, *options]
    lines = []
    for run in runs:
        stands = overview(run)
        step = "-" if stands["step"] is None else f"{stands['step']}/{stands['num_steps'] or '?'}"
        best = stands["best"]
        shown = f"{best['metric']} {best['value']:.4g} at {best['step']}" if best else "-"
        last = [_text(_latest(run.rows, name)) for name in metrics]
        own = [_end_of(_text(run.options.get(name))) for name in options]
        who = [str(run.folder), _text(run.config.get(RECIPE))]
        lines.append([*who, step, _duration(stands["seconds"]), shown, *last, *own])
    return _table(head, lines)


def _end_of(text: str) -> str:
    """The end of a long path, which tells runs apart."""
    return text if len(text) <= MAX_VALUE else f"...{text[3 - MAX_VALUE :]}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def comparison(runs: Sequence[RunFolder]) -> str:
    """Three tables. Metrics that are not of every step are those of the last step that has them."""
    names = [str(run.folder) for run in runs]
    differing = [[name, *map(_text, values)] for name, values in differences(runs).items()]
    parts = [_table(["options that differ", *names], differing or [["none", *["" for _ in runs]]])]
    if not all(run.rows for run in runs):
        return "\n\n".join([*parts, "a run has no metrics yet, so none are compared"])
    step = min(run.rows[-1]["step"] for run in runs)
    at_step = [[row for row in run.rows if row["step"] <= step] for run in runs]
    parts.append(_metrics_table(f"at step {step}", names, at_step))
    seconds = min(elapsed(run)[-1] for run in runs)
    in_time = [_rows_within(run, seconds) for run in runs]
    reached = ["step", *(str(rows[-1]["step"]) if rows else "-" for rows in in_time)]
    parts.append(_metrics_table(f"after {seconds:.1f} s of running", names, in_time, reached))
    for run in runs[1:]:
        if found := improvement_over(runs[0], run):
            parts.append(f"last pass rate of {run.folder} over {runs[0].folder}: {found}")
    return "\n\n".join(parts)


def _rows_within(run: RunFolder, seconds: float) -> list[Row]:
    return [row for row, at in zip(run.rows, elapsed(run), strict=True) if at <= seconds]


def _metrics_table(title: str, names: list[str], rows: list[list[Row]], *first: list[str]) -> str:
    values = [[metric, *(_text(_latest(part, metric)) for part in rows)] for metric in COMPARED]
    known = [line for line in values if any(cell != "-" for cell in line[1:])]
    return _table([title, *names], [*first, *known])


def _latest(rows: Sequence[Row], metric: str) -> float | None:
    """The metric in the last row that has it."""
    return next((row[metric] for row in reversed(rows) if metric in row), None)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(head: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    rows = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in [head, *lines]
    ]
    return "\n".join("  ".join(row).rstrip() for row in rows)
