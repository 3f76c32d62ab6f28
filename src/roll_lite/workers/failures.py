"""How a reward call can fail, and how many failures a run tolerates."""

import pickle
import re
import sys
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from textwrap import indent
from typing import Literal

from roll_lite.progress import clear_line
from roll_lite.stopping import Ended
from roll_lite.types import Prompt

WINDOW = 200
"""Replies over which the share of failed rewards is computed."""
MIN_REPLIES = 50
"""Below this number of replies, failures are counted but never stop the run."""
NUM_EXAMPLES = 3
MAX_SHOWN = 20
"""Kinds of failures that are shown on the console."""
SHOWN_CHARACTERS = 1000
"""Of a reply on the console; events.jsonl has all of it."""
_OUR_FRAMES = r"<string>|.*/roll_lite/workers/|.*/asyncio/|.*/threading\.py"
_METRICS = ("calls", "seconds", "errors", "timeouts", "crashes")
_COUNTED_AS = {"raised": (), "timeout": ("timeouts",), "crash": ("crashes",)}


class RewardTimeout(RuntimeError):
    """The reward exceeded its time limit, and its process was killed."""


class RewardCrash(RuntimeError):
    """The reward's process died, or was killed for breaking a limit."""


class RewardError(RuntimeError):
    """The reward raised an exception that cannot be pickled; the message holds its traceback."""


class RewardsBroken(Ended):
    """The share of failed calls is too high: the rewards themselves are broken."""

    def __init__(self, text: str, failure: "RewardFailure | None" = None):
        super().__init__(text)
        self.failure = failure
        """How the call failed that raises this, if it did."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A failed call, as it is sent between processes."""

    kind: Literal["raised", "timeout", "crash"]
    text: str
    pickled: bytes | None = None
    """The exception that the reward raised, if it can be pickled."""

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


def describe(error: BaseException) -> RewardFailure:
    """The failure for an exception; the traceback starts at the reward's own code."""
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return RewardFailure("raised", text, _pickled(error))


def _pickled(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:  # a user's class may raise anything; the text is sent in any case
        return None


def _unpickled(data: bytes | None) -> Exception | None:
    try:
        error = pickle.loads(data) if data else None
    except Exception:  # the class may need other arguments, or not exist in this process
        return None
    return error if isinstance(error, Exception) else None


def user_frames(stack: str) -> str:
    """A stack without the frames of workers and event loops."""
    return re.sub(f'^  File "(?:{_OUR_FRAMES})[^\n]*\n(?:    .*\n)*', "", stack, flags=re.M)


class ErrorBudget:
    """Counts reward calls, shows the first failure of each kind, and stops the run when too large
    a share of them fails."""

    def __init__(self, max_error_share: float):
        if not 0 <= max_error_share <= 1:
            raise ValueError(f"max_error_share={max_error_share} must be from 0 to 1 (never)")
        self._max_error_share = max_error_share
        self._counts: Counter[str] = Counter()
        self._replies: deque[tuple[str, str, bool]] = deque(maxlen=WINDOW)
        """Prompt id, reply, and whether its reward failed."""
        self._last = ""
        """The most recent failure."""
        self._failed: set[tuple[str, str]] = set()
        """The failed replies in the window; a retried reply counts once."""
        self._examples: deque[str] = deque(maxlen=NUM_EXAMPLES)
        self._shown: set[tuple[str, str]] = set()
        """Domain and place of the failures that were shown."""

    def record(
        self, prompt: Prompt, reply: str, seconds: float, failure: RewardFailure | None
    ) -> None:
        """Count one call. Raises RewardsBroken once the budget is exceeded."""
        self._counts["calls"] += 1
        self._counts["seconds"] += seconds
        if failure:
            self._counts.update(("errors", *_COUNTED_AS[failure.kind]))
            self._show_once(prompt, reply, failure)
        if (prompt.id, reply) not in self._failed:
            self._add(prompt.id, reply, failure)
        share = len(self._failed) / len(self._replies)
        if len(self._replies) >= MIN_REPLIES and share > self._max_error_share:
            text = (
                f"{len(self._failed)} of the last {len(self._replies)} rewards failed, more than "
                f"max_error_share={self._max_error_share}. The most recent failures:\n"
            )
            examples = "\n".join(self._examples)
            whole = f"\nThe last of them in full:\n{self._last}"
            raise RewardsBroken(text + examples + whole, failure)

    def _add(self, prompt_id: str, reply: str, failure: RewardFailure | None) -> None:
        if len(self._replies) == WINDOW and self._replies[0][2]:
            self._failed.discard(self._replies[0][:2])
        self._replies.append((prompt_id, reply, failure is not None))
        if failure:
            self._last = failure.text
            self._failed.add((prompt_id, reply))
            self._examples.append(f"- prompt {prompt_id}, reply {reply[:80]!r}: {failure.summary}")

    def _show_once(self, prompt: Prompt, reply: str, failure: RewardFailure) -> None:
        key = prompt.domain, failure.place
        if key in self._shown or len(self._shown) == MAX_SHOWN:
            return
        self._shown.add(key)
        clear_line()
        print(
            f"the reward of domain {prompt.domain!r} failed on prompt {prompt.id} (such failures "
            "are shown once, and counted in reward/errors)\n"
            f"{indent(failure.text.rstrip(), '  ')}\n  reply: {reply[:SHOWN_CHARACTERS]!r}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """Calls, their total seconds, and failures since the last call of this method.

        `errors` counts all failures, including timeouts and crashes.
        """
        counts, self._counts = self._counts, Counter()
        return {f"reward/{name}": counts[name] for name in _METRICS}
