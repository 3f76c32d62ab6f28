"""One call of a reward, and its result on the way between processes."""

import math
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from roll_lite.checks import above
from roll_lite.types import Prompt, Reward, Score
from roll_lite.workers.errors import RewardCrash, RewardError, RewardTimeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    seconds: float
    """Wall time of a call."""
    memory_gib: float
    """What a worker may map beyond what imports took; each of its children may as well."""
    output_kib: int
    """What a call may print."""

    def __post_init__(self):
        above(0, self, "seconds", "memory_gib", "output_kib")


@dataclass(frozen=True, slots=True)
class Failure:
    kind: Literal["raised", "timeout", "crash"]
    text: str
    pickled: bytes | None = None
    """What the reward raised, where it can be pickled."""

    @property
    def summary(self) -> str:
        """In one line: the exception, or what was done to the worker."""
        lines = self.text.strip().splitlines()
        return lines[-1] if self.kind == "raised" else lines[0]

    def exception(self) -> Exception:
        if self.kind == "timeout":
            return RewardTimeout(self.text)
        if self.kind == "crash":
            return RewardCrash(self.text)
        error = _unpickled(self.pickled)
        if error is None:
            return RewardError(self.text)
        error.add_note(f"In a reward worker:\n{self.text}")
        return error


def evaluate(rewards: Mapping[str, Reward], prompt: Prompt, reply: str) -> Score:
    score = rewards[prompt.domain](prompt, reply)
    if not isinstance(score, Score):
        score = Score(value=score)
    parts = {name: float(part) for name, part in score.parts.items()}
    score = Score(value=float(score.value), parts=parts)  # plain numbers travel
    if not math.isfinite(score.value):
        raise ValueError(f"reward={score.value} is not a finite number")
    return score


def describe(error: BaseException) -> Failure:
    """What a reward raised, with the traceback from its own code on."""
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure("raised", text, _pickled(error))


def _pickled(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:  # whatever a user's class may raise; the text travels in any case
        return None


def _unpickled(data: bytes | None) -> Exception | None:
    try:
        error = pickle.loads(data) if data else None
    except Exception:  # its class may want other arguments, or not exist here
        return None
    return error if isinstance(error, Exception) else None
