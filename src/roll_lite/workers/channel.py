"""The connection between the supervisor and a worker, and the messages of jobs.

What goes to a worker is pickled. What comes from it, where user code runs, is JSON: it is never
unpickled, and the supervisor, which checks it, does not wait for the rest of a message.
"""

import json
import math
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from roll_lite.checks import UserError
from roll_lite.envs.env import Ending, OutOfTokens
from roll_lite.types import FinishReason, Message, Score, TurnResult, number
from roll_lite.workers.failures import Failure

MAX_MESSAGE = 64 << 20
"""Bytes of a worker's message."""
LONGEST_REASON = 500
"""Characters of what a reward says of its score."""
CONTINUES, ENDED, LEAVES = range(3)
"""With a worker's message: the job goes on, has ended, or has ended and the worker must be
replaced."""
NO_JOB = -1
"""Job id of a message that asks the supervisor for a sign of life, and of one that gives it and
says how many workers were replaced since the last."""
WorkerMessage = tuple[int, int, bytes]
"""Job id, one of the three states above, JSON of an Ask or an End."""
Order = tuple[int, bool, bytes | None]
"""Job id, whether the job begins, and a pickled (prompt, reply) then, later a pickled Reply or None
to cancel the job."""
_ORDER = struct.Struct("!Qq??")  # length, job id, whether it begins, whether it is None
_HEADER = struct.Struct("!QqB")  # length, job id, state
_chunk = memoryview(bytearray(1 << 16))
Outcome = Ending | OutOfTokens | Failure
"""What becomes of a job. A reward's is an Ending with its score."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What an episode says to the model."""

    num_known: int
    """Messages that are equal to the first ones of the last ask and its reply."""
    messages: list[Message]
    """The further ones."""
    options: dict[str, Any]
    results: list[TurnResult]
    """What came of the last reply."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says to an episode."""

    number: int
    """Number of the ask, from 0."""
    message: Message | None
    """None if there was no room for one."""
    finish_reason: FinishReason
    problem: str = ""
    """Why there was no room."""


class End(NamedTuple):
    outcome: Outcome
    results: Sequence[TurnResult] = ()
    """What came of an episode's last reply."""


def write_ask(
    num_known: int, messages: str, options: dict[str, Any], results: Sequence[TurnResult]
) -> bytes:
    """An Ask, of which the messages are JSON already."""
    rest = json.dumps({"num_known": num_known, "options": options, "results": _plain(results)})
    return f'{{"messages": {messages}, {rest[1:]}'.encode()


def write_end(outcome: Outcome, results: Sequence[TurnResult] = ()) -> bytes:
    fields: dict[str, Any] = {"results": _plain(results)} if results else {}
    if isinstance(outcome, Failure):
        fields |= {"failure": outcome.text, "kind": outcome.kind}
    elif isinstance(outcome, OutOfTokens):
        fields["out_of_tokens"] = str(outcome)
    else:
        fields["ending"] = outcome.reason
        if score := outcome.score:
            parts = {"value": score.value, "parts": score.parts, "reason": score.reason}
            fields["score"] = parts
    return json.dumps(fields).encode()


def _plain(results: Sequence[TurnResult]) -> list[dict[str, Any]]:
    return [{"reward": each.reward, "measurements": each.measurements} for each in results]


def read_message(fields: Any) -> Ask | End:
    """Raises an exception for what the two functions above do not write."""
    results = [TurnResult(**result) for result in fields.get("results", ())]
    if "messages" not in fields:
        return End(_read_outcome(fields), results)
    stop = fields["options"]["stop"]
    options = fields["options"] | {"stop": tuple(stop) if isinstance(stop, list) else stop}
    messages = [dict(message) for message in fields["messages"]]
    return Ask(int(fields["num_known"]), messages, options, results)


def is_verdict(message: Ask | End) -> bool:
    """Whether it is all that a reward may say: one score, or how it failed."""
    if not isinstance(message, End) or message.results:
        return False
    outcome = message.outcome
    has_score = isinstance(outcome, Ending) and outcome.score is not None
    return has_score or isinstance(outcome, Failure)


