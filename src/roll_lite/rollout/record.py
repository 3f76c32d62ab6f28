"""Prompts and groups as plain JSON, and back. Ids and logprobs stand there once, as bytes."""

from array import array
from base64 import b64decode, b64encode
from dataclasses import fields
from typing import Any

from roll_lite.types import Event, Group, Prompt, Sample, Score, Turn


def write_prompt(prompt: Prompt) -> dict[str, Any]:
    return {field.name: getattr(prompt, field.name) for field in fields(prompt)}


def read_prompt(record: dict[str, Any]) -> Prompt:
    return Prompt(**record | {name: tuple(record[name]) for name in ("messages", "tests")})


def write_group(group: Group) -> dict[str, Any]:
    samples = [_write_sample(sample) for sample in group.samples]
    return {"prompt": write_prompt(group.prompt), "samples": samples}


def read_group(record: dict[str, Any]) -> Group:
    prompt = read_prompt(record["prompt"])
    return Group(prompt=prompt, samples=[_read_sample(s, prompt) for s in record["samples"]])


def _write_sample(sample: Sample) -> dict[str, Any]:
    """Turns by where they end: what they read and sampled is the sample's own, from its start."""
    return {
        "index": sample.index,
        "token_ids": _pack("i", sample.token_ids),
        "logprobs": _pack("f", sample.logprobs),
        "turns": [
            [len(turn.prompt_ids), len(turn.token_ids), turn.finish_reason, turn.versions]
            for turn in sample.turns
        ],
        "reply": sample.reply,
        "score": [sample.score.value, sample.score.parts] if sample.score else None,
        "error": sample.error,
        "events": list(sample.events),
    }


def _read_sample(record: dict[str, Any], prompt: Prompt) -> Sample:
    token_ids, logprobs = _unpack("i", record["token_ids"]), _unpack("f", record["logprobs"])
    value, parts = record["score"] or (None, {})
    sample = Sample(
        prompt=prompt,
        index=record["index"],
        reply=record["reply"],
        score=None if value is None else Score(value=value, parts=parts),
        error=record["error"],
        events=[Event(*event) for event in record["events"]],
    )
    for num_read, num_sampled, finish_reason, versions in record["turns"]:
        end = num_read + num_sampled
        turn = Turn(
            prompt_ids=token_ids[:num_read],
            token_ids=token_ids[num_read:end],
            logprobs=logprobs[num_read:end],
            finish_reason=finish_reason,
            versions=[tuple(run) for run in versions],
        )
        sample.add_turn(turn)
    return sample


def _pack(kind: str, numbers: list) -> str:
    """32 bits each, which is what ids have and logprobs were computed in."""
    return b64encode(array(kind, numbers).tobytes()).decode()


def _unpack(kind: str, text: str) -> list:
    return array(kind, b64decode(text)).tolist()
