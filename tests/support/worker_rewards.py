"""Rewards that tests import by name; the reply says what they do."""

import ctypes
import os
import signal
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path

from roll_lite.sandbox.sandbox import run_program
from roll_lite.types import Score


class OwnError(Exception):
    pass


class DemandingError(Exception):
    """Cannot be unpickled: pickle does not know its second argument."""

    def __init__(self, first, second):
        super().__init__(first)


def length(prompt, reply):
    return len(reply)


def length_by_program(prompt, reply):
    return int(run_program(f"print(len({reply!r}))", isolation="rlimits").stdout)


def with_parts(prompt, reply):
    return Score(value=0.5, parts={"short": True, "long": 0})


def is_imported(prompt, reply):
    return float(reply in sys.modules)


def hang():
    while True:
        time.sleep(0.01)


def starve(seconds):
    """Run for this time on a processor that another process wants too, and rather gets.

    The other is this one's child: Linux shares processors among sessions first. Nothing waits for
    its end, since only a process that is ready to run lacks a processor.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.nice(5)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    other.kill()


def leave_children(marker):
    """A child process, and a daemon whose parent has ended."""
    subprocess.Popen(["sleep", marker])
    daemon = "import os, sys\nif os.fork() == 0: os.setsid(); os.execvp('sleep', sys.argv)"
    subprocess.run([sys.executable, "-c", daemon, marker], check=True)


def do(prompt, reply):
    """The reply is a command with an optional argument."""
    what, _, argument = reply.partition(" ")
    if what == "hang":
        if argument:
            Path(argument).touch()  # says that it hangs now
        hang()
    elif what == "await":
        while not Path(argument).exists():
            time.sleep(0.01)
    elif what == "sleep":
        time.sleep(float(argument))
    elif what == "crash":
        ctypes.string_at(0)
    elif what == "exit":
        os._exit(int(argument))
    elif what == "signal":
        os.kill(os.getpid(), int(argument))
    elif what == "killed-once":
        with suppress(FileExistsError):
            Path(argument).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    elif what == "leave":
        sys.exit(int(argument))
    elif what == "allocate":
        return len(bytearray(int(argument) << 20)) >> 20
    elif what == "print":
        print("x" * (int(argument) << 10))
    elif what == "raise":
        raise OwnError(argument)
    elif what == "demand":
        raise DemandingError(argument, 2)
    elif what == "nan":
        return float("nan")
    elif what == "children":
        leave_children(argument)
    elif what == "children-and-hang":
        leave_children(argument)
        hang()
    elif what == "starve":
        starve(float(argument))
    elif what == "pid":
        return os.getpid()
    elif what == "close":
        os.closerange(3, 1000)
        hang()
    return 1.0


def _percent(prompt, reply):
    return zlib.crc32(f"{prompt.id} {reply}".encode()) % 100


def sometimes_bad(prompt, reply):
    """Hangs on one percent of replies and crashes on another; always on the same ones."""
    percent = _percent(prompt, reply)
    if percent == 0:
        time.sleep(1000)
    if percent == 1:
        os.abort()
    return float(len(reply))


def hangs_on_one(prompt, reply):
    if prompt.id == "m0":
        time.sleep(1000)
    return float(len(reply))


def often_bad(prompt, reply):
    """Raises on half of the replies; always on the same ones."""
    if _percent(prompt, reply) < 50:
        raise KeyError("no such word")
    return float(len(reply))
