"""A run folder with its digests and contracts, for whoever checks or repeats it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError
from roll_lite.report.config_file import ENDED, STARTS
from roll_lite.report.contract import Contract, contract_path, hash_of
from roll_lite.report.digests import FILE, digest_metrics
from roll_lite.report.reader import parse_line

Line = dict[str, Any]
OF_THE_CHAIN = ("step", "contract", "chain")
ORDER = (
    "samples", "batch", "gradient", "clipping", "frozen", "weights", "critic", "answers", "metrics",
)  # fmt: skip
"""In which what a line has digests of comes to be; evaluation follows the update."""


class RecordedRun:
    """Raises UserError for a folder without digests."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise UserError(f"{folder} is not the folder of a run: it has no config.json")
        self.config = json.loads((self.folder / "config.json").read_text())
        self.lines = rows(self.folder / FILE)
        if not self.lines:
            raise UserError(
                f"{folder} has no {FILE}, or no line in it: it was written by evaluate.py, by an "
                "older version, or has not begun; runs of rlvr, agentic, sft, dpo and distill have "
                "it from their first step on"
            )

    @cached_property
    def steps(self) -> dict[int, Line]:
        """Digests by step; an evaluation that was made up has a line of its own."""
        found: dict[int, Line] = {}
        for line in self.lines:
            known = found.setdefault(line["step"], line)
            if known is not line and known["contract"] == line["contract"]:
                both = {"metrics": digest_metrics(self.metrics.get(line["step"], {}))}
                found[line["step"]] = known | line | both
        return found

    @cached_property
    def metrics(self) -> dict[int, Line]:
        found: dict[int, Line] = {}
        for row in rows(self.folder / "metrics.jsonl"):
            found[row["step"]] = found.get(row["step"], {}) | row
        return found

    @property
    def checkpoints(self) -> dict[int, Path]:
        paths = self.folder.glob("checkpoints/step-*")
        found = ((path.name.removeprefix("step-"), path) for path in sorted(paths))
        return {int(number): path for number, path in found if number.isdecimal()}

    def start_before(self, step: int) -> int | None:
        """The checkpoint from which a step can be computed, all under its contract; 0 is the run's
        start."""
        start = max((n for n in self.checkpoints if n < step), default=0)
        contracts = {self.steps[n]["contract"] for n in range(start + 1, step + 1)}
        return start if len(contracts) == 1 else None

    def config_after(self, checkpoint: int) -> Line:
        """config.json without its starts, as it was when the step after a checkpoint was made."""
        config = {name: value for name, value in self.config.items() if name != ENDED}
        step = self.steps.get(checkpoint + 1) or self.steps[max(self.steps)]
        for start in reversed(config.pop(STARTS)):
            if start.get("contract") == step["contract"]:
                break
            config |= {name: old for name, (old, _) in start.get("changed", {}).items()}
        return config

    def contract(self, name: str) -> Contract:
        path = contract_path(self.folder, name)
        if not path.is_file():
            raise UserError(f"{path} is missing: it says what decides the bits of the run")
        contract = json.loads(path.read_text())
        if hash_of(contract) != name:
            raise UserError(f"{path} has changed since it was written: its hash is another")
        return contract

    def contract_of(self, step: int) -> Contract:
        return self.contract(self.steps[step]["contract"])


def rows(path: Path) -> list[Line]:
    """Those that can be read."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [row for line in lines if (row := parse_line(line)) is not None and "step" in row]


def differing(line: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the digests that differ, in the order in which their contents come to be."""
    names = [n for n in {**line, **other} if n not in OF_THE_CHAIN]
    wrong = [name for name in names if line.get(name) != other.get(name)]
    return sorted(wrong, key=_place)


def _place(name: str) -> int:
    kind = name.partition("/")[0]
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def listing(names: Sequence[Any], most: int = 8) -> str:
    shown = ", ".join(map(str, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def described(changed: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What `contract.changes` found, a line for each part."""
    for part in sorted(changed):
        yield f"{part}: {listing(changed[part])}"
