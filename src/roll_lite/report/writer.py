"""Writes records while the run goes on.

A thousand short samples take 20 ms to become lines of JSON, and long ones more. A thread does that
while the next step generates. It works in short slices: the threads that feed the GPU need the same
interpreter, and should hardly wait for it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

SLICE_SECONDS = 0.0002
PAUSE_SECONDS = 0.0001
MAX_PENDING = 8
"""Files to write. A run that makes them faster than they can be written waits."""


class Writer:
    """Files are written in the order of the calls. An error is raised by a later call."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, "records")
        self._pending: deque[Future] = deque()
        self._hurry = threading.Event()
        """Set while somebody waits: no more pauses."""

    def append(self, path: Path, lines: Iterable[str]) -> None:
        self._put(self._append, path, lines)

    def write(self, path: Path, lines: Iterable[str]) -> None:
        self._put(self._replace, path, lines)

    def flush(self) -> None:
        """Returns when all is written."""
        while self._pending:
            self._wait_for_first()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _put(self, write: Callable[..., None], path: Path, lines: Iterable[str]) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._wait_for_first()
        self._pending.append(self._thread.submit(write, path, lines))

    def _wait_for_first(self) -> None:
        self._hurry.set()
        try:
            self._pending.popleft().result()
        finally:
            self._hurry.clear()

    def _replace(self, path: Path, lines: Iterable[str]) -> None:
        """Whoever reads meanwhile sees no half of it."""
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        self._append(partial, lines)
        partial.rename(path)

    def _append(self, path: Path, lines: Iterable[str]) -> None:
        end = time.perf_counter() + SLICE_SECONDS
        with path.open("a") as file:
            for line in lines:
                file.write(line)
                if time.perf_counter() > end:
                    self._hurry.wait(PAUSE_SECONDS)
                    end = time.perf_counter() + SLICE_SECONDS
