"""A worker process: its limits, and the loop that runs reward calls in it.

The loop that plays episodes is in episodes.py.
"""

import asyncio
import inspect
import json
import math
import mmap
import os
import pickle
import resource
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from roll_lite.checks import above
from roll_lite.processes import adopt_orphans, die_with_parent
from roll_lite.types import Prompt, Reward, Score
from roll_lite.workers.channel import ENDED, LEAVES, WorkerEnd
from roll_lite.workers.failures import Failure, Words, describe
from roll_lite.workers.state import ProcessState, show_stack_when_asked

OUT_OF_MEMORY = 86
"""Exit code of a worker that ran out of memory."""
LONGEST_REASON = 500
"""Characters of what a reward says of its score."""
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


class Running:
    """Which job's code runs in a worker now, and since when: 24 bytes that the supervisor reads."""

    def __init__(self):
        self._memory = mmap.mmap(-1, _RUNNING.size)  # shared with the processes forked from here
        self._start, self._worker = time.monotonic(), os.getpid()
        self.busy = 0.0
        """Seconds in which the worker ran code of jobs, as the worker counts them."""
        self.end()

    def belong_to_this_process(self) -> None:
        self._worker = os.getpid()

    def begin(self, job_id: int) -> None:
        self._start, used = time.monotonic(), time.process_time()
        _RUNNING.pack_into(self._memory, 0, -1, self._start, used)
        _RUNNING.pack_into(self._memory, 0, job_id, self._start, used)

    def end(self) -> None:
        """Also ends a process that the code forked and that comes back here: it is no worker."""
        if os.getpid() != self._worker:
            os.write(2, b"a process that user code forked came back from it, and was ended\n")
            os._exit(1)
        _RUNNING.pack_into(self._memory, 0, -1, 0.0, 0.0)
        self.busy += time.monotonic() - self._start

    def read(self) -> tuple[int, float, float]:
        """A job, or -1 for none; when its code began, and the processor time used until then."""
        while (found := _RUNNING.unpack_from(self._memory)) != _RUNNING.unpack_from(self._memory):
            continue  # the worker was just writing
        return found

    def close(self) -> None:
        self._memory.close()


Loop = Callable[[WorkerEnd, Mapping[str, Any], WorkerLimits, Running], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the workers of a supervisor do: calls of rewards, or episodes of environments."""

    words: Words
    loop: Loop
    """Runs jobs in a worker, until the supervisor closes the channel. It receives (job id, whether
    the job begins, pickled message or None to cancel it), and sends what channel.py describes."""
    read: Callable[[Any], Any]
    """From the JSON that the loop sent to a message; raises an exception if it is none."""
    jobs_per_worker: int | None
    """None is any number at once."""
    import_ahead: Callable[[Iterable[Any]], None] | None = None
    """Imports what the jobs would import later, before the workers are forked, which share it."""


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
    return _plain_score(score.value, score.parts, score.reason)


def _plain_score(value: float, parts: Mapping[str, float], reason: str) -> Score:
    """Plain numbers, and a text of a bounded length, can always be sent."""
    if not math.isfinite(value := float(value)):
        raise ValueError(f"reward={value} is not a finite number")
    parts = {str(name): float(part) for name, part in parts.items()}
    return Score(value=value, parts=parts, reason=str(reason)[:LONGEST_REASON])


def work_and_exit(
    channel: WorkerEnd,
    output: int,
    loop: Loop,
    table: Mapping[str, Any],
    limits: WorkerLimits,
    running: Running,
) -> NoReturn:
    """Do jobs until the channel closes. User code prints to the descriptor `output`."""
    running.belong_to_this_process()
    _set_up(output, limits)
    try:
        with suppress(EOFError):
            loop(channel, table, limits, running)
    except BaseException:  # a fork of the supervisor must not go on as one
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_calls(
    channel: WorkerEnd, rewards: Mapping[str, Reward], limits: WorkerLimits, running: Running
) -> None:
    """Call rewards, one after another, each in the process state that the first one found."""
    state = ProcessState()
    while True:
        job_id, _, payload = channel.receive()
        running.begin(job_id)
        result = _call(rewards, payload)
        flush_output()
        running.end()
        channel.send((job_id, ENDED if _restored(state) else LEAVES, write_result(result)))


def _call(rewards: Mapping[str, Reward], payload: bytes) -> Score | Failure:
    """From a pickled pair: the prompt, itself pickled, and a reply."""
    try:
        prompt, reply = pickle.loads(payload)
        return evaluate(rewards, pickle.loads(prompt), reply)
    except MemoryError:
        exit_without_memory()
    except BaseException as error:  # user code may raise anything
        return describe(error)


def _restored(state: ProcessState) -> bool:
    try:
        state.restore()
    except (OSError, ValueError):
        return False
    return True


def write_result(result: Score | Failure) -> bytes:
    if isinstance(result, Failure):
        return json.dumps({"failure": result.text, "kind": result.kind}).encode()
    told = {"value": result.value, "parts": result.parts, "reason": result.reason}
    return json.dumps(told).encode()


def read_result(fields: Any) -> Score | Failure:
    """Raises an exception for what `write_result` does not write."""
    if "failure" in fields:
        return Failure(str(fields["kind"]), str(fields["failure"]))
    return _plain_score(fields["value"], fields["parts"], fields["reason"])


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
    show_stack_when_asked()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _address_space() + int(limits.memory_gib * 2**30)
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v`
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _address_space() -> int:
    """Bytes that this process has mapped; imported libraries map far more than they use."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()
