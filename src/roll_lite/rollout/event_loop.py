"""Where the coordinator's event loop runs: in a thread, or, in a world of one, inside each call."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from roll_lite.workers.async_rewards import cancel_other_tasks

CLOSE_SECONDS = 5.0  # for rewards that are running to come to an end
IDLE_SECONDS = 0.0005  # between two pumps when no engine has work
MAX_ROUNDS = 20
"""Rounds of callbacks before the next pump, which takes much longer than a round: a reply passes
through several coroutines until it is the next request."""
GC_THRESHOLDS = (20_000, 20, 50)
OBJECTS_PER_SAMPLE = 100
"""More than a sample in flight consists of, which is about 70 that the collector looks at."""


class Signal:
    """Wakes the call that waits for groups: they have changed, or an error ends the run."""

    def __init__(self):
        self.error: BaseException | None = None
        """The first error that ends the run; every later call raises it."""
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._changed.set()
        self._failed.set()

    async def wait(self) -> None:
        """Until the next `notify` or `fail`."""
        self._changed.clear()
        await self._changed.wait()

    async def result_of(self, future: asyncio.Future) -> Any:
        """The result of a future, unless an error ends the run first."""
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait([future, failed], return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise self.error
            return future.result()
        finally:
            failed.cancel()
            future.cancel()
            await asyncio.gather(future, return_exceptions=True)


class LoopThread:
    """An event loop in a thread, which runs while the recipe does something else."""

    def __init__(self, signal: Signal):
        """Exceptions in callbacks, which asyncio would only log, go to the signal."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(partial(_handle, signal))
        # A daemon: a reward that never returns must not keep the process alive.
        run = partial(self._run_forever, signal)
        self._thread = threading.Thread(target=run, name="rollout", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run_forever(self, signal: Signal) -> None:
        """A sys.exit() in a user's function ends the run, not this thread, which calls wait for."""
        while True:
            try:
                return self._loop.run_forever()
            except SystemExit as error:
                signal.fail(error)

    def run(self, coroutine: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Have a function called in the loop; from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nothing waits for it
            self._loop.call_soon_threadsafe(function, *args)

    interrupt = call

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        ended = asyncio.run_coroutine_threadsafe(cancel_other_tasks(), self._loop)
        ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class PumpedLoop:
    """An event loop inside each call, for a world of one: it also pumps the engines."""

    def __init__(self, pump: Callable[[], bool], signal: Signal):
        """`pump` lets the engines do one piece of work; it returns whether more may be left."""
        self._loop = StoppedClockLoop()
        self._loop.set_exception_handler(partial(_handle, signal))
        self._pump = pump

    def start(self) -> None:
        """There is no thread to start."""

    def run(self, coroutine: Coroutine) -> Any:
        with self._loop.running_clock():
            return _run_until_complete(self._loop, self._pump_until_done(coroutine))

    def call(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def interrupt(self, function: Callable[..., None], *args: Any) -> None:
        """Have a function called from a signal handler, whichever thread runs the loop."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(function, *args)
        else:
            function(*args)

    def close(self) -> None:
        with self._loop.running_clock():
            _run_until_complete(self._loop, cancel_other_tasks())
        self._loop.close()

    async def _pump_until_done(self, coroutine: Coroutine) -> Any:
        task = asyncio.ensure_future(coroutine)
        is_busy = True
        try:
            while True:
                await asyncio.sleep(0 if is_busy else IDLE_SECONDS)
                for _ in range(MAX_ROUNDS):  # what is ready may make other coroutines ready
                    if task.done() or not self._loop.has_ready:
                        break
                    await asyncio.sleep(0)
                if task.done():
                    return task.result()
                is_busy = self._pump()
        finally:
            task.cancel()


def _run_until_complete(loop: asyncio.AbstractEventLoop, coroutine: Coroutine) -> Any:
    """In this thread; in another one if this one already runs an event loop, as in a notebook."""
    if not _has_running_loop():
        return loop.run_until_complete(coroutine)
    task = loop.create_task(coroutine)
    with ThreadPoolExecutor(1, "rollout") as threads:
        ended = threads.submit(loop.run_until_complete, task)
        try:
            return ended.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise


def _has_running_loop() -> bool:
    """Whether this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class StoppedClockLoop(asyncio.SelectorEventLoop):
    """Its clock stops while it does not run, so training does not use up a sample's deadline."""

    def __init__(self):
        self._stopped = 0.0
        super().__init__()
        self._stopped_at = time.monotonic()

    def time(self) -> float:
        return time.monotonic() - self._stopped

    @property
    def has_ready(self) -> bool:
        """Whether callbacks are to be called in the next round."""
        return bool(self._ready)

    @contextmanager
    def running_clock(self) -> Iterator[None]:
        self._stopped += time.monotonic() - self._stopped_at
        try:
            yield
        finally:
            self._stopped_at = time.monotonic()


@contextmanager
def rare_collections(num_samples: int) -> Iterator[None]:
    """Collect garbage less often, and only among new objects: a quarter more samples per second.

    With `num_samples` in flight at once, a collection waits until there are more new objects than
    these consist of. They are freed without one, which would look at all of them and find nothing.
    """
    thresholds = gc.get_threshold()
    first, *others = GC_THRESHOLDS

    def freeze_once_more(phase: str, info: dict[str, int]) -> None:
        """What the first steps have imported and compiled stays too: some 0.4 s a collection."""
        if phase == "stop" and info["generation"] == 2:
            gc.callbacks.remove(freeze_once_more)
            gc.freeze()

    gc.collect()
    gc.freeze()
    gc.set_threshold(max(first, num_samples * OBJECTS_PER_SAMPLE), *others)
    gc.callbacks.append(freeze_once_more)
    try:
        yield
    finally:
        if freeze_once_more in gc.callbacks:
            gc.callbacks.remove(freeze_once_more)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _handle(signal: Signal, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if "handle" in context and "exception" in context:
        signal.fail(context["exception"])
    else:  # such as a future whose exception was never retrieved
        loop.default_exception_handler(context)
