"""How a job in a worker can fail, and how many failures a run tolerates."""

import bdb
import re
import sys
import traceback
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import Literal

from roll_lite.checks import UserError
from roll_lite.envs.play import EnvError
from roll_lite.stopping import Ended
from roll_lite.types import Prompt

WINDOW = 200
"""Jobs over which the share of failures is computed."""
MIN_JOBS = 50
"""Below this number of jobs, failures are counted but never stop the run."""
NUM_EXAMPLES = 3
MAX_SHOWN = 20
"""Kinds of failures that are shown on the console."""
MAX_TEXT = 1 << 16
"""Characters of a failure."""
SHOWN_CHARACTERS = 1000
"""Characters of a reply that the console shows; events.jsonl has all of it."""
_PACKAGE = re.escape(str(Path(__file__).parents[1]))  # users have folders called roll_lite too
_OUR_FRAMES = (
    rf"<string>|{_PACKAGE}/(?:rollout/|workers/|envs/play\.py)|.*/asyncio/|.*/threading\.py"
)
_OUR_MODULES = ("roll_lite.workers.", "roll_lite.envs.play", "contextlib")
REWARD_COUNTS = ("calls", "seconds", "errors", "timeouts", "crashes", "replaced")
COUNTED_KINDS = {"timeout": "timeouts", "crash": "crashes"}
"""Metrics of kinds of failures that are counted by themselves."""


class RewardTimeout(RuntimeError):
    """The reward exceeded its time limit, and its process was killed."""

    def __init__(self, text: str, *, is_final: bool = False):
        super().__init__(text)
        self.is_final = is_final
        """Whether another attempt would only take as long again."""


class RewardCrash(RuntimeError):
    """The reward's process died, or was killed for breaking a limit."""


class RewardError(RuntimeError):
    """The reward raised an exception, which the message names; a note has its traceback."""


class TooManyFailures(Ended):
    """The share of failed jobs is too high: the rewards or environments themselves are broken."""

    def __init__(self, text: str, failure: "Failure | None" = None):
        super().__init__(text)
        self.failure = failure
        """How the job failed that raises this, if it did."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed job, as it is sent between processes."""

    kind: Literal["raised", "timeout", "crash", "lost", "debugger"]
    text: str
    culprit: Literal["this", "other", "unknown", "supervisor"] = "this"
    """Whose code ran when the worker died: this job's, that of another job in the same worker, or
    none that is known; or the supervisor died. Only in the first case is the job to blame, and in
    the others it is repeated."""
    is_final: bool = False
    """A timeout of code that did not lack a processor."""

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


def cause_of(error: BaseException) -> BaseException:
    """The environment's own error."""
    return error.__cause__ or error if isinstance(error, EnvError) else error


