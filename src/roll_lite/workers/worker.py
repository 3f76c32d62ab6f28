"""A process that calls rewards, one after the other, until it is killed."""

import faulthandler
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from roll_lite.sandbox.kernel import adopt_orphans, die_with_parent
from roll_lite.types import Reward
from roll_lite.workers.calls import Limits, describe, evaluate

OUT_OF_MEMORY = 86
"""Exit code of a worker whose reward ran out of memory."""
SHOW_STACK = signal.SIGUSR1
"""Makes a worker print what it is doing."""


def work_and_exit(
    calls: Connection, output: int, rewards: Mapping[str, Reward], limits: Limits
) -> NoReturn:
    """What rewards print goes to `output`."""
    _settle(output, limits)
    with suppress(EOFError):
        while True:
            result = _call(rewards, calls.recv_bytes())
            sys.stdout.flush()
            sys.stderr.flush()
            calls.send_bytes(result)
    os._exit(0)


def _call(rewards: Mapping[str, Reward], payload: bytes) -> bytes:
    """From a pickled prompt and reply to a pickled Score or Failure."""
    try:
        return pickle.dumps(evaluate(rewards, *pickle.loads(payload)))
    except MemoryError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # of any kind: rewards are the user's code
        return pickle.dumps(describe(error))


def _settle(output: int, limits: Limits) -> None:
    os.setsid()
    adopt_orphans()  # so that what a reward leaves behind is found
    die_with_parent()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    faulthandler.register(SHOW_STACK, sys.stderr)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _address_space() + int(limits.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _address_space() -> int:
    """Bytes that this process has mapped: with imported libraries far more than it uses."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()
