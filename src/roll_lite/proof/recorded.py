"""A run folder with its digests and contracts, for whoever checks or repeats it."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError
from roll_lite.report.contract import Contract, contract_path, hash_of
from roll_lite.report.digests import FILE
from roll_lite.report.reader import parse_line
from roll_lite.report.records import read_prompt, read_tokens
from roll_lite.types import REDUCTIONS, Event, Group, Prompt, Sample, Score, Turn, TurnResult

Line = dict[str, Any]
OF_THE_CHAIN = ("step", "contract", "chain")
ORDER = ("samples", "batch", "gradient", "weights", "critic", "answers", "metrics")
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
            found[line["step"]] = found.get(line["step"], {}) | line
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
        return {int(path.name.removeprefix("step-")): path for path in sorted(paths)}

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
    return sorted(wrong, key=lambda name: ORDER.index(name.partition("/")[0]))


def first_difference(a: RecordedRun, b: RecordedRun) -> tuple[int, Sequence[str]] | None:
    """The first step that both have of which a digest differs."""
    for step in sorted(a.steps.keys() & b.steps.keys()):
        if names := differing(a.steps[step], b.steps[step]):
            return step, names
    return None


def listing(names: Sequence[Any], most: int = 8) -> str:
    shown = ", ".join(map(str, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def described(changed: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What `contract.changes` found, a line for each part."""
    for part in sorted(changed):
        yield f"{part}: {listing(changed[part])}"


# ---- samples as they were trained on


def recorded_groups(lines: Iterable[Line]) -> list[Group]:
    """The groups of a step, from the lines of its samples."""
    groups: dict[tuple[str, int], Group] = {}
    for line in lines:
        key = line["prompt_id"], line["visit"]
        group = groups.setdefault(key, Group(prompt=read_prompt(line), samples=[]))
        group.samples.append(_sample(line, group.prompt))
    return list(groups.values())


def _sample(line: Line, prompt: Prompt) -> Sample:
    score = Score(value=line["reward"], parts=line["parts"])
    about = {name: line[name] for name in ("index", "visit", "seed", "reply", "end")}
    sample = Sample(prompt=prompt, transcript=line.get("transcript", []), score=score, **about)
    sample.events += (Event(*event) for event in line["events"])
    tokens = iter(read_tokens(line))
    turns: dict[int, Turn] = {}
    for order in line.get("sequences", [range(len(line["turns"]))]):
        known: list[int] = []
        for number in order:
            turn = {"state": "", "reward": line["reward"]} | line["turns"][number]
            known += (token.id for token in islice(tokens, turn["read"]))
            said = [*islice(tokens, turn["sampled"])]
            measured = {name: turn[name] for name in REDUCTIONS if name in turn}
            turns[number] = Turn(
                prompt_ids=[*known],
                token_ids=[token.id for token in said],
                logprobs=[token.logprob for token in said],
                finish_reason=turn["finish"],
                versions=[*map(tuple, turn["versions"])],
                state=turn["state"],
                result=TurnResult(reward=turn["reward"], measurements=measured),
            )
            known += turns[number].token_ids
    for number in sorted(turns):
        sample.add_turn(turns[number])
    return sample
