"""Answers of an evaluation under way, written as they come: one that died goes on with the rest."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll_lite.checks import refuse_changes
from roll_lite.rollout.record import read_group, write_group
from roll_lite.types import Group, Prompt


class AnswerFile:
    """JSON lines: what the answers depend on, then groups in any order."""

    def __init__(self, path: str | Path, prompts: Sequence[Prompt], fixed: dict[str, Any]):
        """Reads what is there. Other `fixed` options than it was begun with are refused."""
        self._path = Path(path)
        self._num_prompts = len(prompts)
        self.groups: dict[int, Group] = {}
        """By the place of their prompt."""
        rows = self._read()
        if rows:
            refuse_changes(self._path.parent, rows[0], fixed)
        for row in rows[1:]:
            place, group = row["place"], read_group(row)
            # A prompt may have changed, and what failed may not fail again.
            is_asked = place < len(prompts) and prompts[place] == group.prompt
            if is_asked and all(sample.state == "done" for sample in group.samples):
                self.groups[place] = group
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        if not rows:
            self._write(fixed)

    @property
    def missing(self) -> list[int]:
        """Places of the prompts that have no answers."""
        return [place for place in range(self._num_prompts) if place not in self.groups]

    def keep(self, place: int, group: Group) -> None:
        self.groups[place] = group
        self._write({"place": place, **write_group(group)})

    def remove(self) -> None:
        self._file.close()
        self._path.unlink()

    def _read(self) -> list[dict[str, Any]]:
        """All lines that are whole; one that was cut short is removed."""
        if not self._path.exists():
            return []
        whole, end, _ = self._path.read_bytes().rpartition(b"\n")
        os.truncate(self._path, len(whole + end))
        return [json.loads(line) for line in whole.splitlines()]

    def _write(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), file=self._file, flush=True)
