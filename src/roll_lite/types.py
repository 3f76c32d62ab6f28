"""The types that everything shares. No torch here: worker processes import it and start fast.

prompt -> turns (one model call each) -> sample (one episode) -> group (samples of one prompt).
"""

import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

from roll_lite.checks import UserError

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}; an assistant's message may
have "tool_calls"."""

State = Literal[
    "queued",
    "generating",
    "stepping",
    "scoring",
    "retried",
    "done",
    "filtered",
    "failed",
    "aborted",
]
SHAPE = "shape:"
"""Before the name of a shape, in the place of a model's folder: random weights, for benchmarks."""
LOST = ("filtered", "failed", "aborted")
"""States of samples that are not trained on."""
FinishReason = Literal["stop", "length", "abort", "error"]
REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean,
    "sum": math.fsum,
    "last": lambda values: values[-1],
    "max": max,
}
"""How the measurements of an episode's turns become one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    id: str
    messages: tuple[Message, ...]
    domain: str
    """Names the reward function that scores replies to this prompt."""
    ground_truth: str
    tests: tuple[dict[str, Any], ...] = ()
    """Further data that replies are checked with: test programs, constraints."""
    extra: dict[str, Any] = field(default_factory=dict)
    """All other fields of the prompt's row, for rewards of your own."""
    seed: int | None = None
    """Seed of its environment; None is another one at each visit."""
    source: str = field(default="", compare=False)
    """Name of the file that it is from, for metrics; empty if it was generated."""

    @property
    def is_question(self) -> bool:
        """A question is its messages, and has one reply; an environment writes its own messages."""
        return bool(self.messages)