def _read_outcome(fields: dict[str, Any]) -> Outcome:
    if "failure" in fields:
        return Failure(str(fields["kind"]), str(fields["failure"]))
    if "out_of_tokens" in fields:
        return OutOfTokens(str(fields["out_of_tokens"]))
    score = _plain_score(**fields["score"]) if "score" in fields else None
    return Ending(reason=str(fields["ending"]), score=score)


def checked(score: Score | float) -> Score:
    """What a reward returned, as a Score of finite numbers."""
    score = Score.of(score)
    return _plain_score(score.value, score.parts, score.reason)


def checked_ending(ending: Ending) -> Ending:
    return ending if ending.score is None else replace(ending, score=checked(ending.score))


def _plain_score(value: float, parts: Mapping[str, float], reason: str) -> Score:
    """Plain numbers, and a text of a bounded length, can always be sent."""
    if not math.isfinite(value := number("reward", value)):
        raise UserError(f"reward={value} is not a finite number")
    parts = {str(name): number(name, part) for name, part in parts.items()}
    return Score(value=value, parts=parts, reason=str(reason)[:LONGEST_REASON])


class ProtocolError(Exception):
    """A worker sent what no worker sends; the text says what it did."""


def connect() -> tuple["SupervisorEnd", "WorkerEnd"]:
    ours, theirs = socket.socketpair()
    return SupervisorEnd(ours), WorkerEnd(theirs)


class WorkerEnd:
    """Receives orders and sends messages, and waits until that is done."""

    def __init__(self, end: socket.socket):
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Order:
        """The next one. Raises EOFError if the supervisor's end is closed."""
        length, job_id, begins, cancels = _ORDER.unpack(self._read(_ORDER.size))
        payload = self._read(length)
        return job_id, begins, None if cancels else payload

    def send(self, message: WorkerMessage) -> None:
        job_id, state, payload = message
        if len(payload) > MAX_MESSAGE:
            raise UserError(f"a message of {len(payload)} bytes; send at most {MAX_MESSAGE}")
        self._socket.sendall(_HEADER.pack(len(payload), job_id, state) + payload)

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        num_read = 0
        while num_read < length:
            num_new = self._socket.recv_into(memoryview(data)[num_read:])
            if not num_new:
                raise EOFError
            num_read += num_new
        return data


class SupervisorEnd:
    """Never waits for the worker, which reads nothing while user code runs and may send half a
    message: what the socket does not take is sent by `flush`, and what came is kept."""

    def __init__(self, end: socket.socket):
        self._socket = end
        self._waiting: deque[memoryview] = deque()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def post(self, order: Order) -> None:
        job_id, begins, payload = order
        data = payload or b""
        header = _ORDER.pack(len(data), job_id, begins, payload is None)
        self._waiting.append(memoryview(header + data))
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self._waiting:
                sent = self._socket.send(self._waiting[0], socket.MSG_DONTWAIT)
                self._waiting[0] = self._waiting[0][sent:]
                if not self._waiting[0]:
                    self._waiting.popleft()

    @property
    def is_flushed(self) -> bool:
        return not self._waiting

    def read(self) -> bool:
        """Take in some of what has arrived; False if the worker's end is closed."""
        try:
            num_read = self._socket.recv_into(_chunk, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._received += _chunk[:num_read]
        return num_read > 0

    def messages(self) -> Iterator[WorkerMessage]:
        """Messages that are complete."""
        while len(self._received) >= _HEADER.size:
            length, job_id, state = _HEADER.unpack_from(self._received)
            if length > MAX_MESSAGE or state > LEAVES:
                raise ProtocolError("sent something that is no message")
            end = _HEADER.size + length
            if len(self._received) < end:
                break
            payload = bytes(memoryview(self._received)[_HEADER.size : end])
            del self._received[:end]
            yield job_id, state, payload

    @property
    def has_part(self) -> bool:
        """Whether a part of a message has come."""
        return bool(self._received)

    def stop(self) -> None:
        """Receive only what has arrived already: another process may hold the worker's end."""
        with suppress(OSError):  # the worker's end is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
