"""Records of samples: the lines of JSON that they become and are read from, and their writer.

In a line of rollouts/, `token_ids` holds, turn by turn, the tokens read and then those sampled.
`logprobs`, `entropies`, `mismatches` and `advantages` belong to the sampled: base64 of float32
numbers, which is exact and cheap to write; `numbers` reads it. `mismatches` are distances of the
trainer's logprobs from the engine's. `advantages` is one number if all are equal. Without training,
the last three are left out.

`visit` says how often the prompt had been sampled before, and `seed` is the group's, from which all
random numbers of its samples derive; `prompt_seed` is that of the environment, where it is fixed.
"""

import json
import math
import os
import threading
import time
from array import array
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from roll_lite.checks import UserError
from roll_lite.types import Group, Prompt, Sample, Turn

NOT_TRAINED: Mapping[int, list[float]] = {}
_EVENT = '["%s",%.4f,%d]'
_encode_finite = json.JSONEncoder(
    check_circular=False, allow_nan=False, separators=(",", ":")
).encode
_quoted = json.encoder.encode_basestring_ascii
_EMPTY = '""'
REMARKS = ',"reason":'
"""Text inside a line that is no such key has its quotes escaped."""
SLICE_SECONDS = 0.0002
PAUSE_SECONDS = 0.0001
MAX_PENDING = 8
"""Files to write. A run that makes them faster than they can be written waits."""


def encode(row: Any) -> str:
    """JSON has neither NaN nor Infinity: they become null."""
    try:
        return _encode_finite(row)
    except ValueError:
        return _encode_finite(_finite(json.loads(json.dumps(row))))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rollout_lines(
    groups: Iterable[Group],
    advantages: Mapping[int, list[float]] = NOT_TRAINED,
    entropies: Mapping[int, list[float]] = NOT_TRAINED,
    mismatches: Mapping[int, list[float]] = NOT_TRAINED,
) -> Iterator[str]:
    """Samples in full; what training says of them is by the sample's number."""
    number = 0
    for group in groups:
        prompt = opening(group.prompt)  # once for all samples: it may be long
        for sample in group.samples:
            of_tokens = {"entropies": entropies, "mismatches": mismatches}
            found = {name: numbers.get(number) for name, numbers in of_tokens.items()}
            learnt = _learnt(advantages.get(number), found)
            yield (
                f"{prompt},{_outcome(sample)},{_tokens(sample)}{learnt}{_remarks(sample)},"
                f'"replicas":{_replicas(sample)},"events":{_events(sample)}}}\n'
            )
            number += 1


def answer_lines(groups: Iterable[Group]) -> Iterator[str]:
    """Samples as text, with their scores."""
    for group in groups:
        prompt = opening(group.prompt)
        yield from (
            f"{prompt},{_outcome(sample)}{_remarks(sample)}}}\n" for sample in group.samples
        )


def repeated_part(line: str) -> str:
    """What a line of rollouts/ has in every run that repeats the sample: all before its remarks."""
    return line.rpartition(REMARKS)[0]


def dropped_lines(step: int, dropped: Iterable[tuple[Sample, str]]) -> Iterator[str]:
    """What dropped samples were, why, and their state changes, each with its time and version."""
    prompt = None
    opening = ""
    for sample, why in dropped:
        if sample.prompt is not prompt:
            prompt = sample.prompt
            about = {"prompt_id": prompt.id, "domain": prompt.domain, "messages": prompt.messages}
            opening = encode({"event": "sample", "step": step, **about})[:-1]
        yield (
            f'{opening},"why":{_quoted(why)},"time":{sample.events[-1].time:.4f},{_outcome(sample)},'
            f'"tokens":{sample.num_sampled}{_remarks(sample)},'
            f'"replicas":{_replicas(sample)},"events":{_events(sample)}}}\n'
        )


def pack(numbers: Sequence[float]) -> str:
    return b64encode(array("f", numbers)).decode()


