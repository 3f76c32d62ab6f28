"""`async def` rewards: many wait at once, in an event loop of their own thread."""

import asyncio
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from roll_lite.envs.env import Ending
from roll_lite.types import AsyncReward, Prompt
from roll_lite.workers.channel import Outcome, checked
from roll_lite.workers.failures import Failure, describe, user_frames
from roll_lite.workers.state import WorkerOptions

_CLOSE_SECONDS = 5.0


class AsyncRewards:
    """Awaits rewards under the time limit. They run in this process: one that blocks its thread
    cannot be killed, but is reported.
    """

    def __init__(self, options: WorkerOptions, max_calls: int):
        self._options = options
        self._places = asyncio.Semaphore(max_calls)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="async rewards", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if self._loop is None:
            return
        with suppress(TimeoutError):  # of a reward that blocks the thread
            self._submit(cancel_other_tasks()).result(_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def answer(
        self, reward: AsyncReward, prompt: Prompt, reply: str
    ) -> tuple[float, Outcome]:
        """Seconds and outcome of a call, from any event loop."""
        future = asyncio.wrap_future(self._submit(self._call(reward, prompt, reply)))
        try:
            while not (await asyncio.wait([future], timeout=self._options.seconds))[0]:
                if not await self._responds():
                    return self._options.seconds, self._blocked()
            return future.result()
        finally:
            future.cancel()

    def _submit(self, coroutine: Any) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _call(self, reward: AsyncReward, prompt: Prompt, reply: str) -> tuple[float, Outcome]:
        async with self._places:  # waiting for a place is not counted
            start = time.monotonic()
            try:
                async with asyncio.timeout(self._options.seconds) as limit:
                    score = checked(await reward(prompt, reply))
                outcome = Ending(reason="returned", score=score)
            except asyncio.CancelledError:  # the sample was aborted
                raise
            except BaseException as error:  # user code may raise anything
                outcome = self._late(error) if limit.expired() else describe(error)
            return time.monotonic() - start, outcome

    def _late(self, error: BaseException) -> Failure:
        """The cancellation that caused the timeout knows where the reward was waiting."""
        where = describe(error.__cause__ or error).text
        return Failure("timeout", f"{self._options.took_longer}\nIt waited here:\n{where}")

    async def _responds(self) -> bool:
        """Whether the thread does anything within the time limit."""
        future = asyncio.wrap_future(self._submit(asyncio.sleep(0)))
        done, _ = await asyncio.wait([future], timeout=self._options.seconds)
        return bool(done)

    def _blocked(self) -> Failure:
        frame = sys._current_frames().get(self._thread.ident)
        stack = user_frames("".join(traceback.format_stack(frame)))
        return Failure(
            "timeout",
            f"a reward has blocked the event loop for more than {self._options.seconds_option}; "
            f"await what takes long, or make it a plain function\nIt is here:\n{stack}",
        )


async def cancel_other_tasks() -> None:
    """Cancel all tasks of the event loop but this one, and wait for their end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
