"""Rewards for the coordinator: `await workers.score(prompt, reply)`, whatever the rewards do."""

import asyncio
import bdb
import time
from collections import Counter, deque
from collections.abc import Mapping

from roll_lite.types import Prompt, Reward, Score
from roll_lite.workers.calls import Failure, Limits, describe, evaluate
from roll_lite.workers.errors import RewardsBroken
from roll_lite.workers.link import SupervisorLink
from roll_lite.workers.loading import pack_rewards
from roll_lite.workers.supervisor import Setup

WINDOW = 200
"""Calls over which the share of errors is taken."""
MIN_CALLS = 50
"""As long as there were fewer, errors are only counted."""
NUM_EXAMPLES = 3
_COUNTED = {"raised": (), "timeout": ("timeouts",), "crash": ("crashes",)}


class RewardWorkers:
    """Processes that call the reward of a prompt's domain.

    A call that hangs, crashes or breaks a limit costs its worker, which is replaced, and fails with
    RewardTimeout or RewardCrash; what a reward raises is raised here, its traceback as a note.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        *,
        num_workers: int = 4,
        seconds: float = 10.0,
        memory_gib: float = 2.0,
        output_kib: int = 1024,
        max_error_share: float = 0.2,
    ):
        """Rewards must be importable by name. Of a call: wall time, memory, what it may print.

        num_workers=0 calls them inline, without any limit, for a debugger. When more than
        max_error_share of the last 200 calls failed, `score` raises RewardsBroken.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} must be 0 (inline) or above")
        if not 0 <= max_error_share <= 1:
            raise ValueError(f"max_error_share={max_error_share} must be from 0 to 1 (never)")
        limits = Limits(seconds=seconds, memory_gib=memory_gib, output_kib=output_kib)
        self._rewards, self._max_error_share = dict(rewards), max_error_share
        self._counts: Counter[str] = Counter()
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._num_failed = 0
        self._examples: deque[str] = deque(maxlen=NUM_EXAMPLES)
        self._link = None
        if num_workers:
            packed = pack_rewards(self._rewards)
            self._link = SupervisorLink(
                Setup(rewards=packed, num_workers=num_workers, limits=limits)
            )

    async def score(self, prompt: Prompt, reply: str) -> Score:
        """From any event loop. RewardsBroken, and nothing else, says that going on is pointless."""
        if prompt.domain not in self._rewards:
            raise ValueError(
                f"prompt {prompt.id} has domain={prompt.domain!r}, for which there is no reward; "
                f"known domains: {', '.join(sorted(self._rewards))}"
            )
        if self._link is None:
            return self._score_inline(prompt, reply)
        seconds, result = await asyncio.wrap_future(self._link.ask(prompt, reply))
        self._record(prompt, reply, seconds, result)
        if isinstance(result, Failure):
            raise result.exception()
        return result

    def metrics(self) -> dict[str, float]:
        """Since the last call: calls, their seconds altogether, and how many failed.

        Errors are all failures; timeouts and crashes are those among them.
        """
        counts, self._counts = self._counts, Counter()
        names = ("calls", "seconds", "errors", "timeouts", "crashes")
        return {f"reward/{name}": counts[name] for name in names}

    def close(self) -> None:
        """Calls under way fail."""
        if self._link:
            self._link.close()

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score_inline(self, prompt: Prompt, reply: str) -> Score:
        start = time.monotonic()
        try:
            score = evaluate(self._rewards, prompt, reply)
        except bdb.BdbQuit:  # the person at the debugger wants to leave
            raise
        except Exception as error:  # of any kind: rewards are the user's code
            self._record(prompt, reply, time.monotonic() - start, describe(error))
            raise
        self._record(prompt, reply, time.monotonic() - start, score)
        return score

    def _record(self, prompt: Prompt, reply: str, seconds: float, result: Score | Failure) -> None:
        has_failed = isinstance(result, Failure)
        self._counts["calls"] += 1
        self._counts["seconds"] += seconds
        if len(self._failed) == WINDOW:
            self._num_failed -= self._failed[0]
        self._failed.append(has_failed)
        self._num_failed += has_failed
        if has_failed:
            self._counts.update(("errors", *_COUNTED[result.kind]))
            self._examples.append(_example(prompt, reply, result))
        share = self._num_failed / len(self._failed)
        if len(self._failed) >= MIN_CALLS and share > self._max_error_share:
            raise RewardsBroken(
                f"{self._num_failed} of the last {len(self._failed)} rewards failed, more than "
                f"max_error_share={self._max_error_share}. The last of them:\n"
                + "\n".join(self._examples)
            )


def _example(prompt: Prompt, reply: str, failure: Failure) -> str:
    return f"- prompt {prompt.id}, reply {reply[:80]!r}: {failure.summary}"
