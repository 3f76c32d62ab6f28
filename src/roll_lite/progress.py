"""The progress line of long work, the phase of a run, and the timer of a training step.

    with ProgressBar(len(rows), "reading", unit="rows") as bar:
        for row in rows:
            ...
            bar.advance()

Bars may be nested, as the samples of a step in the steps of a run: all share the terminal's last
line. What the program prints meanwhile goes above it. Where the output is not a terminal, long work
prints once a minute on standard error how far it is.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from mmap import mmap
from pathlib import Path
from threading import Lock, RLock
from typing import TextIO

from roll_lite.files import own_content

WIDTH = 16
"""Characters of the bar."""
DRAW_SECONDS = 0.1
PLAIN_SECONDS = 60.0
"""Between two lines where the output is not a terminal."""
PHASE_BYTES = 96
WINDOW = 64
"""Points of time, at least DRAW_SECONDS apart, over which a rate is measured."""
EARLY = 0.05
"""Share of the samples before which no time left is shown: they run side by side, so the first to
end says little about the rest."""


class ProgressBar:
    """How much of some work is done, its rate, and the time left."""

    def __init__(
        self, total: int, label: str, unit: str = "", *, done: int = 0, enabled: bool = True
    ):
        """`unit` is a plural, or bytes; `done` is where a resumed run begins."""
        self.total = total
        self.label = label
        self.unit = unit
        self.count = done
        self.num_tokens = 0
        """Tokens of models, if the work counts them."""
        self._points = deque([(time.monotonic(), done, 0)], maxlen=WINDOW)
        if enabled:
            _LINE.add(self)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def advance(self, count: int = 1, num_tokens: int = 0) -> None:
        self.count += count
        self.num_tokens += num_tokens
        now = time.monotonic()
        if now - self._points[-1][0] > DRAW_SECONDS or self.count == self.total:
            self._points.append((now, self.count, self.num_tokens))
            _LINE.update()

    def reach(self, count: int) -> None:
        """Advance to a total count."""
        self.advance(count - self.count)

    def draw(self) -> None:
        _LINE.draw()

    def close(self) -> None:
        if self in _LINE.bars:
            _LINE.bars.remove(self)
            _LINE.draw()

    def describe(self, *, has_graph: bool = False, is_outer: bool = False) -> str:
        """As in: rollout [####....] 96/256 samples, 14,200 tokens/s, 0:03 left."""
        filled = min(WIDTH, WIDTH * self.count // max(1, self.total))
        graph = f"[{'#' * filled}{'.' * (WIDTH - filled)}] " if has_graph else ""
        scale, unit = (1e9, "GB") if self.unit == "bytes" else (1, self.unit)
        done = "/".join(f"{number / scale:,.3g}" if scale > 1 else f"{number:,}"
                        for number in (self.count, self.total))  # fmt: skip
        return ", ".join(
            [f"{self.label} {graph}{done} {unit}".rstrip(), *self._speed(scale, unit)[is_outer:]]
        )

    def _speed(self, scale: float, unit: str) -> list[str]:
        (start, first, first_tokens), (end, last, last_tokens) = self._points[0], self._points[-1]
        if last <= first or end <= start:
            return []
        rate = (last - first) / (end - start)
        tokens = (last_tokens - first_tokens) / (end - start)
        shown = f"{tokens:,.0f} tokens/s" if tokens else _rate(rate / scale, unit or self.label)
        if tokens and self.count < EARLY * self.total:
            return [shown]
        left = max(0, self.total - self.count) / rate
        return [shown, f"{_clock(left)} left"]


def _rate(rate: float, unit: str) -> str:
    if rate < 1 and unit != "GB":
        return f"{1 / rate:.3g} s/{unit.removesuffix('s')}"
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class _ProgressLine:
    """The terminal's last line, which shows all bars."""

    def __init__(self):
        self.bars: list[ProgressBar] = []
        """The outermost first."""
        self.is_on = True
        self._is_drawn = self._is_mid_line = False
        self._printed_at = time.monotonic()
        self._lock = RLock()
        """Several threads advance bars and print."""

    def add(self, bar: ProgressBar) -> None:
        self.bars.append(bar)
        if self.is_on and is_terminal():
            self._write_above()

    def text(self, width: int | None = None) -> str:
        """All bars, the last one with a graph if it fits the width."""
        shown = [bar for bar in self.bars if bar.total]
        plain = [bar.describe(is_outer=bar is not shown[-1]) for bar in shown]
        if width is None or not shown:
            return " | ".join(plain)
        line = " | ".join([*plain[:-1], shown[-1].describe(has_graph=True)])
        return (line if len(line) <= width else " | ".join(plain))[:width]

    def update(self) -> None:
        """Draw the bars or, where there is no terminal, print now and then how far they are."""
        if is_terminal():
            self.draw()
        elif self.is_on and time.monotonic() - self._printed_at > PLAIN_SECONDS:
            self.clear()
            print(f"progress: {self.text()}", file=sys.stderr, flush=True)

    def draw(self) -> None:
        if not (self.is_on and is_terminal()):
            return
        with self._lock:
            self.clear()
            # One column stays free: a full line would wrap in some terminals.
            if (text := self.text(terminal_width() - 1)) and not self._is_mid_line:
                _write(sys.stderr, text)
                self._is_drawn = True

    def clear(self) -> None:
        with self._lock:
            self._printed_at = time.monotonic()
            if self._is_drawn:
                self._is_drawn = False
                _write(sys.stderr, "\r\x1b[K")

    def _write_above(self) -> None:
        """Have the standard streams clear the line before they write; the next draw is below.

        An attribute of the stream itself: loggers may have kept the stream.
        """
        for stream in (sys.stdout, sys.stderr):
            if "write" not in vars(stream):
                stream.write = partial(self._clear_and_write, stream)

    def _clear_and_write(self, stream: TextIO, text: str) -> int:
        with self._lock:
            self.clear()
            self._is_mid_line = not text.endswith("\n") if text else self._is_mid_line
            return type(stream).write(stream, text)


def _write(stream: TextIO, text: str) -> None:
    type(stream).write(stream, text)
    stream.flush()


_LINE = _ProgressLine()


def turn_off() -> None:
    """Show no progress in this process: on ranks other than 0."""
    _LINE.is_on = False


def is_terminal() -> bool:
    """Whether both streams are a terminal: a pipe may end, as that of tee, in the same one."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def terminal_width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except OSError:  # it was closed at this moment
        return 80


class PhaseFile:
    """What a run is doing now, for a look from outside: one short line, always up to date.

    4711 12 rollout generating scoring      # process, step, phase, and states that samples are in
    """

    def __init__(self, path: str | Path, step: int):
        self._lock = Lock()
        self._line = _mapped(Path(path))
        self._pid = os.getpid()
        self._step = step
        self._states = ""
        self.enter("start")

    def enter(self, phase: str, step: int | None = None) -> None:
        with self._lock:
            self._phase = phase
            self._step = self._step if step is None else step
            self._write()

    def show_states(self, states: Iterable[str]) -> None:
        """States of samples in flight; generation may go on beside any phase."""
        with self._lock:
            self._states = " ".join(states)
            self._write()

    def _write(self) -> None:
        line = f"{self._pid} {self._step} {self._phase} {self._states}".ljust(PHASE_BYTES - 1)
        self._line[:] = f"{line[: PHASE_BYTES - 1]}\n".encode()


def _mapped(path: Path) -> mmap | bytearray:
    """Memory that is the file, so that a change of it costs no call of the system. On a file system
    that cannot do this nothing is shown."""
    try:
        own_content(path)
        path.write_bytes(b" " * PHASE_BYTES)
        with path.open("r+b") as file:
            return mmap(file.fileno(), PHASE_BYTES)
    except OSError:
        return bytearray(PHASE_BYTES)


class StepTimer:
    """Seconds of the parts of a step, which add up to the whole step."""

    def __init__(self, phase: PhaseFile, step: int):
        self._phase = phase
        self._step = step
        self._seconds: dict[str, float] = {}
        self._part = ""
        self._began = 0.0

    def begin(self, part: str) -> None:
        """What comes now is the part of that name, and the phase of the run."""
        self._end_part()
        self._part = part
        self._began = time.perf_counter()
        self._phase.enter(part, self._step)

    def _end_part(self) -> None:
        if self._part:
            seconds = time.perf_counter() - self._began
            self._seconds[self._part] = self._seconds.get(self._part, 0.0) + seconds
        self._part = ""

    def metrics(self) -> dict[str, float]:
        """The last part ends here."""
        self._end_part()
        parts = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return parts | {"time/step": sum(parts.values())}
