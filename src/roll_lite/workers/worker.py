"""A worker process: its connection, its limits, and the loop that runs reward calls in it.

The loop that plays episodes is in episodes.py.
"""

import asyncio
import faulthandler
import inspect
import math
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from roll_lite.checks import above
from roll_lite.sandbox.kernel import adopt_orphans, die_with_parent
from roll_lite.types import Prompt, Reward, Score
from roll_lite.workers.failures import Words, describe

OUT_OF_MEMORY = 86
"""Exit code of a worker that ran out of memory."""
SHOW_STACK = signal.SIGUSR1
"""Makes a worker print its stack."""
_LENGTH = struct.Struct("!Q")
_RUNNING = struct.Struct("qdd")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    seconds: float
    """Wall time of one call, or of one step of an episode."""
    memory_gib: float
    """Memory that a worker, and each of its children, may map in addition to what imports took."""
    output_kib: int
    """Output that one call or step may print."""

    def __post_init__(self):
        above(0, self, "seconds", "memory_gib", "output_kib")


class Channel:
    """One end of the connection between the supervisor and a worker.

    A worker reads nothing while user code runs in it, so the supervisor only posts messages: what
    the socket does not take is sent by `flush`. A worker sends, and waits until that is done.
    """

    def __init__(self, end: socket.socket):
        self._socket = end
        self._waiting: deque[memoryview] = deque()

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Any:
        """The next message. Raises EOFError if the other end is closed."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def send(self, message: Any) -> None:
        self._socket.sendall(_framed(message))

    def post(self, message: Any) -> None:
        self._waiting.append(memoryview(_framed(message)))
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self._waiting:
                sent = self._socket.send(self._waiting[0], socket.MSG_DONTWAIT)
                self._waiting[0] = self._waiting[0][sent:]
                if not self._waiting[0]:
                    self._waiting.popleft()

    def stop(self) -> None:
        """Receive only what has arrived already: another process may hold the other end."""
        self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def is_flushed(self) -> bool:
        return not self._waiting

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        num_read = 0
        while num_read < length:
            num_new = self._socket.recv_into(memoryview(data)[num_read:])
            if not num_new:
                raise EOFError
            num_read += num_new
        return data


def _framed(message: Any) -> bytes:
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


class Running:
    """Which job's code runs in a worker now, and since when: 24 bytes that the supervisor reads."""

    def __init__(self):
        self._memory = mmap.mmap(-1, _RUNNING.size)  # shared with the processes forked from here
        self._start = time.monotonic()
        self.busy = 0.0
        """Seconds in which the worker ran code of jobs, as the worker counts them."""
        self.end()

    def begin(self, job_id: int) -> None:
        self._start, used = time.monotonic(), time.process_time()
        _RUNNING.pack_into(self._memory, 0, -1, self._start, used)
        _RUNNING.pack_into(self._memory, 0, job_id, self._start, used)

    def end(self) -> None:
        _RUNNING.pack_into(self._memory, 0, -1, 0.0, 0.0)
        self.busy += time.monotonic() - self._start

    def read(self) -> tuple[int, float, float]:
        """A job, or -1 for none; when its code began, and the processor time used until then."""
        while (found := _RUNNING.unpack_from(self._memory)) != _RUNNING.unpack_from(self._memory):
            continue  # the worker was just writing
        return found

    def close(self) -> None:
        self._memory.close()


Loop = Callable[[Channel, Mapping[str, Any], WorkerLimits, Running], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the workers of a supervisor do: calls of rewards, or episodes of environments."""

    words: Words
    loop: Loop
    """Runs jobs in a worker, until the supervisor closes the channel. It receives (job id, whether
    the job begins, pickled message or None to cancel it), and sends (job id, whether the job has
    ended, pickled message)."""
    jobs_per_worker: int | None
    """None is any number at once."""


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
    channel: Channel,
    output: int,
    loop: Loop,
    table: Mapping[str, Any],
    limits: WorkerLimits,
    running: Running,
) -> NoReturn:
    """Do jobs until the channel closes. User code prints to the descriptor `output`."""
    _set_up(output, limits)
    try:
        with suppress(EOFError):
            loop(channel, table, limits, running)
    except BaseException:  # a fork of the supervisor must not go on as one
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_calls(
    channel: Channel, rewards: Mapping[str, Reward], limits: WorkerLimits, running: Running
) -> None:
    """Call rewards, one after another."""
    while True:
        job_id, _, payload = channel.receive()
        running.begin(job_id)
        result = _call(rewards, payload)
        flush_output()
        running.end()
        channel.send((job_id, True, result))


def _call(rewards: Mapping[str, Reward], payload: bytes) -> bytes:
    """From a pickled prompt and reply to a pickled Score or Failure."""
    try:
        return pickle.dumps(evaluate(rewards, *pickle.loads(payload)))
    except MemoryError:
        exit_without_memory()
    except BaseException as error:  # user code may raise anything
        return pickle.dumps(describe(error))


def exit_without_memory() -> NoReturn:
    """While the MemoryError is handled. What it left behind is unknown, so the worker ends."""
    try:
        traceback.print_exc()
        flush_output()
    finally:
        os._exit(OUT_OF_MEMORY)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # user code may have closed or replaced it
            stream.flush()


def _set_up(output: int, limits: WorkerLimits) -> None:
    os.setsid()
    adopt_orphans()  # so that the supervisor finds every process that user code leaves behind
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
