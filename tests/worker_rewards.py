"""Rewards for the tests of workers, which import them by name; what they do stands in the reply."""

import ctypes
import os
import subprocess
import sys
import time

from roll_lite.types import Score


class OwnError(Exception):
    pass


class DemandingError(Exception):
    """Cannot be unpickled: pickle does not know its second argument."""

    def __init__(self, first, second):
        super().__init__(first)


def length(prompt, reply):
    return len(reply)


def with_parts(prompt, reply):
    return Score(value=0.5, parts={"short": True, "long": 0})


def hang():
    while True:
        time.sleep(0.01)


def leave_children(marker):
    """One of our own, and one that nobody is the parent of."""
    subprocess.Popen(["sleep", marker])
    daemon = "import os, sys\nif os.fork() == 0: os.setsid(); os.execvp('sleep', sys.argv)"
    subprocess.run([sys.executable, "-c", daemon, marker], check=True)


def do(prompt, reply):
    """The reply is a word and perhaps an argument."""
    what, _, argument = reply.partition(" ")
    if what == "hang":
        hang()
    elif what == "sleep":
        time.sleep(float(argument))
    elif what == "crash":
        ctypes.string_at(0)
    elif what == "exit":
        os._exit(int(argument))
    elif what == "signal":
        os.kill(os.getpid(), int(argument))
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
    elif what == "pid":
        return os.getpid()
    elif what == "close":
        os.closerange(3, 1000)
        hang()
    return 1.0