def describe(error: BaseException) -> Failure:
    """The failure for an exception of user code, where the traceback starts."""
    error = cause_of(error)
    frames = error.__traceback__
    while frames and frames.tb_next and _is_ours(frames.tb_frame):
        frames = frames.tb_next
    if isinstance(error, bdb.BdbQuit):
        return Failure("debugger", _place_of_debugger(error))
    text = "".join(traceback.format_exception(type(error), error, frames))
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n...\n{text[-MAX_TEXT // 2 :]}"
    return Failure("raised", text)


def _place_of_debugger(error: bdb.BdbQuit) -> str:
    """The line of user code that called it."""
    places = [
        f"{Path(frame.f_code.co_filename).name} line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_ours(frame) and frame.f_globals.get("__name__") not in ("bdb", "pdb")
    ]
    return places[-1] if places else "a breakpoint"


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith(_OUR_MODULES)


def user_frames(stack: str) -> str:
    """A stack without the frames of workers and event loops."""
    return re.sub(f'^  File "(?:{_OUR_FRAMES})[^\n]*\n(?:    .*\n)*', "", stack, flags=re.M)


class ErrorBudget:
    """Counts jobs, shows the first failure of each kind, and stops the run when too large a share
    of them fails."""

    def __init__(
        self,
        max_error_share: float,
        *,
        noun: str = "reward",
        jobs: str = "rewards",
        share_option: str = "max_error_share",
        prefix: str = "reward",
        metrics: Sequence[str] = REWARD_COUNTS,
    ):
        """Messages call the function `noun`, what is counted `jobs`, and the limit `share_option`.
        The first of the metrics, under `prefix`, counts jobs."""
        if not 0 <= max_error_share <= 1:
            raise UserError(f"max_error_share={max_error_share} must be from 0 to 1 (never)")
        self._max_error_share = max_error_share
        self._noun = noun
        self._jobs = jobs
        self._share_option = share_option
        self._prefix = prefix
        self._metrics = metrics
        self._counts: Counter[str] = Counter()
        self._last_jobs: deque[tuple[Hashable, bool]] = deque(maxlen=WINDOW)
        """Keys of the last jobs, and whether each failed."""
        self._failed: set[Hashable] = set()
        """Keys of the failed jobs in the window; a retried job counts once."""
        self._last_failure = ""
        self._examples: deque[str] = deque(maxlen=NUM_EXAMPLES)
        self._shown: set[tuple[str, str, str]] = set()
        """Domain, place and culprit of the failures that were shown."""

    def record(
        self,
        prompt: Prompt,
        reply: str,
        seconds: float,
        failure: Failure | None,
        *,
        place: str = "",
        key: Hashable,
    ) -> None:
        """Count one job; `place` says where in an episode. Jobs of an equal key are retries. Raises
        TooManyFailures once the budget is exceeded."""
        if failure and failure.kind == "debugger":
            raise TooManyFailures(
                f"the debugger of {failure.text} has no terminal in a worker process; add "
                f"--{self._prefix}-workers 0, and it has yours",
                failure,
            )
        self.count(self._metrics[0])
        self.count("seconds", seconds)
        where = f"prompt {prompt.id}{place}"
        if failure:
            self.count("errors")
            if failure.kind in COUNTED_KINDS:
                self.count(COUNTED_KINDS[failure.kind])
            self.show_once(prompt, where, reply, failure)
        if key not in self._failed:
            self._add(key, where, reply, failure)
        share = len(self._failed) / len(self._last_jobs)
        if len(self._last_jobs) >= MIN_JOBS and share > self._max_error_share:
            raise TooManyFailures(self._summary(), failure)

    def count(self, metric: str, amount: float = 1) -> None:
        self._counts[metric] += amount

    def metrics(self) -> dict[str, float]:
        """Jobs, their total seconds, and failures since the last call of this method.

        `errors` counts all failures, including timeouts and crashes.
        """
        counts = self._counts
        self._counts = Counter()
        return {f"{self._prefix}/{name}": counts[name] for name in self._metrics}

    def _add(self, key: Hashable, where: str, reply: str, failure: Failure | None) -> None:
        if len(self._last_jobs) == WINDOW:
            oldest, has_failed = self._last_jobs[0]
            if has_failed:
                self._failed.discard(oldest)
        self._last_jobs.append((key, failure is not None))
        if failure:
            self._last_failure = failure.text
            self._failed.add(key)
            self._examples.append(f"- {where}, reply {reply[:80]!r}: {failure.summary}")

    def _summary(self) -> str:
        examples = "\n".join(self._examples)
        return (
            f"{len(self._failed)} of the last {len(self._last_jobs)} {self._jobs} failed, more "
            f"than {self._share_option}={self._max_error_share}. The last of them:\n"
            f"{self._last_failure.rstrip()}\nThe most recent ones:\n{examples}"
        )

    def show_once(
        self, prompt: Prompt, where: str, reply: str, failure: Failure, counted: str = "errors"
    ) -> None:
        """On the console, unless a failure of the same domain and place was shown before; `counted`
        is the metric that has it."""
        key = prompt.domain, failure.place, failure.culprit
        if key in self._shown or len(self._shown) == MAX_SHOWN:
            return
        self._shown.add(key)
        print(
            f"the {self._noun} of domain {prompt.domain!r} failed on {where} (such failures "
            f"are shown once, and counted in {self._prefix}/{counted})\n"
            f"{indent(failure.text.rstrip(), '  ')}\n  reply: {reply[:SHOWN_CHARACTERS]!r}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
