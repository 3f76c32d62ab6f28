"""A progress bar, and the timer of a training step."""

import sys
import time

WIDTH = 24
"""Characters of the bar."""


class ProgressBar:
    """On the terminal's last line; prints nothing if standard error is not a terminal."""

    def __init__(self, total: int, label: str, *, enabled: bool = True):
        self.total, self.label = total, label
        self.count = 0
        self._start = self._drawn = time.monotonic()
        self._enabled = enabled and sys.stderr.isatty()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exception) -> None:
        self.clear()

    def advance(self, count: int = 1) -> None:
        self.count += count
        if time.monotonic() - self._drawn > 0.1 or self.count == self.total:
            self.draw()

    def reach(self, count: int) -> None:
        """Advance to a total count."""
        self.advance(count - self.count)

    def draw(self) -> None:
        if not self._enabled:
            return
        self._drawn = time.monotonic()
        seconds = self._drawn - self._start
        filled = WIDTH * self.count // max(1, self.total)
        left = seconds / self.count * (self.total - self.count) if self.count else 0.0
        bar = "#" * filled + "." * (WIDTH - filled)
        sys.stderr.write(
            f"\r\x1b[K{self.label} [{bar}] {self.count}/{self.total}, {seconds:.0f} s, "
            f"{left:.0f} s left"
        )
        sys.stderr.flush()

    def clear(self) -> None:
        """Clear the line for other output; the next draw shows the bar again."""
        if self._enabled:
            clear_line()


def clear_line() -> None:
    """Clear the line of a progress bar, if there is a terminal to draw one."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


class StepTimer:
    """Seconds of the parts of a step, which add up to the whole step."""

    def __init__(self):
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the part `name`."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        parts = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return parts | {"time/step": sum(parts.values())}
