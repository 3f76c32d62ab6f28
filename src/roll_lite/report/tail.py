"""The end of a run in the terminal: its last steps as a table, and the worst and best sample."""

import shutil
from collections.abc import Iterator
from textwrap import indent

from roll_lite.report.compare import COMPARED
from roll_lite.report.overview import overview
from roll_lite.report.reader import Row, RunFolder, step_of
from roll_lite.report.table import StepTable

MAX_CHARACTERS = 600
"""Of a text; its middle is left out."""


def tail(run: RunFolder, num_steps: int) -> str:
    width = shutil.get_terminal_size((100, 24)).columns
    samples = _samples(run)
    return "\n".join([_title(run), *_table(run, num_steps, width), *samples])


def _title(run: RunFolder) -> str:
    stands = overview(run)
    step = f"{run.folder}: step {stands['step']} of {stands['num_steps']}"
    best, left = stands["best"], stands["seconds_left"]
    parts = [step if run.rows else f"{run.folder}: no steps yet"]
    if left:
        parts.append(f"{left:.0f} s left at this rate")
    if best:
        parts.append(f"best {best['metric']} {best['value']:.4g} at step {best['step']}")
    return ", ".join(parts)


def _table(run: RunFolder, num_steps: int, width: int) -> Iterator[str]:
    shown = run.starts[-1].get("shown") if run.starts else None
    table = StepTable(shown or {name: name.partition("/")[2] for name in COMPARED})
    for row in run.rows[-num_steps:]:
        table.learn(row)
    for row in run.rows[-num_steps:]:
        yield from table.lines(row["step"], row, width)


def _samples(run: RunFolder) -> Iterator[str]:
    """The worst and the best scored sample of the newest step whose samples were written."""
    names = [name for name in run.names if name.startswith("step_")]
    scored = (
        [row for row in _read(run, names[-1]) if row.get("reward") is not None] if names else []
    )
    if not scored:
        yield "no scored samples are recorded"
        return
    worst, best = (choose(scored, key=lambda row: row["reward"]) for choose in (min, max))
    chosen = {"the worst": worst, "the best": best} if worst is not best else {"the first": best}
    for title, row in chosen.items():
        equal = "" if worst is not best else ", whose rewards are all equal"
        of = f"of {len(scored)} samples of step {step_of(names[-1])}{equal}"
        yield f"\n{title} {of}: {_describe(row)}"
        for message in _messages(row):
            yield f"  {message.get('role')}:\n{indent(readable(message.get('content')), '    ')}"


def _read(run: RunFolder, name: str) -> Iterator[Row]:
    start: int | None = 0
    while start is not None:
        page = run.samples(name, start)
        yield from page["samples"]
        start = page["next"]


def _describe(row: Row) -> str:
    parts = "".join(f", {name} {value:.4g}" for name, value in row.get("parts", {}).items())
    return f"{row.get('prompt_id')}/{row.get('index')}, reward {row['reward']:.4g}{parts}"


def _messages(row: Row) -> list[Row]:
    """The conversation; of a single reply, what it replies to and the reply."""
    if transcript := row.get("transcript"):
        return transcript
    return [*row.get("messages", ())[-1:], {"role": "reply", "content": row.get("reply")}]


def readable(text: object) -> str:
    """A text that does nothing to the terminal, whatever it holds, and is not too long."""
    text = str(text)
    if len(text) > MAX_CHARACTERS:
        half, num_left_out = MAX_CHARACTERS // 2, len(text) - MAX_CHARACTERS
        text = f"{text[:half]} ... {num_left_out:,} characters ... {text[-half:]}"
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
