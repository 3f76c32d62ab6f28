"""Prompts and groups as plain JSON, and the file that keeps the answers of a running evaluation."""

import json
import os
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from roll_lite.checks import refuse_changes
from roll_lite.types import Event, Group, Prompt, Sample, Score, Turn, TurnResult


def write_prompt(prompt: Prompt) -> dict[str, Any]:
    return {field.name: getattr(prompt, field.name) for field in fields(prompt)}


def read_prompt(record: dict[str, Any]) -> Prompt:
    return Prompt(**record | {name: tuple(record[name]) for name in ("messages", "tests")})


def write_group(group: Group) -> dict[str, Any]:
    samples = [_packed(write_sample(sample)) for sample in group.samples]
    return {"prompt": write_prompt(group.prompt), "samples": samples}


def read_group(record: dict[str, Any]) -> Group:
    prompt = read_prompt(record["prompt"])
    return Group(
        prompt=prompt, samples=[read_sample(_unpacked(s), prompt) for s in record["samples"]]
    )


def write_sample(sample: Sample) -> dict[str, Any]:
    """Plain data. Token ids and logprobs are there once, by sequence; turns only as lengths."""
    score = sample.score
    return {
        "index": sample.index,
        "visit": sample.visit,
        "seed": sample.seed,
        "sequences": [
            [sequence.token_ids, sequence.logprobs, sequence.turns] for sequence in sample.sequences
        ],
        "turns": [
            [len(turn.prompt_ids), len(turn.token_ids), turn.finish_reason, turn.versions,
             turn.state, turn.result.reward, turn.result.measurements]
            for turn in sample.turns
        ],
        "transcript": sample.transcript,
        "reply": sample.reply,
        "score": [score.value, score.parts, score.reason] if score else None,
        "end": sample.end,
        "error": sample.error,
        "events": [tuple(event) for event in sample.events],
    }  # fmt: skip


def read_sample(record: dict[str, Any], prompt: Prompt) -> Sample:
    score = None
    if record["score"]:
        value, parts, reason = record["score"]
        score = Score(value=value, parts=parts, reason=reason)
    sample = Sample(
        prompt=prompt,
        index=record["index"],
        visit=record["visit"],
        seed=record["seed"],
        transcript=record["transcript"],
        reply=record["reply"],
        score=score,
        end=record["end"],
        error=record["error"],
        events=[Event(*event) for event in record["events"]],
    )
    for turn in _read_turns(record):
        sample.add_turn(turn)
    return sample


def _read_turns(record: dict[str, Any]) -> list[Turn]:
    turns: dict[int, Turn] = {}
    for token_ids, logprobs, numbers in record["sequences"]:
        for number in numbers:
            num_read, num_sampled, finish_reason, versions, *result = record["turns"][number]
            state, reward, measurements = result
            sampled = slice(num_read, num_read + num_sampled)
            turns[number] = Turn(
                prompt_ids=token_ids[:num_read],
                token_ids=token_ids[sampled],
                logprobs=logprobs[sampled],
                finish_reason=finish_reason,
                versions=[tuple(run) for run in versions],
                state=state,
                result=TurnResult(reward=reward, measurements=measurements),
            )
    return [turns[number] for number in sorted(turns)]


def _packed(record: dict[str, Any]) -> dict[str, Any]:
    """For JSON, in which lists of numbers are long."""
    sequences = [[_pack("i", ids), _pack("f", ps), turns] for ids, ps, turns in record["sequences"]]
    return record | {"sequences": sequences}


def _unpacked(record: dict[str, Any]) -> dict[str, Any]:
    packed = record["sequences"]
    return record | {"sequences": [[_unpack("i", a), _unpack("f", b), c] for a, b, c in packed]}


def _pack(kind: str, numbers: list) -> str:
    """Base64 of 32 bits each: token ids fit, and logprobs were computed in float32."""
    return b64encode(array(kind, numbers).tobytes()).decode()


def _unpack(kind: str, text: str) -> list:
    return array(kind, b64decode(text)).tolist()


class AnswerFile:
    """Answers of an evaluation, written as they come, so that a killed one continues.

    JSON lines: first the options that the answers depend on, then groups in any order.
    """

    def __init__(self, path: str | Path, prompts: Sequence[Prompt], fixed: dict[str, Any]):
        """Reads an existing file, which must have been started with the same `fixed` options."""
        self._path = Path(path)
        self._num_prompts = len(prompts)
        self.groups: dict[int, Group] = {}
        """By the place of their prompt."""
        rows = self._read()
        if rows:
            refuse_changes(self._path.parent, rows[0], fixed)
        for row in rows[1:]:
            place, group = row["place"], read_group(row)
            # The prompt may have changed since, and failed samples may succeed now.
            is_wanted = place < len(prompts) and prompts[place] == group.prompt
            if is_wanted and all(sample.state == "done" for sample in group.samples):
                self.groups[place] = group
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        if not rows:
            self._write(fixed)

    @property
    def missing(self) -> list[int]:
        """Places of the prompts that have no answers yet."""
        return [place for place in range(self._num_prompts) if place not in self.groups]

    def keep(self, place: int, group: Group) -> None:
        self.groups[place] = group
        self._write({"place": place, **write_group(group)})

    def remove(self) -> None:
        self._file.close()
        self._path.unlink()

    def _read(self) -> list[dict[str, Any]]:
        """All complete lines; a last line that was cut short is removed from the file."""
        if not self._path.exists():
            return []
        whole, end, _ = self._path.read_bytes().rpartition(b"\n")
        os.truncate(self._path, len(whole + end))
        return [json.loads(line) for line in whole.splitlines()]

    def _write(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), file=self._file, flush=True)
