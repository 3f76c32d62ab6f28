"""Runs untrusted programs, from any process: `run_program(source)`."""

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

from roll_lite.sandbox.program import (
    Isolation,
    Job,
    Limits,
    Outcome,
    SandboxError,
    SandboxUnavailable,
)

_PACKAGES = str(Path(__file__).parents[2])
_START = (
    "import sys; sys.path.append({packages!r}); "
    "from roll_lite.sandbox.zygote import serve; sys.path.pop(); "
    "serve({descriptor}, {isolation!r})"
)


def run_program(
    source: str,
    *,
    stdin: str = "",
    tests: str = "",
    tests_apart: bool = True,
    limits: Limits = Limits(),  # noqa: B008 (it is frozen)
    isolation: Isolation = "full",
) -> Outcome:
    """Run a Python program once. See `Sandbox`, of which each process has one for this."""
    return _sandbox_of_this_process(isolation).run(
        source, stdin=stdin, tests=tests, tests_apart=tests_apart, limits=limits
    )


class Sandbox:
    """A process that forks programs, one at a time.

    isolation="full" refuses (SandboxUnavailable) where the kernel lacks something that it needs.
    "rlimits" ends programs at their limits, and protects against nothing else: files, network
    and, unless this is root, the user's own processes are within their reach.
    """

    def __init__(self, isolation: Isolation = "full"):
        if isolation not in ("full", "rlimits"):
            raise ValueError(f"isolation={isolation!r} is not known; use full or rlimits")
        self._lock = threading.Lock()
        self._zygote, theirs = Pipe()
        start = _START.format(packages=_PACKAGES, descriptor=theirs.fileno(), isolation=isolation)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", start],
            env=_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        missing = self._receive()
        if missing:
            self.close()
            reasons = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
            raise SandboxUnavailable(
                f"isolation='full' needs what this machine's kernel refuses: {reasons}. Run where "
                "these are allowed, or, for programs that you trust, ask for isolation='rlimits'"
            )

    def run(
        self,
        source: str,
        *,
        stdin: str = "",
        tests: str = "",
        tests_apart: bool = True,
        limits: Limits = Limits(),  # noqa: B008
    ) -> Outcome:
        """`tests` is code that runs after the program, with its names; it must come to its end.

        It runs in a process of its own, which the program cannot reach, and gets data from it
        (see `remote.py`). With tests_apart=False it runs in the program's own process, as if it
        stood there: any test will do, and a program that wants to deceive it can.
        """
        job = Job(source=source, stdin=stdin, tests=tests, tests_apart=tests_apart, limits=limits)
        with self._lock:
            with suppress(BrokenPipeError):  # no answer will come, and that is what is reported
                self._zygote.send(job)
            outcome = self._receive()
        if isinstance(outcome, str):
            raise SandboxError(outcome)
        return outcome

    def close(self) -> None:
        self._zygote.close()
        self._process.wait()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> Outcome | str | dict[str, str]:
        try:
            return self._zygote.recv()
        except (EOFError, ConnectionError):
            raise SandboxError(
                f"the sandbox's process ended with {self._process.wait()}; its standard error says "
                "why"
            ) from None


def _environment() -> dict[str, str]:
    """Nothing of ours but where libraries lie; and sets have the same order every time."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {"PYTHONHASHSEED": "0"}


_open: dict[tuple[int, str], Sandbox] = {}
"""By process and isolation: a fork must not share its parent's."""


def _sandbox_of_this_process(isolation: Isolation) -> Sandbox:
    key = os.getpid(), isolation
    if key not in _open:
        _open[key] = Sandbox(isolation)
        atexit.register(_open[key].close)
    return _open[key]