def numbers(packed: str) -> list[float]:
    """Logprobs, entropies, mismatches or advantages of a line."""
    try:
        return array("f", b64decode(packed)).tolist()
    except ValueError as error:
        raise UserError(f"{packed:.40} is not base64 of float32 numbers: {error}") from None


def opening(prompt: Prompt) -> str:
    """The beginning of a line: the whole prompt, so that its replies can be scored again."""
    fields = {
        "prompt_id": prompt.id,
        "domain": prompt.domain,
        "messages": prompt.messages,
        "ground_truth": prompt.ground_truth,
        "tests": prompt.tests,
        "extra": prompt.extra,
    }
    if prompt.seed is not None:
        fields["prompt_seed"] = prompt.seed
    return encode(fields)[:-1]


def _outcome(sample: Sample) -> str:
    """Fields of a line. Samples are many, and an encoder for all of it takes twice as long."""
    end = sample.end
    value, parts = (sample.score.value, sample.score.parts) if sample.score else (None, {})
    is_number = value is not None and math.isfinite(value)
    transcript = f'"transcript":{encode(sample.transcript)},' if len(sample.turns) > 1 else ""
    return (
        f'"index":{sample.index},"visit":{sample.visit},'
        f'"seed":{_whole(sample.seed)},"state":"{sample.state}",'
        f'"reply":{_quoted(sample.reply)},{transcript}"end":{_quoted(end) if end else _EMPTY},'
        f'"reward":{float(value) if is_number else "null"},'
        f'"parts":{encode(parts) if parts else "{}"}'
    )


def _remarks(sample: Sample) -> str:
    """Texts that may differ where the sample repeats: they may name times and processes."""
    reason = sample.score.reason if sample.score else ""
    return (
        f"{REMARKS}{_quoted(str(reason)) if reason else _EMPTY},"
        f'"error":{_quoted(sample.error) if sample.error else "null"}'
    )


def _replicas(sample: Sample) -> str:
    return f"[{','.join([_whole(turn.replica) for turn in sample.turns])}]"


def _whole(value: int | None) -> str:
    return "null" if value is None else str(value)


def _events(sample: Sample) -> str:
    """State changes; times to a tenth of a millisecond, as all digits would take twice as long."""
    return f"[{','.join([_EVENT % event for event in sample.events])}]"


def _tokens(sample: Sample) -> str:
    """Ids and logprobs of all sequences end to end, in the order of `sequences`."""
    turns = ["{}"] * len(sample.turns)
    logprobs: list[float] = []
    for sequence in sample.sequences:
        known = 0
        for number in sequence.turns:
            turn = sample.turns[number]
            turns[number] = _turn(turn, known, is_one_of_several=len(turns) > 1)
            known = len(turn.prompt_ids) + len(turn.token_ids)
            logprobs += turn.logprobs
    orders = [sequence.turns for sequence in sample.sequences]
    token_ids = sample.sequences[0].token_ids if len(orders) == 1 else sample.token_ids
    more = f',"sequences":{encode(orders)}' if len(orders) > 1 else ""
    return (
        f'"token_ids":{encode(token_ids)},"logprobs":"{pack(logprobs)}",'
        f'"turns":[{",".join(turns)}]{more}'
    )


def _turn(turn: Turn, known: int, is_one_of_several: bool) -> str:
    """A turn of a line; `known` tokens of what it read are those of the turn before."""
    more = ""
    if is_one_of_several:
        result = {"reward": turn.result.reward, "state": turn.state, **turn.result.measurements}
        more = f",{encode(result)[1:-1]}"
    versions = ",".join([f"[{first},{version}]" for first, version in turn.versions])
    return (
        f'{{"read":{len(turn.prompt_ids) - known},"sampled":{len(turn.token_ids)},'
        f'"finish":"{turn.finish_reason}","versions":[{versions}]{more}}}'
    )


