"""Prompts and groups as plain JSON, and back."""

from dataclasses import asdict
from typing import Any

from roll_lite.types import Event, Group, Prompt, Sample, Score, Turn


def write_prompt(prompt: Prompt) -> dict[str, Any]:
    return asdict(prompt)


def read_prompt(record: dict[str, Any]) -> Prompt:
    return Prompt(**record | {name: tuple(record[name]) for name in ("messages", "tests")})


def write_group(group: Group) -> dict[str, Any]:
    return asdict(group)


def read_group(record: dict[str, Any]) -> Group:
    prompt = read_prompt(record["prompt"])
    return Group(prompt=prompt, samples=[_read_sample(s, prompt) for s in record["samples"]])


def _read_sample(record: dict[str, Any], prompt: Prompt) -> Sample:
    parts = {
        "prompt": prompt,
        "turns": [_read_turn(turn) for turn in record["turns"]],
        "score": Score(**record["score"]) if record["score"] else None,
        "events": [Event(**event) for event in record["events"]],
    }
    return Sample(**record | parts)


def _read_turn(record: dict[str, Any]) -> Turn:
    return Turn(**record | {"versions": [tuple(run) for run in record["versions"]]})
