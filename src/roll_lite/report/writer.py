"""Writes records while the run goes on.

A thousand short samples take 20 ms to become lines of JSON, and long ones more. A thread does that
while the next step generates. It works in short slices: the threads that feed the GPU need the same
interpreter, and must not wait for it.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
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
        self._put(path, "a", lines)

    def write(self, path: Path, lines: Iterable[str]) -> None:
        self._put(path, "w", lines)

    def flush(self) -> None:
        """Returns when all is written."""
        self._hurry.set()
        while self._pending:
            self._pending.popleft().result()
        self._hurry.clear()

    def close(self) -> None:
        self.flush()
        self._thread.shutdown()

    def _put(self, path: Path, mode: str, lines: Iterable[str]) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write, path, mode, lines))

    def _write(self, path: Path, mode: str, lines: Iterable[str]) -> None:
        end = time.perf_counter() + SLICE_SECONDS
        with path.open(mode) as file:
            for line in lines:
                file.write(line)
                if time.perf_counter() > end:
                    self._hurry.wait(PAUSE_SECONDS)
                    end = time.perf_counter() + SLICE_SECONDS