class Truncation(NamedTuple):
    """Which tokens sampling leaves in: top-k, then top-p of those, then min-p; by default all."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_on(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token."""
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the turn; it stays the turn's last token."""
    stop: tuple[str, ...] = ()
    """A turn ends with the token that completes one of these texts."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Sample among tokens at least this likely, relative to the likeliest."""

    @property
    def is_truncated(self) -> bool:
        return Truncation(self.top_k, self.top_p, self.min_p).is_on

    @property
    def greedy(self) -> "SamplingParams":
        """The same, but always the likeliest token."""
        return replace(self, temperature=0.0, **Truncation()._asdict())

    def __post_init__(self):
        if self.max_tokens < 1:
            raise UserError(f"max_tokens={self.max_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if isinstance(self.stop, str) or not all(self.stop):
            raise UserError(f"stop={self.stop!r} must be a tuple of texts that are not empty")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be 0 (off) or above")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p={self.min_p} must be from 0 (off) to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What the environment says of a turn."""

    reward: float = 0.0
    measurements: dict[str, dict[str, float]] = field(default_factory=dict)
    """Named numbers by the way that they are combined over an episode, one of REDUCTIONS:
    {"mean": {"valid": 1.0}, "last": {"success": 0.0}}."""

    def __post_init__(self):
        if not math.isfinite(self.reward):
            raise UserError(f"reward={self.reward} is not a finite number")
        for reduction, values in self.measurements.items():
            if reduction not in REDUCTIONS:
                raise UserError(
                    f"{reduction!r} is not a way to combine measurements; use one of "
                    f"{', '.join(REDUCTIONS)}"
                )
            for name, value in values.items():
                if not math.isfinite(value):
                    raise UserError(f"measurement {name}={value} is not a finite number")


NO_RESULT = TurnResult()


@dataclass(slots=True, kw_only=True)
class Turn:
    """One model call: what the model read and what it sampled."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Logprobs of the sampled tokens, under the distribution they were sampled from."""
    finish_reason: FinishReason
    versions: list[tuple[int, int]]
    """(position of the first token, policy version) of each run of sampled tokens."""
    state: str = ""
    """A key of what the model saw: turns of a group with equal keys began in the same state."""
    result: TurnResult = NO_RESULT
    replica: int | None = field(default=None, compare=False)
    """The engine that sampled it."""
    experts: bytes = field(default=b"", repr=False)
    """A mixture's experts, a byte each: for each token of prompt and reply but the last, and each
    sparse layer, those that the engine used. Empty if they are not recorded."""


REWARD_METRICS = frozenset(
    {
        "mean", "std", "min", "max", "solved_groups", "equal_groups",
        "calls", "seconds", "errors", "timeouts", "crashes", "replaced",
    }
)  # fmt: skip
"""Metrics under reward/ that a part of a score must not replace."""


def number(name: str, value: Any) -> float:
    """What user code gave as a number. A text is none, though `float` would read it."""
    if not isinstance(value, str | bytes | bytearray):
        with suppress(TypeError, ValueError):
            return float(value)
    raise TypeError(f"{name}={value!r:.200} is not a number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    value: float
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, logged as reward/NAME."""
    reason: str = field(default="", compare=False)
    """Why, in a few words for people: "extracted 42, expected 41"."""

    def __post_init__(self):
        if not REWARD_METRICS.isdisjoint(self.parts):
            name = min(REWARD_METRICS & self.parts.keys())
            raise UserError(
                f"parts has {name!r}, but reward/{name} is a metric of every run; rename the part"
            )

    def passes(self, least: float) -> bool:
        """With a `success` of 1, if it measures that; else with at least this value."""
        return self.parts["success"] >= 1 if "success" in self.parts else self.value >= least

    @classmethod
    def of(cls, returned: "Score | float") -> "Score":
        """What a reward returned, as a Score."""
        if isinstance(returned, cls):
            return returned
        try:
            return cls(value=number("reward", returned))
        except (TypeError, ValueError):
            raise TypeError(
                f"the reward returned {returned!r}, not a number or a Score; is a `return` missing?"
            ) from None


Reward = Callable[[Prompt, str], Score | float]
"""Scores the text of a reply to a prompt."""
AsyncReward = Callable[[Prompt, str], Awaitable[Score | float]]
"""A reward that waits: an `async def`, a judge, a worker process."""


class Event(NamedTuple):
    state: State
    time: float
    policy_version: int


@dataclass(slots=True)
class TokenSequence:
    """Turns that continue each other: all tokens as the model read and sampled them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Behaviour logprobs; 0 where loss_mask is False."""
    turns: list[int] = field(default_factory=list)
    """Numbers of its turns in the sample."""
    lengths: list[tuple[int, int]] = field(default_factory=list)
    """Tokens that each turn read since the one before, and tokens that it sampled."""
    experts: bytes = field(default=b"", repr=False)
    """Of each token but the last, as its last turn read them."""

    @property
    def loss_mask(self) -> list[bool]:
        """True where the model sampled the token. Made when it is read: most samples may be
        dropped before they are trained on."""
        mask = []
        for read, sampled in self.lengths:
            mask += [False] * read + [True] * sampled
        return mask

    @property
    def observed(self) -> list[bool]:
        """True where the environment or the template wrote after the first sampled token."""
        mask = []
        has_sampled = False
        for read, sampled in self.lengths:
            mask += [has_sampled] * read + [False] * sampled
            has_sampled = has_sampled or sampled > 0
        return mask

    @property
    def segments(self) -> list[int]:
        """The turn of each token; what a turn reads belongs to it."""
        numbers = []
        for number, (read, sampled) in zip(self.turns, self.lengths, strict=True):
            numbers += [number] * (read + sampled)
        return numbers

    def is_continued_by(self, turn: Turn) -> bool:
        return turn.prompt_ids[: len(self.token_ids)] == self.token_ids

    def add(self, number: int, turn: Turn) -> None:
        """Append what the model read since the last turn, then what it sampled."""
        read = turn.prompt_ids[len(self.token_ids) :]
        self.token_ids += read + turn.token_ids
        self.logprobs += [0.0] * len(read) + turn.logprobs
        self.turns.append(number)
        self.lengths.append((len(read), len(turn.token_ids)))
        self.experts, turn.experts = turn.experts, b""  # it has those of earlier turns, too


@dataclass(slots=True, kw_only=True)
class Sample:
    """One episode: its tokens exactly as they were read and sampled, and its events so far."""

    prompt: Prompt
    index: int
    """Place in the group."""
    visit: int = 0
    """How often the prompt was sampled before."""
    seed: int | None = field(default=None, compare=False)
    """The group's, from which all random numbers of its samples derive."""
    turns: list[Turn] = field(default_factory=list)
    """Turns in the order of time."""
    sequences: list[TokenSequence] = field(default_factory=list)
    """The turns as sequences to train on: one, unless a turn does not go on where one ended."""
    transcript: list[Message] = field(default_factory=list)
    """The conversation as text, for people; tokens are never made from it."""
    reply: str = ""
    """The text of the last turn."""
    score: Score | None = None
    end: str = ""
    """Why the episode ended: see envs.env.Ending."""
    error: str | None = None
    """Why the sample failed: the traceback of its reward or environment."""
    events: list[Event] = field(default_factory=list)

    @property
    def state(self) -> State:
        return self.events[-1].state

    @property
    def first_version(self) -> int | None:
        """Policy version of the first sampled token."""
        return next((turn.versions[0][1] for turn in self.turns if turn.versions), None)

    @property
    def token_ids(self) -> list[int]:
        """Ids of all sequences end to end, like the two below."""
        return [token_id for sequence in self.sequences for token_id in sequence.token_ids]

    @property
    def loss_mask(self) -> list[bool]:
        return [learned for sequence in self.sequences for learned in sequence.loss_mask]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for sequence in self.sequences for logprob in sequence.logprobs]

    @property
    def num_sampled(self) -> int:
        return sum([len(turn.token_ids) for turn in self.turns])

    @property
    def is_cut(self) -> bool:
        """Whether a reply was ended by its length."""
        return any(turn.finish_reason == "length" for turn in self.turns)

    def enter(self, state: State, policy_version: int) -> None:
        self.events.append(Event(state, time.time(), policy_version))

    def add_turn(self, turn: Turn) -> None:
        """A turn that goes on where a sequence ended continues it; another one begins its own."""
        continued = (s for s in reversed(self.sequences) if s.is_continued_by(turn))
        if (sequence := next(continued, None)) is None:
            self.sequences.append(sequence := TokenSequence())
        sequence.add(len(self.turns), turn)
        self.turns.append(turn)


def combine_measurements(turns: Iterable[Turn]) -> dict[str, float]:
    """The measurements of an episode by name, combined over its turns."""
    found: dict[str, tuple[str, list[float]]] = {}
    for turn in turns:
        for reduction, values in turn.result.measurements.items():
            for name, value in values.items():
                known, numbers = found.setdefault(name, (reduction, []))
                if known != reduction:
                    raise UserError(
                        f"measurement {name!r} is given as {known} and as {reduction}; combine it "
                        "in one way"
                    )
                numbers.append(value)
    return {name: REDUCTIONS[how](numbers) for name, (how, numbers) in found.items()}


@dataclass(slots=True, kw_only=True)
class Group:
    prompt: Prompt
    samples: list[Sample]


def has_equal_rewards(group: Group) -> bool:
    return len({sample.score.value for sample in group.samples}) == 1
