"""A worker process: runs reward calls one after another until it is killed."""

import asyncio
import faulthandler
import inspect
import math
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from roll_lite.checks import above
from roll_lite.sandbox.kernel import adopt_orphans, die_with_parent
from roll_lite.types import Prompt, Reward, Score
from roll_lite.workers.failures import describe

OUT_OF_MEMORY = 86
"""Exit code of a worker whose reward ran out of memory."""
SHOW_STACK = signal.SIGUSR1
"""Makes a worker print its stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    seconds: float
    """Wall time of one call."""
    memory_gib: float
    """Memory that a worker, and each of its children, may map in addition to what imports took."""
    output_kib: int
    """Output that one call may print."""

    def __post_init__(self):
        above(0, self, "seconds", "memory_gib", "output_kib")


def evaluate(rewards: Mapping[str, Reward], prompt: Prompt, reply: str) -> Score:
    score = rewards[prompt.domain](prompt, reply)
    if inspect.isawaitable(score):  # of a function that does not look like an `async def`
        score = asyncio.run(_wait_for(score))
    return checked(score)


async def _wait_for(score: Awaitable[Score | float]) -> Score | float:
    return await score


def checked(score: Score | float) -> Score:
    """What a reward returned, as a Score of finite numbers."""
    score = Score.of(score)
    parts = {name: float(part) for name, part in score.parts.items()}
    score = Score(value=float(score.value), parts=parts)  # plain floats can always be pickled
    if not math.isfinite(score.value):
        raise ValueError(f"reward={score.value} is not a finite number")
    return score


def work_and_exit(
    calls: Connection, output: int, rewards: Mapping[str, Reward], limits: WorkerLimits
) -> NoReturn:
    """Serve calls until the connection closes. Rewards print to the descriptor `output`."""
    _set_up(output, limits)
    with suppress(EOFError):
        while True:
            result = _call(rewards, calls.recv_bytes())
            sys.stdout.flush()
            sys.stderr.flush()
            calls.send_bytes(result)
    os._exit(0)


def _call(rewards: Mapping[str, Reward], payload: bytes) -> bytes:
    """From a pickled prompt and reply to a pickled Score or RewardFailure."""
    try:
        return pickle.dumps(evaluate(rewards, *pickle.loads(payload)))
    except MemoryError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # user code may raise anything
        return pickle.dumps(describe(error))


def _set_up(output: int, limits: WorkerLimits) -> None:
    os.setsid()
    adopt_orphans()  # so that the supervisor finds every process that a reward leaves behind
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
    """Bytes that this process has mapped; imported libraries map far more than they use."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()
