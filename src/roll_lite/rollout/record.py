"""Prompts, samples and groups as plain data, for checkpoints, the journal and answer files; samples
from lines of rollouts/ too."""

from array import array
from base64 import b64decode, b64encode
from dataclasses import fields
from itertools import islice
from typing import Any

from roll_lite.report.records import numbers as unpacked
from roll_lite.types import REDUCTIONS, Event, Group, Prompt, Sample, Score, Turn, TurnResult


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
            [sequence.token_ids, sequence.logprobs, sequence.turns, sequence.experts]
            for sequence in sample.sequences
        ],
        "turns": [
            [len(turn.prompt_ids), len(turn.token_ids), turn.finish_reason, turn.versions,
             turn.state, turn.result.reward, turn.result.measurements, turn.replica]
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


def read_row(row: dict[str, Any], prompt: Prompt) -> Sample:
    """A scored sample from its line of rollouts/ (report/records.py)."""
    turns = row["turns"]
    token_ids, sampled = iter(row["token_ids"]), iter(unpacked(row["logprobs"]))
    sequences = []
    for order in row.get("sequences", [range(len(turns))]):
        ids, logprobs = [], []
        for turn in (turns[number] for number in order):
            ids += islice(token_ids, turn["read"])
            turn["known"] = len(ids)
            ids += islice(token_ids, turn["sampled"])
            logprobs += [*[0.0] * turn["read"], *islice(sampled, turn["sampled"])]
        sequences.append([ids, logprobs, order])
    told = [
        [turn["known"], turn["sampled"], turn["finish"], turn["versions"], turn.get("state", ""),
         turn.get("reward", row["reward"]), {n: turn[n] for n in REDUCTIONS if n in turn}, replica]
        for turn, replica in zip(turns, row["replicas"], strict=True)
    ]  # fmt: skip
    score = row["reward"], row["parts"], row["reason"]
    known = {"transcript": [], **row, "sequences": sequences, "turns": told, "score": score}
    return read_sample(known, prompt)


def _read_turns(record: dict[str, Any]) -> list[Turn]:
    turns: dict[int, Turn] = {}
    for token_ids, logprobs, numbers, *experts in record["sequences"]:
        for number in numbers:
            num_read, num_sampled, finish_reason, versions, *rest = record["turns"][number]
            state, reward, measurements, *replica = rest  # none in records of older versions
            sampled = slice(num_read, num_read + num_sampled)
            turns[number] = Turn(
                prompt_ids=token_ids[:num_read],
                token_ids=token_ids[sampled],
                logprobs=logprobs[sampled],
                finish_reason=finish_reason,
                versions=[tuple(run) for run in versions],
                state=state,
                result=TurnResult(reward=reward, measurements=measurements),
                replica=replica[0] if replica else None,
                experts=experts[0] if experts and number == numbers[-1] else b"",
            )
    return [turns[number] for number in sorted(turns)]


def _packed(record: dict[str, Any]) -> dict[str, Any]:
    """For JSON, in which lists of numbers are long."""
    sequences = [
        [_pack("i", ids), _pack("f", ps), turns, b64encode(experts).decode()]
        for ids, ps, turns, experts in record["sequences"]
    ]
    return record | {"sequences": sequences}


def _unpacked(record: dict[str, Any]) -> dict[str, Any]:
    sequences = [
        [_unpack("i", ids), _unpack("f", ps), turns, *map(b64decode, experts)]
        for ids, ps, turns, *experts in record["sequences"]
    ]
    return record | {"sequences": sequences}


def _pack(kind: str, numbers: list) -> str:
    """Base64 of 32 bits each: token ids fit, and logprobs were computed in float32."""
    return b64encode(array(kind, numbers).tobytes()).decode()


def _unpack(kind: str, text: str) -> list:
    return array(kind, b64decode(text)).tolist()