def _learnt(advantages: list[float] | None, of_tokens: dict[str, list[float] | None]) -> str:
    fields = ""
    if advantages:  # most estimators give all tokens of a sample the same
        is_one = advantages.count(advantages[0]) == len(advantages)
        numbers = round(advantages[0], 5) if is_one else pack(advantages)
        fields = f',"advantages":{encode(numbers)}'
    packed = [f',"{name}":"{pack(numbers)}"' for name, numbers in of_tokens.items() if numbers]
    return fields + "".join(packed)


class Token(NamedTuple):
    """A token of a recorded sample, in the order in which it was read or sampled."""

    id: int
    turn: int
    logprob: float | None
    """None if it was read."""
    version: int | None


def read_prompt(row: dict[str, Any]) -> Prompt:
    """The prompt of a line of rollouts/."""
    return Prompt(
        id=row["prompt_id"],
        messages=tuple(row["messages"]),
        domain=row["domain"],
        ground_truth=row["ground_truth"],
        tests=tuple(row["tests"]),
        extra=row["extra"],
        seed=row.get("prompt_seed"),
    )


def read_tokens(row: dict[str, Any]) -> list[Token]:
    """The tokens of a line of rollouts/; raises ValueError if it is damaged."""
    all_logprobs = numbers(row["logprobs"])
    num_sampled = sum(turn["sampled"] for turn in row["turns"])
    num_tokens = num_sampled + sum(turn["read"] for turn in row["turns"])
    if num_tokens != len(row["token_ids"]) or num_sampled != len(all_logprobs):
        raise UserError(
            f"sample {row.get('index')} of {row.get('prompt_id')} is damaged: its turns have "
            f"{num_tokens} tokens, {num_sampled} of them sampled, which token_ids and logprobs do "
            "not"
        )
    ids = iter(row["token_ids"])
    logprobs = iter(all_logprobs)
    found = []
    for number in (n for order in row.get("sequences", [range(len(row["turns"]))]) for n in order):
        turn = row["turns"][number]
        found += [Token(next(ids), number, None, None) for _ in range(turn["read"])]
        for place in range(turn["sampled"]):
            version = [v for first, v in turn["versions"] if first <= place][-1]
            found.append(Token(next(ids), number, next(logprobs), version))
    return found


class Writer:
    """Writes records in a thread while the run goes on, in the order of the calls.

    An error is raised by a later call. A thousand short samples take 20 ms to become lines of JSON,
    and long ones more, so the thread works in short slices: the threads that feed the GPU need the
    same interpreter, and should hardly wait for it.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, "records")
        self._pending: deque[Future] = deque()
        self._hurry = threading.Event()
        """Set while a caller waits: no more pauses."""

    def append(self, path: Path, lines: Iterable[str]) -> None:
        self._put(self._append, path, lines)

    def write(self, path: Path, lines: Iterable[str]) -> None:
        self._put(self._replace, path, lines)

    def read(self, lines: Iterable[str]) -> None:
        """Go through lines that are not written, for what this does."""
        self._put(self._append, Path(os.devnull), lines)

    def flush(self) -> None:
        """Returns when all is written."""
        while self._pending:
            self._wait_for_first()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _put(self, write: Callable[..., None], path: Path, lines: Iterable[str]) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._wait_for_first()
        self._pending.append(self._thread.submit(write, path, lines))

    def _wait_for_first(self) -> None:
        self._hurry.set()
        try:
            self._pending.popleft().result()
        finally:
            self._hurry.clear()

    def _replace(self, path: Path, lines: Iterable[str]) -> None:
        """A reader never sees half of the file."""
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        self._append(partial, lines)
        partial.rename(path)

    def _append(self, path: Path, lines: Iterable[str]) -> None:
        end = time.perf_counter() + SLICE_SECONDS
        with path.open("a") as file:
            for line in lines:
                file.write(line)
                if time.perf_counter() > end:
                    self._hurry.wait(PAUSE_SECONDS)
                    end = time.perf_counter() + SLICE_SECONDS
