"""How a run ends early without losing work: Ctrl-C, SIGTERM and SIGHUP become a request to stop.

    with cluster.stop_request() as stop:        # the first of them is only noted
        for step in ...:
            ...
            stop.check()                        # raises Stopped, where nothing is lost

A second Ctrl-C ends the process at once.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = """
{name}: stopping. A rollout is abandoned or an update finished, then a checkpoint is written.
Ctrl-C again exits at once, and loses the steps since the last checkpoint.
"""


class Ended(RuntimeError):
    """The run ends between two updates: the weights are those of the last complete step."""


class Stopped(Ended):
    """Ctrl-C, SIGTERM or SIGHUP."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopRequest:
    """A request to stop, made by the first such signal while the object is entered."""

    def __init__(self, before: Callable[[int], None] = lambda signum: None):
        """`before` is called with the signal first, and may raise an error that explains it."""
        self.error: Stopped | None = None
        """Set once the run is to stop."""
        self._before = before
        self._listeners: list[Callable[[Stopped], None]] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # others get no signals
            handled = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]  # nohup, &
            self._handlers = {s: signal.signal(s, self._on_signal) for s in handled}
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def listen(self, listener: Callable[[Stopped], None]) -> None:
        """Call the listener on a request, to abandon long work."""
        self._listeners.append(listener)

    def check(self) -> None:
        """Raise Stopped if there was a request."""
        if self.error:
            raise self.error

    def _on_signal(self, signum: int, frame: object) -> None:
        if self.error:
            if signum == signal.SIGINT:
                os._exit(128 + signum)
            return
        self.error = Stopped(signum)  # first: another signal may arrive meanwhile
        self._before(signum)
        for listener in self._listeners:
            listener(self.error)
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        with suppress(OSError):  # the terminal was closed
            os.write(2, NOTICE.format(name=name).encode())  # print may be what was interrupted
