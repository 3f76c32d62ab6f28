"""How a call in a worker can fail, and how many failures a run tolerates."""

import re
import sys
import traceback
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Literal

from roll_lite.stopping import Ended
from roll_lite.types import Prompt

WINDOW = 200
"""Calls over which the share of failures is computed."""
MIN_CALLS = 50
"""Below this number of calls, failures are counted but never stop the run."""
NUM_EXAMPLES = 3
MAX_SHOWN = 20
"""Kinds of failures that are shown on the console."""
MAX_TEXT = 1 << 16
"""Characters of a failure."""
SHOWN_CHARACTERS = 1000
"""Of a reply on the console; events.jsonl has all of it."""
_PACKAGE = re.escape(str(Path(__file__).parents[1]))  # users have folders called roll_lite too
_OUR_FRAMES = rf"<string>|{_PACKAGE}/(?:workers/|envs/play\.py)|.*/asyncio/|.*/threading\.py"
_OUR_MODULES = ("roll_lite.workers.", "roll_lite.envs.play", "contextlib")
_COUNTED_AS = {"timeout": ("timeouts",), "crash": ("crashes",)}


class RewardTimeout(RuntimeError):
    """The reward exceeded its time limit, and its process was killed."""


class RewardCrash(RuntimeError):
    """The reward's process died, or was killed for breaking a limit."""


class RewardError(RuntimeError):
    """The reward raised an exception, which the message names; a note has its traceback."""


class TooManyFailures(Ended):
    """The share of failed calls is too high: the rewards or environments themselves are broken."""

    def __init__(self, text: str, failure: "Failure | None" = None):
        super().__init__(text)
        self.failure = failure
        """How the call failed that raises this, if it did."""


class RewardsBroken(TooManyFailures):
    pass


class EnvsBroken(TooManyFailures):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How messages and metrics speak of what workers do."""

    one: str
    """What fails: a reward."""
    table: str
    """The argument that has them by domain."""
    remedy: str
    """What to do with one that a worker cannot import."""
    calls: str
    """What is counted in messages."""
    prefix: str
    """Of metrics."""
    metrics: tuple[str, ...]
    """The first counts calls."""
    share_option: str
    """Of a recipe: the share of failures that it tolerates."""
    broken: type[TooManyFailures]


REWARDS = Words(
    one="reward",
    table="rewards",
    remedy="define it with def at the top level of a file, name it in INLINE, or run with "
    "reward_workers=0",
    calls="rewards",
    prefix="reward",
    metrics=("calls", "seconds", "errors", "timeouts", "crashes", "replaced"),
    share_option="max_error_share",
    broken=RewardsBroken,
)
ENVIRONMENTS = Words(
    one="environment",
    table="players",
    remedy="define it with class or def at the top level of a file, or run with env_workers=0",
    calls="episodes",
    prefix="env",
    metrics=("episodes", "seconds", "errors", "timeouts", "crashes", "replayed", "replaced"),
    share_option="env_error_share",
    broken=EnvsBroken,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call, as it is sent between processes."""

    kind: Literal["raised", "timeout", "crash", "lost"]
    text: str
    culprit: Literal["this", "other", "unknown", "supervisor"] = "this"
    """Whose code ran when the worker died: this call's, that of another call in the same worker,
    or none that is known; or the supervisor died. Only in the first case is the call to blame, and
    in the others it is asked again."""

    @property
    def place(self) -> str:
        """The line of code that raised, with the class of its exception; equal for equal errors."""
        if self.kind != "raised":
            return self.kind
        frames = [line for line in self.text.splitlines() if line.startswith('  File "')]
        return f"{''.join(frames[-1:])} {self.summary.partition(':')[0]}"

    @property
    def summary(self) -> str:
        """One line: the exception, or why the worker was killed."""
        lines = self.text.strip().splitlines() or [""]
        return lines[-1] if self.kind == "raised" else lines[0]

    def exception(self) -> Exception:
        if self.kind == "timeout":
            return RewardTimeout(self.text)
        if self.kind == "crash":
            return RewardCrash(self.text)
        error = RewardError(self.summary)
        error.add_note(f"In a reward worker:\n{self.text}")
        return error


