"""Results that another thread brings into an event loop."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any


class Inbox:
    """Sets futures of an event loop from any thread. Many results need one wake-up of the loop,
    which is a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._results: deque[tuple[asyncio.Future, Any]] = deque()
        self._is_called = False
        """Whether the loop is going to take what is there."""

    def put(self, future: asyncio.Future, result: Any) -> None:
        """Nothing happens if the future was cancelled, or the loop is closed."""
        self._results.append((future, result))
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop is closed: nothing waits for it
                self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_called = False  # first: what comes from now on calls again
        while self._results:
            future, result = self._results.popleft()
            if not future.done():
                future.set_result(result)
