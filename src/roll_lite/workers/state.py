"""What a reward may change in its worker process, and the next call must not find changed."""

import _signal
import faulthandler
import os
import resource
import signal
import sys
from typing import Any

SHOW_STACK = signal.SIGUSR1
"""Makes a worker print its stack."""
_SIGNALS = tuple(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_LIMITS = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


class ProcessState:
    """The working folder, file mode mask, environment, signal handlers, alarm and limits of this
    process, as they are now. What modules keep in their variables is not among them.

    Python reports changes of folder, environment and limits, so that `restore` need not look.
    """

    def __init__(self):
        self._folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._environment = dict(os.environb)
        self._handlers = list(map(_signal.getsignal, _SIGNALS))
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._limits = {number: resource.getrlimit(number) for number in _LIMITS}
        self._changed_names: set[bytes] = set()
        self._has_moved = self._has_new_limits = False
        sys.addaudithook(self._notice)

    def restore(self) -> None:
        """Raises OSError or ValueError if this process may not: a limit that was lowered."""
        os.umask(self._umask)
        if self._has_moved:
            os.fchdir(self._folder)
        if self._changed_names:
            self._restore_environment()
        _signal.alarm(0)
        _signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        # That of `signal` makes enums, which takes 20 times as long.
        if list(map(_signal.getsignal, _SIGNALS)) != self._handlers:
            self._restore_handlers()
        if self._has_new_limits:
            for number, limit in self._limits.items():
                resource.setrlimit(number, limit)
        self._has_moved = self._has_new_limits = False

    def _notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.chdir":
            self._has_moved = True
        elif event in ("os.putenv", "os.unsetenv"):
            self._changed_names.add(os.fsencode(arguments[0]))
        elif event in ("resource.setrlimit", "resource.prlimit"):
            self._has_new_limits = True

    def _restore_environment(self) -> None:
        for name in list(self._changed_names):
            os.environb.pop(name, None)
            os.unsetenv(name)  # for what was set without os.environ
            if name in self._environment:
                os.environb[name] = self._environment[name]
        self._changed_names.clear()

    def _restore_handlers(self) -> None:
        for number, handler in zip(_SIGNALS, self._handlers, strict=True):
            if handler is not None:  # None is a handler that Python did not set
                signal.signal(number, handler)
        show_stack_when_asked()


def show_stack_when_asked() -> None:
    """Also after user code has replaced the handlers."""
    faulthandler.disable()
    faulthandler.unregister(SHOW_STACK)
    faulthandler.enable(sys.stderr)
    faulthandler.register(SHOW_STACK, sys.stderr)