def describe(error: BaseException) -> Failure:
    """The failure for an exception; the traceback starts at the user's own code."""
    frames = error.__traceback__
    while frames and frames.tb_next and _is_ours(frames.tb_frame.f_globals.get("__name__", "")):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n...\n{text[-MAX_TEXT // 2 :]}"
    return Failure("raised", text)


def _is_ours(module: str) -> bool:
    return module.startswith(_OUR_MODULES)


def user_frames(stack: str) -> str:
    """A stack without the frames of workers and event loops."""
    return re.sub(f'^  File "(?:{_OUR_FRAMES})[^\n]*\n(?:    .*\n)*', "", stack, flags=re.M)


class ErrorBudget:
    """Counts calls, shows the first failure of each kind, and stops the run when too large a share
    of them fails."""

    def __init__(self, max_error_share: float, words: Words = REWARDS):
        if not 0 <= max_error_share <= 1:
            raise ValueError(f"max_error_share={max_error_share} must be from 0 to 1 (never)")
        self._max_error_share, self._words = max_error_share, words
        self._counts: Counter[str] = Counter()
        self._calls: deque[tuple[Hashable, bool]] = deque(maxlen=WINDOW)
        """Keys of the last calls, and whether each failed."""
        self._last = ""
        """The most recent failure."""
        self._failed: set[Hashable] = set()
        """Keys of the failed calls in the window; a retried call counts once."""
        self._examples: deque[str] = deque(maxlen=NUM_EXAMPLES)
        self._shown: set[tuple[str, str]] = set()
        """Domain and place of the failures that were shown."""

    def record(
        self,
        prompt: Prompt,
        reply: str,
        seconds: float,
        failure: Failure | None,
        *,
        place: str = "",
        key: Hashable = None,
    ) -> None:
        """Count one call; `place` says where in an episode. Calls of an equal key, by default the
        prompt and the reply, are retries. Raises TooManyFailures once the budget is exceeded."""
        self.count(self._words.metrics[0])
        self.count("seconds", seconds)
        where = f"prompt {prompt.id}{place}"
        if failure:
            self._counts.update(("errors", *_COUNTED_AS.get(failure.kind, ())))
            self.show_once(prompt, where, reply, failure)
        key = (prompt.id, reply) if key is None else key
        if key not in self._failed:
            self._add(key, where, reply, failure)
        share = len(self._failed) / len(self._calls)
        if len(self._calls) >= MIN_CALLS and share > self._max_error_share:
            raise self._words.broken(self._summary(), failure)

    def count(self, metric: str, amount: float = 1) -> None:
        self._counts[metric] += amount

    def metrics(self) -> dict[str, float]:
        """Calls, their total seconds, and failures since the last call of this method.

        `errors` counts all failures, including timeouts and crashes.
        """
        counts, self._counts = self._counts, Counter()
        return {f"{self._words.prefix}/{name}": counts[name] for name in self._words.metrics}

    def _add(self, key: Hashable, where: str, reply: str, failure: Failure | None) -> None:
        if len(self._calls) == WINDOW and self._calls[0][1]:
            self._failed.discard(self._calls[0][0])
        self._calls.append((key, failure is not None))
        if failure:
            self._last = failure.text
            self._failed.add(key)
            self._examples.append(f"- {where}, reply {reply[:80]!r}: {failure.summary}")

    def _summary(self) -> str:
        examples = "\n".join(self._examples)
        return (
            f"{len(self._failed)} of the last {len(self._calls)} {self._words.calls} failed, more "
            f"than {self._words.share_option}={self._max_error_share}. The most recent failures:\n"
            f"{examples}\nThe last of them in full:\n{self._last}"
        )

    def show_once(self, prompt: Prompt, where: str, reply: str, failure: Failure) -> None:
        """On the console, unless one of its domain and place was shown before."""
        key = prompt.domain, failure.place
        if key in self._shown or len(self._shown) == MAX_SHOWN:
            return
        self._shown.add(key)
        print(
            f"the {self._words.one} of domain {prompt.domain!r} failed on {where} (such failures "
            f"are shown once, and counted in {self._words.prefix}/errors)\n"
            f"{indent(failure.text.rstrip(), '  ')}\n  reply: {reply[:SHOWN_CHARACTERS]!r}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
