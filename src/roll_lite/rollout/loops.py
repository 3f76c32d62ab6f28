"""Where the coordinator's event loop runs: in a thread of its own, or, alone, while one waits."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

CLOSE_SECONDS = 5.0  # for the code of a reward to come to an end
IDLE_SECONDS = 0.0005  # between two looks when nobody has work

OnFault = Callable[[BaseException], None]
"""Told what a callback raised: asyncio would only log it."""


class LoopThread:
    """An event loop that goes on while the recipe does something else."""

    def __init__(self, on_fault: OnFault):
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(partial(_handle, on_fault))
        # A daemon: a reward that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Have it called in the loop; from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits for it any more
            self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Cancel what is under way, and end the thread."""
        ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class PumpedLoop:
    """An event loop of this thread, for a world of one: engines step in between."""

    def __init__(self, pump: Callable[[], bool], on_fault: OnFault):
        """`pump` lets engines do a piece of work, and says whether there may be more."""
        self._loop = StoppedClockLoop()
        self._loop.set_exception_handler(partial(_handle, on_fault))
        self._pump = pump

    def run(self, coroutine: Coroutine) -> Any:
        with self._loop.going():
            return self._loop.run_until_complete(self._pump_until_done(coroutine))

    def call(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def close(self) -> None:
        with self._loop.going():
            self._loop.run_until_complete(_cancel_others())
        self._loop.close()

    async def _pump_until_done(self, coroutine: Coroutine) -> Any:
        task = asyncio.ensure_future(coroutine)
        is_busy = True
        try:
            while True:
                await asyncio.sleep(0 if is_busy else IDLE_SECONDS)
                if task.done():
                    return task.result()
                is_busy = self._pump()
        finally:
            task.cancel()


class StoppedClockLoop(asyncio.SelectorEventLoop):
    """Its clock stands while it does not run: samples that wait for training do not get older."""

    def __init__(self):
        self._stopped = 0.0
        super().__init__()
        self._stopped_at = time.monotonic()

    def time(self) -> float:
        return time.monotonic() - self._stopped

    @contextmanager
    def going(self) -> Iterator[None]:
        self._stopped += time.monotonic() - self._stopped_at
        try:
            yield
        finally:
            self._stopped_at = time.monotonic()


def _handle(on_fault: OnFault, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if "handle" in context and "exception" in context:
        on_fault(context["exception"])
    else:  # such as the exception of a future that nobody looked at
        loop.default_exception_handler(context)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
