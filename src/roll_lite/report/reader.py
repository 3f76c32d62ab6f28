"""A run's folder as plain data, for everything that shows runs. No torch: it starts at once.

A folder may be empty, torn by a crash or still growing: what can be read is read, and `notes` says
what is missing.
"""

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError
from roll_lite.report.config_file import CHOSEN, ENDED, RECIPE, STARTS

Row = dict[str, Any]
DROPPED = "dropped"
"""Samples in events.jsonl, in names such as dropped_00010, beside the files of rollouts/."""
MAX_DEPTH = 100
"""Lists and objects inside each other, of a line; a run's have less than ten."""
RECORDS = ("metrics.jsonl", "events.jsonl", "rollouts")
MAX_FOLDERS = 3
"""Folders inside each other in which runs are looked for."""
_NAME = re.compile(r"(step|eval|dropped)_(\d+)")
_DROPPED_SAMPLE = re.compile(rb'\{"event": ?"sample", ?"step": ?(\d+),')


class JsonLines:
    """The complete lines of a growing file; each reading continues after the last."""

    def __init__(self, path: Path):
        self.path = path
        self.restart()

    def restart(self) -> None:
        self.offset = self.num_broken = 0
        self._inode = self.path.stat().st_ino if self.path.is_file() else None

    @property
    def is_replaced(self) -> bool:
        """Whether a resumed run has written the file anew."""
        if not self.path.is_file():
            return self.offset > 0
        stat = self.path.stat()
        return self.offset > 0 and (stat.st_ino != self._inode or stat.st_size < self.offset)

    @property
    def notes(self) -> list[str]:
        """What is missing of the file."""
        name = self.path.name
        if not self.path.is_file():
            return [f"{name} is missing"]
        found = {
            f"{name} has no complete line yet": not self.offset,
            f"{name}: broken lines that were skipped: {self.num_broken}": self.num_broken,
            f"{name}: its last line is not complete": self.path.stat().st_size > self.offset,
        }
        return [note for note, applies in found.items() if applies]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Place and text of each line since the last reading."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written, or cut off
                at = self.offset
                self.offset += len(line)
                yield at, line

    def parse(self, line: bytes) -> Row | None:
        row = parse_line(line)
        self.num_broken += row is None
        return row


def parse_line(line: bytes) -> Row | None:
    """The JSON object of a line, or None if it is broken, or too deep for what walks over it."""
    try:
        row = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    is_plain = line.count(b"[") + line.count(b"{") <= MAX_DEPTH
    return row if isinstance(row, dict) and (is_plain or not _is_deep(row)) else None


def _is_deep(row: Row) -> bool:
    level: list[Any] = [row]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [value for part in parts for value in part if isinstance(value, dict | list)]
    return bool(level)


def find_runs(folder: str | Path) -> list[Path]:
    """The folder of a run, or those of all runs below it, by name."""
    folder = Path(folder)
    if not folder.is_dir() or is_run(folder):
        return [folder]
    found: list[Path] = []
    level = [folder]
    for _ in range(MAX_FOLDERS):
        below = [path for each in level for path in each.iterdir() if _may_hold_runs(path)]
        found += filter(is_run, below)
        level = [path for path in below if path not in found]
    if not found:
        raise UserError(f"{folder} is not a run folder, and none is below it")
    return sorted(found)


def is_run(folder: Path) -> bool:
    """Also one that has just begun; the config.json of a model has no starts."""
    if any((folder / name).exists() for name in RECORDS):
        return True
    config = folder / "config.json"
    return config.is_file() and STARTS in (parse_line(config.read_bytes()) or {})


