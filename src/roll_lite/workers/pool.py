"""Rewards for the coordinator: `await workers.score(prompt, reply)`, whatever the rewards do."""

import asyncio
import bdb
import time
from collections.abc import Mapping

from roll_lite.types import Prompt, Reward, Score
from roll_lite.workers.calls import Failure, Limits, describe, evaluate
from roll_lite.workers.link import SupervisorLink
from roll_lite.workers.loading import pack_rewards
from roll_lite.workers.supervisor import Setup
from roll_lite.workers.tally import Tally


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
        max_error_share of the last 200 replies failed, `score` raises RewardsBroken.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} must be 0 (inline) or above")
        limits = Limits(seconds=seconds, memory_gib=memory_gib, output_kib=output_kib)
        self._rewards, self._tally = dict(rewards), Tally(max_error_share)
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
        failure = result if isinstance(result, Failure) else None
        self._tally.record(prompt, reply, seconds, failure)
        if failure:
            raise failure.exception()
        return result

    def metrics(self) -> dict[str, float]:
        return self._tally.metrics()

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
            self._tally.record(prompt, reply, time.monotonic() - start, describe(error))
            raise
        self._tally.record(prompt, reply, time.monotonic() - start, None)
        return score