def _may_hold_runs(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


class RunFolder:
    """Options, metrics, events and samples of a run; `refresh` reads what was added since."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"{folder} is not a folder; name a run folder, as runs/a")
        self._metrics = JsonLines(self.folder / "metrics.jsonl")
        self._events = JsonLines(self.folder / "events.jsonl")
        self.num_restarts = 0
        """How often a resumed run has dropped records since this was opened."""
        self._clear()
        self.refresh()

    def _clear(self) -> None:
        self.rows: list[Row] = []
        """The metrics: numbers by name, with `step` and `time`."""
        self.events: list[Row] = []
        """All events but those of dropped samples."""
        self._dropped: dict[int, array] = {}

    def refresh(self) -> None:
        if self._metrics.is_replaced or self._events.is_replaced:
            self.num_restarts += 1
            self._metrics.restart()
            self._events.restart()
            self._clear()
        self.config = self._read_config()
        for _, line in self._metrics:
            row = self._metrics.parse(line)
            if row is not None and isinstance(row.get("step"), int):
                self.rows.append({name: v for name, v in row.items() if _is_number(v)})
        for at, line in self._events:
            self._read_event(at, line)

    def _read_event(self, at: int, line: bytes) -> None:
        """Dropped samples may be gigabytes: only their places are kept."""
        if found := _DROPPED_SAMPLE.match(line):
            self._dropped.setdefault(int(found[1]), array("Q")).append(at)
        elif (row := self._events.parse(line)) is not None:
            self.events.append(row)

    def _read_config(self) -> Row:
        path = self.folder / "config.json"
        return (parse_line(path.read_bytes()) if path.is_file() else None) or {}

    @property
    def options(self) -> Row:
        return {n: v for n, v in self.config.items() if n not in (STARTS, CHOSEN, RECIPE, ENDED)}

    @property
    def starts(self) -> list[Row]:
        starts = self.config.get(STARTS)
        return [s for s in starts if isinstance(s, dict)] if isinstance(starts, list) else []

    def metric(self, name: str) -> list[tuple[int, float]]:
        """Step and value of every step that recorded a metric."""
        points = [(row["step"], row[name]) for row in self.rows if name in row]
        if not points:
            known = ", ".join(
                sorted({name for row in self.rows for name in row} - {"step", "time"})
            )
            raise UserError(f"{self._metrics.path} has no metric {name!r}; it has {known}")
        return points

    @property
    def num_steps(self) -> int | None:
        """Steps that the run is to take, if its options say so."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def phase(self) -> str | None:
        """What the run is doing, or did when it ended: phase, and states that samples are in."""
        path = self.folder / "phase"
        try:
            _, _, phase, *states = (
                path.read_text(errors="replace").split() if path.is_file() else ()
            )
        except (OSError, ValueError):
            return None
        return f"{phase} ({', '.join(states)})" if states else phase

    @property
    def names(self) -> list[str]:
        """Names under which `samples` finds samples, by step: step_00010, eval_00010."""
        paths = filter(Path.is_file, self.folder.glob("rollouts/*.jsonl"))
        names = [path.stem for path in paths if _NAME.fullmatch(path.stem)]
        names += [f"{DROPPED}_{step:05d}" for step in self._dropped]
        return sorted(names, key=lambda name: (step_of(name), name))

    @property
    def effects(self) -> dict[str, list[Row | None]]:
        """What `roll-lite influence` found, by the name of the samples."""
        paths = sorted(self.folder.glob("influence_*.jsonl"))
        lines = {p.stem.replace("influence", "step"): p.read_bytes().splitlines() for p in paths}
        return {name: [*map(parse_line, found)] for name, found in lines.items()}

    @property
    def notes(self) -> list[str]:
        """What is missing, broken or not yet complete."""
        found = []
        if not self.config:
            is_there = (self.folder / "config.json").exists()
            found.append(f"config.json {'cannot be read' if is_there else 'is missing'}")
        found += self._metrics.notes + self._events.notes
        if not any((self.folder / "rollouts").glob("*.jsonl")):
            found.append("rollouts/ has no samples: see --rollouts-every")
        return found

    @property
    def num_sample_bytes(self) -> int:
        sizes = (path.stat().st_size for path in self.folder.glob("rollouts/*.jsonl"))
        return sum(sizes) + (self._events.offset if self._dropped else 0)

    def samples(self, name: str, start: int = 0, max_bytes: int = 2**22) -> Row:
        """Samples of a name from the place `start` on.

        `next` is where to go on, or None at the end; `broken` counts lines that were skipped.
        """
        read: list[Row] = []
        num_bytes = num_broken = 0
        for at, line in self._sample_lines(name, start):
            if read and num_bytes + len(line) > max_bytes:
                return {"samples": read, "next": at, "broken": num_broken}
            if (row := parse_line(line)) is None:
                num_broken += 1
                continue
            num_bytes += len(line)
            read.append({**row, "at": at})
        return {"samples": read, "next": None, "broken": num_broken}

    def all_samples(self, name: str) -> Iterator[Row]:
        """The samples of a name, read in parts."""
        start: int | None = 0
        while start is not None:
            page = self.samples(name, start)
            yield from page["samples"]
            start = page["next"]

    def count_samples(self, name: str) -> int:
        if name.startswith(DROPPED):
            return len(self._dropped.get(step_of(name), ()))
        with self._rollouts(name).open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))

    def _sample_lines(self, name: str, start: int) -> Iterator[tuple[int, bytes]]:
        if name.startswith(DROPPED):
            places = self._dropped.get(step_of(name), ())
            with self._events.path.open("rb") as file:
                for at in places:
                    if at >= start:
                        file.seek(at)
                        yield at, file.readline()
            return
        with self._rollouts(name).open("rb") as file:
            file.seek(start)
            for line in file:
                yield start, line
                start += len(line)

    def _rollouts(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} names no samples; the names are as step_00010")
        return self.folder / "rollouts" / f"{name}.jsonl"


def step_of(name: str) -> int:
    return int(name.partition("_")[2])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


class TokenTexts:
    """The texts of token ids, from the tokenizer of a run's model; `note` says if none is found."""

    def __init__(self, run: RunFolder):
        self._tokenizer = None
        self.note = ""
        folders = [run.folder / "model"]
        if model := run.options.get("model"):
            folders.append(Path(str(model)))
        found = [path for f in folders if (path := f / "tokenizer.json").is_file()]
        if not found:
            self.note = "tokens are shown as numbers: the model's folder with its tokenizer is gone"
            return
        from tokenizers import Tokenizer  # not above: only pages with samples need it

        try:
            self._tokenizer = Tokenizer.from_file(str(found[0]))
        except Exception as error:  # the package raises no narrower type
            self.note = f"tokens are shown as numbers: {found[0]} cannot be read: {error}"

    def of(self, samples: list[Row]) -> dict[int, str]:
        """Texts of all tokens of the samples."""
        if self._tokenizer is None:
            return {}
        lists = [s["token_ids"] for s in samples if isinstance(s.get("token_ids"), list)]
        ids = {i for numbers in lists for i in numbers if isinstance(i, int) and i >= 0}
        return {token_id: self._text(token_id) for token_id in sorted(ids)}

    def _text(self, token_id: int) -> str:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        token = self._tokenizer.id_to_token(token_id) or ""
        # Sentencepiece drops the space before the first word of a text.
        return f" {text}" if token.startswith("▁") and not text.startswith(" ") else text
